"""The benchmark of kernel timing runs, at toy size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_benchmark_runs_at_toy_size(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    script = ROOT / "benchmarks" / "kernel_timing.py"
    command = [sys.executable, str(script), "--smoke", "--iterations", "2", "--output", str(output)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=250)
    result = json.loads(output.read_text())
    assert result["timed"] == result["calls"] - 2  # CPUs lack the GPU's attention, both ways.
    assert result["predicted_seconds"] > 0
    assert result["error"] == pytest.approx(
        result["predicted_seconds"] / result["measured_seconds"] - 1
    )
    assert set(result["by_operator_seconds"]) == {"predicted"}
