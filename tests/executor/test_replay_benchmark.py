"""The benchmark of replays runs, at toy size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_benchmark_runs_at_toy_size() -> None:
    """Every planned move is made, and on demand no more is moved than simulated."""
    command = [sys.executable, str(ROOT / "benchmarks" / "replay_accuracy.py"), "--smoke"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True, timeout=250
    )
    result = json.loads(done.stdout)
    assert [row["planner"] for row in result["rows"]] == ["greedy", "on-demand"] * 2
    for row in result["rows"]:
        assert row["moves_found"] == row["moves_planned"]
        assert row["transfers_checked"] > 0
        error = row["replayed_seconds"] / row["predicted_seconds"] - 1
        assert row["error"] == pytest.approx(error)
        if row["planner"] == "greedy":
            assert row["demand_fetches"] == 0
        else:
            # The executor evicts the smallest storages last, the simulator does not care.
            assert 0 < row["demand_fetches"] <= row["predicted_demand_fetches"]
    assert result["worst_error"] == max(abs(row["error"]) for row in result["rows"])
