"""The benchmark of every way to train in less memory runs, at toy size on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from teraio.contracts.plan import Plan

if TYPE_CHECKING:
    from benchmarks.h200_plain import Plain, PlainTraining, Steps
    from benchmarks.h200_rows import Contender, Setting, add_row, boot_id, kept_ideal, load_rows
    from benchmarks.h200_tables import page
else:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
    from h200_plain import Plain, PlainTraining, Steps
    from h200_rows import Contender, Setting, add_row, boot_id, kept_ideal, load_rows
    from h200_tables import page

    sys.path.remove(str(Path(__file__).resolve().parents[2] / "benchmarks"))

ROOT = Path(__file__).resolve().parents[2]
REPORTS = ROOT / "benchmarks" / "reports"


def run(folder: Path, *arguments: str, fails: bool = False) -> tuple[list[dict[str, Any]], str]:
    """Rows and page of a run with its files in ``folder``, which fails if it is to."""
    output = folder / "rows.json"
    script = ROOT / "benchmarks" / "h200.py"
    command = [sys.executable, str(script), "--smoke", "--output", str(output), *arguments]
    command += ["--output-folder", str(folder / "kept")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, check=False, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == (1 if fails else 0), done.stdout + done.stderr
    page = output.with_suffix(".md")
    return load_rows(output), page.read_text() if page.exists() else ""


@pytest.mark.slow
def test_every_contender_that_needs_no_gpu_is_measured(tmp_path: Path) -> None:
    rows, page = run(tmp_path)
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
def test_a_run_is_split_into_tracing_planning_and_executing(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    teraio = ("--rows", "teraio", "--plans-from", str(kept), "--planner", "greedy")
    rows, _ = run(tmp_path, *teraio, "--until", "trace")
    made = {path: path.stat().st_mtime_ns for path in kept.iterdir()}
    assert not rows
    assert {path.suffix for path in made} == {".trace", ".toml"}
    rows, _ = run(tmp_path, *teraio, "--until", "plan")
    plan = next(kept.glob("*.plan"))
    made[plan] = plan.stat().st_mtime_ns
    assert not rows
    rows, _ = run(tmp_path, *teraio, "--exact-steps", "4")
    assert rows[0]["moves"] == len(Plan.load(plan).moves) > 0
    assert rows[0]["plan_of_earlier_run"]
    assert (rows[0]["bit_identical"], rows[0]["compared_steps"]) == (True, 4)
    again, _ = run(tmp_path, *teraio)
    assert again == rows, "measured what was there"
    for path, when in made.items():
        assert path.suffix == ".toml" or path.stat().st_mtime_ns == when, f"made {path} again"


def test_a_contender_that_fails_is_a_row_and_leaves_the_page_whole(tmp_path: Path) -> None:
    """torchao's optimizer wants a GPU (and torchao): its process fails, the command goes on."""
    rows, page = run(tmp_path, "--rows", "torchao", fails=True)
    assert [row["contender"] for row in rows if "failed" in row] == ["torchao"]
    assert "torchao CPUOffloadOptimizer failed:" in page


def test_plain_training_is_run_once_on_a_machine_and_its_bits_serve_others(tmp_path: Path) -> None:
    setting = Setting(model="tiny-llama", micro_batch_size=1, sequence=16, device="cpu")
    steps = Steps(exact=3, warm_up=1, timed=1)
    training = PlainTraining(setting, steps, None)
    training.run_for_comparison()
    first = training.run()
    assert first.runs_agree is True
    assert (len(first.exact_losses), len(first.losses)) == (3, 5)
    path = tmp_path / "plain.json"
    first.save(path)
    assert kept_ideal(path) == first.step_seconds

    fewer = PlainTraining(setting, replace(steps, exact=2), first)
    fewer.run_for_comparison()
    assert fewer.run() is first, "measured what was known"

    elsewhere = replace(first, boot="another start")
    elsewhere.save(path)
    assert kept_ideal(path) is None
    training = PlainTraining(setting, steps, elsewhere)
    training.run_for_comparison()
    timed = training.run()
    assert (timed.exact_losses, timed.runs_agree) == (first.exact_losses, True)
    assert (timed.boot, len(timed.losses)) == (boot_id(), 2)

    other_versions: Plain = replace(first, made_on="another machine", exact_losses=[0.0] * 3)
    training = PlainTraining(setting, steps, other_versions)
    training.run_for_comparison()
    assert training.run().exact_losses == first.exact_losses


