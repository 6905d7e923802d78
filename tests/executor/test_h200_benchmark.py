"""The benchmark of every way to train in less memory runs, at toy size on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, *arguments: str) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, rows and page of a run with its files in ``folder``."""
    output = folder / "rows.json"
    script = ROOT / "benchmarks" / "h200.py"
    command = [sys.executable, str(script), "--smoke", "--output", str(output), *arguments]
    command += ["--output-folder", str(folder / "kept")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, check=False, capture_output=True, text=True, timeout=250
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    page = output.with_suffix(".md")
    return done.returncode, json.loads(output.read_text())["rows"], page.read_text()


@pytest.mark.slow
def test_every_contender_that_needs_no_gpu_is_measured(tmp_path: Path) -> None:
    code, rows, page = run(tmp_path)
    assert code == 0
    assert not [row["failed"] for row in rows if "failed" in row]
    of_name = {row["contender"]: row for row in rows}
    assert set(of_name) == {
        *("ideal", "empty-plan", "teraio"),
        *("save-on-cpu", "checkpointing", "fsdp2"),
    }
    first_losses = {row["losses"][0] for row in rows}
    assert max(first_losses) - min(first_losses) < 1e-5, "contenders train different things"
    for row in rows:
        assert row["step_seconds"] > 0
        assert len(row["all_step_seconds"]) == 3
    planned = of_name["teraio"]
    assert planned["bit_identical"] is True
    assert planned["moves_found"] == planned["moves_planned"] > 0
    assert planned["report_peak_bytes"] <= planned["budget_bytes"]
    assert planned["lower_bound_seconds"] <= planned["predicted_seconds"] * (1 + 1e-9)
    assert "teraio, 80 % of the peak" in page


@pytest.mark.slow
def test_rows_are_measured_once_and_traces_used_again(tmp_path: Path) -> None:
    run(tmp_path, "--rows", "teraio")
    kept = tmp_path / "kept"
    trace = next(kept.glob("*.trace"))
    before = trace.stat().st_mtime_ns
    _, rows, _ = run(tmp_path, "--rows", "teraio", "--plans-from", str(kept))
    _, again, _ = run(tmp_path, "--rows", "teraio", "--plans-from", str(kept), "--again")
    assert len(rows) == len(again) == 1
    assert again[0]["run"] > rows[0]["run"]
    assert again[0]["arena_bytes"] == rows[0]["arena_bytes"]
    assert trace.stat().st_mtime_ns == before, "recorded again"


def test_a_contender_that_fails_is_a_row_and_leaves_the_page_whole(tmp_path: Path) -> None:
    """torchao's optimizer wants a GPU (and torchao): its process fails, the command goes on."""
    code, rows, page = run(tmp_path, "--rows", "torchao")
    assert code == 1
    assert [row["contender"] for row in rows if "failed" in row] == ["torchao"]
    assert "torchao CPUOffloadOptimizer failed:" in page
