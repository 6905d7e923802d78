"""The benchmark of planning runs and reports what it promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_smoke_run_of_planning() -> None:
    """A small run prints one JSON object with machine, versions, options and measurements."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "benchmarks" / "planning.py"), "--smoke"]
    output = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=240
    )
    result = json.loads(output.stdout)
    assert {"machine", "versions", "options", "model", "peak_resident_bytes"} <= set(result)
    measured = result["synthetic"]
    assert measured["kernels"] > 500
    assert measured["moves"] > 0
    assert 0 < measured["fraction_of_ideal"] <= 1 + 1e-9
    assert result["g10"] == []