def row_of(contender: Contender, **figures: Any) -> dict[str, Any]:
    """A row as the file holds it."""
    made = {"made_on": "a machine", "commit": "1234567", "run": "now", "options": {}}
    return contender.key(Setting().as_key()) | made | figures


def test_a_row_replaces_the_one_of_its_key_but_no_measurement_by_a_failure() -> None:
    rows = [row_of(Contender("ideal"), step_seconds=2.0)]
    rows = add_row(rows, row_of(Contender("teraio", 0.8), step_seconds=3.0))
    assert len(rows) == 2, "another contender"
    rows = add_row(rows, row_of(Contender("teraio", 0.8), step_seconds=2.5))
    assert [row["step_seconds"] for row in rows] == [2.0, 2.5]
    assert add_row(rows, row_of(Contender("teraio", 0.8), failed="why")) == rows
    assert len(add_row(rows, row_of(Contender("teraio", 0.6), failed="why"))) == 3


def test_page_shows_shares_memory_and_reasons() -> None:
    figures = {
        "step_seconds": 2.8,
        "ideal_seconds": 2.73,
        "share_of_ideal": 0.975,
        "max_memory_allocated": 64_000_000_000,
        "max_memory_reserved": 65_000_000_000,
        "budget_bytes": 65_100_000_000,
        "simulated_seconds": 2.772,
        "prediction_error": -0.01,
        "lower_bound_seconds": 2.74,
        "share_of_bound": 2.74 / 2.8,
        "host_bytes": 30_000_000_000,
    }
    rows = [
        row_of(Contender("torchao"), failed="no GPU"),
        row_of(Contender("deepspeed-cpu"), **figures),
        row_of(Contender("ideal"), step_seconds=2.73, runs_agree=True),
    ]
    lines = page(rows).splitlines()
    assert (
        "| DeepSpeed ZeRO-3, CPU | 2.80 s | 2.73 s | 97.5 % | 64.0 GB | 65.0 GB | 65.1 GB | 2.77 s "
        "| -1.0 % | 2.74 s | 97.9 % | 30.0 GB |"
    ) in lines
    names = [line.split("|")[1].strip() for line in lines if line.startswith("| ")]
    assert names[2:] == ["no offloading (ideal)", *("torchao CPUOffloadOptimizer",), names[-1]]
    assert "torchao CPUOffloadOptimizer failed: `no GPU`." in lines
    assert "Two runs without a plan agree bit for bit." in lines


def test_page_has_the_median_and_the_worst_error_of_predictions() -> None:
    figures = {"step_seconds": 2.8, "prediction_error": 0.0}
    rows = [
        row_of(Contender("torchao"), failed="no GPU"),
        *(
            row_of(Contender("teraio", share), **figures | {"prediction_error": error})
            for share, error in ((0.8, 0.01), (0.6, -0.044), (0.5, -0.02))
        ),
    ]
    line = "Error of the prediction over 3 plans: median 2.0 %, worst 4.4 %."
    assert line in page(rows).splitlines()


def test_the_committed_page_is_that_of_the_committed_rows() -> None:
    """If this fails: python benchmarks/h200.py --render-only."""
    rows = load_rows(REPORTS / "h200.json")
    if not rows:
        pytest.skip("no rows of a GPU are committed")
    assert (REPORTS / "h200.md").read_text() == page(rows)
