"""The benchmark of two ranks runs where there is no GPU, and finds nothing that differs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import distributed

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not distributed.is_available(), reason="needs torch.distributed"),
]


def test_two_ranks_on_a_cpu(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    options = ["--parallel", "fsdp2", "--device", "cpu", "--model", "tiny-llama"]
    options += ["--sequence", "32", "--hardware", "cpu", "--host-memory", "200MB"]
    options += ["--planner", "greedy", "--steps", "4", "--output", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, str(ROOT / "benchmarks" / "two_gpus.py"), *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(row["rank"] for row in rows) == [0, 1]
    written = [json.loads(path.read_text())["fsdp2"] for path in sorted(tmp_path.iterdir())]
    assert written == sorted(rows, key=lambda row: row["rank"])
    for row in rows:
        assert row["plain_runs_agree"]
        assert row["bit_identical"], row["executed"]["differences"]
        assert row["executed"]["peak_bytes"] <= row["budget_bytes"]
        assert row["moves"] > 0
        assert row["executed"]["moves_found"] == row["moves"]
