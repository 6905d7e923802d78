"""The benchmark's script runs and reports what it promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_smoke_run() -> None:
    """A small run prints one JSON object with machine, versions, options and speeds."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    script = ROOT / "benchmarks" / "simulator_speed.py"
    command = [sys.executable, str(script), "--smoke", "--repeats", "1"]
    output = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=240
    )
    result = json.loads(output.stdout)
    assert {"machine", "versions", "options", "peak_resident_bytes"} <= set(result)
    assert result["measured"]["plan"]["demand_fetches"] == 0
    assert result["measured"]["plan at 90 % of its memory"]["demand_fetches"] > 0
    assert all(case["kernels_per_second"] > 0 for case in result["measured"].values())
