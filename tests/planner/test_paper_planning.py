"""The benchmark that plans the paper's models: its runs, its tables, and how it resumes."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from teraio.contracts.hardware import Hardware
from teraio.traces.trace import Trace

ROOT = Path(__file__).resolve().parents[2]
_RUN_FIELDS = (
    "model",
    "dtype",
    "host_memory",
    "time_limit",
    "bandwidth_share",
    "jitter",
    "real_bandwidth",
)


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """The script as a module, loaded from its folder as Python does."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("paper_planning")
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def runs(script: ModuleType) -> ModuleType:
    """Settings, and what is measured of each."""
    return importlib.import_module("paper_plan_runs")


@pytest.fixture(scope="module")
def tables(script: ModuleType) -> ModuleType:
    """Rows as tables."""
    return importlib.import_module("paper_plan_tables")


@pytest.fixture(scope="module")
def trace(runs: ModuleType) -> Trace:
    """Two layers, six micro-batches."""
    made: Trace = runs.synthetic_trace(runs._SMALL)
    return made


@pytest.fixture
def budgeted(trace: Trace) -> Hardware:
    """The paper's machine with half the memory that the trace needs, and no host."""
    return Hardware.preset("paper").with_budgets(trace.peak_allocated_bytes // 2, 0)


@pytest.fixture
def make_row(runs: ModuleType) -> Callable[..., dict[str, Any]]:
    """A row as the script keeps it; a plan that takes 110 s where 100 s is the ideal."""

    def make(planner: str = "optimal", **changed: Any) -> dict[str, Any]:
        run = {"model": "70b", "dtype": "fp32", "host_memory": "0", "planner": planner}
        run |= {name: changed.pop(name) for name in list(changed) if name in _RUN_FIELDS}
        figures = {
            "made_on": "a machine",
            "commit": "abc",
            "ideal_seconds": 100.0,
            "predicted_seconds": 110.0,
            "fraction_of_ideal": 100 / 110,
            "lower_bound_seconds": 108.0,
            "bound_kind": "dual",
            "gap": 110 / 108 - 1,
            "first_plan_seconds": 1.0,
            "planning_seconds": 5.0,
            "planning_cpu_seconds": 6.0,
            "bound_seconds": 7.0,
            "bound_cpu_seconds": 8.0,
            "moves": 1234,
            "evictions": 0,
        }
        return asdict(runs.Run(**run)) | figures | changed

    return make


def _cells(table: str) -> list[dict[str, str]]:
    """Lines of a Markdown table by heading; of headings alike the last."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def test_settings_are_those_of_the_paper(runs: ModuleType) -> None:
    sizes = {
        name: (s.sequence, s.micro_batch_size, s.micro_batches, s.stages)
        for name, s in runs.MODELS.items()
    }
    assert sizes == {
        "8b": (4096, 2, 64, 2),
        "granite": (4096, 2, 64, 2),
        "70b": (2048, 4, 64, 2),
    }


def test_noise_changes_durations_by_a_tenth_and_nothing_else(
    runs: ModuleType, trace: Trace
) -> None:
    noisy = runs.with_jitter(trace, 0.1)
    ratio = noisy.kernels.duration_seconds / trace.kernels.duration_seconds
    assert ratio.mean() == pytest.approx(1, abs=0.02)
    assert ratio.std() == pytest.approx(0.1, rel=0.2)
    assert noisy.hash == runs.with_jitter(trace, 0.1).hash != trace.hash
    same = replace(noisy.kernels, duration_seconds=trace.kernels.duration_seconds)
    assert replace(noisy, kernels=same).hash == trace.hash


def test_slower_hardware_has_a_share_of_every_rate(runs: ModuleType) -> None:
    hardware = Hardware.preset("rtx4090")
    slow = runs.slowed(hardware, 0.5)
    assert slow.ssd[0].duplex_read_rate == hardware.ssd[0].duplex_read_rate / 2
    assert slow.link[0].write_rate == hardware.link[0].write_rate / 2
    assert slow.host.read_rate == hardware.host.read_rate / 2
    assert slow.host.memory_bytes == hardware.host.memory_bytes
    assert runs.slowed(slow, 2.0) == hardware


def test_a_run_is_planned_bounded_and_simulated(
    runs: ModuleType, trace: Trace, budgeted: Hardware
) -> None:
    run = runs.Run(model="8b", dtype="fp32", host_memory="0", planner="optimal")
    found = runs.measure(run, trace, budgeted)
    assert found["bound_kind"] in ("dual", "tiled-dual")
    assert found["lower_bound_seconds"] <= found["predicted_seconds"]
    assert found["simulated_seconds"] == pytest.approx(found["predicted_seconds"])
    assert found["evictions"] == 0
    assert found["first_fraction_of_ideal"] <= found["fraction_of_ideal"] + 1e-9
    assert found["planning_seconds"] > 0
    assert found["bound_cpu_seconds"] > 0


def test_slower_channels_cost_time_and_noise_is_planned_for(
    runs: ModuleType, trace: Trace, budgeted: Hardware
) -> None:
    run = runs.Run(model="8b", dtype="fp32", host_memory="0", planner="greedy")
    slow = runs.measure(replace(run, real_bandwidth=0.5), trace, budgeted)
    assert slow["slower_seconds"] > slow["predicted_seconds"]
    noisy = runs.measure(replace(run, jitter=0.1), trace, budgeted)
    assert noisy["ideal_seconds"] != slow["ideal_seconds"]


def test_a_planner_without_a_plan_says_why(
    runs: ModuleType, trace: Trace, budgeted: Hardware
) -> None:
    run = runs.Run(model="8b", dtype="fp32", host_memory="0", planner="zero-offload")
    found = runs.measure(run, trace, budgeted)
    assert found["no_plan"] == "CapacityError"
    assert "host" in found["note"]


@pytest.mark.slow
def test_a_process_of_its_own(runs: ModuleType, trace: Trace, tmp_path: Path) -> None:
    """It reads the trace kept under the setting's name, and ends in time."""
    trace.save(tmp_path / "8b-fp32-6.trace")
    run = runs.Run(
        model="8b",
        dtype="fp32",
        host_memory="0",
        planner="on-demand",
        micro_batches=6,
        gpu_memory=str(trace.peak_allocated_bytes // 2),
    )
    found = runs.measure_apart(run, tmp_path, 250)
    assert found["kernels"] == trace.num_kernels
    assert found["evictions"] > 0
    assert runs.measure_apart(run, tmp_path, 0.01)["no_plan"] == "timeout"


@pytest.mark.parametrize(("code", "words"), [(-9, "ended by SIGKILL"), (1, "last words")])
def test_a_process_that_fails_is_told_by_its_last_words(
    runs: ModuleType, monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    done = subprocess.CompletedProcess([], code, stdout="", stderr="first\nlast words\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    run = runs.Run(model="8b", dtype="fp32", host_memory="0", planner="ideal")
    with pytest.raises(RuntimeError, match=words):
        runs.measure_apart(run, None, 1)


def test_plans_are_fractions_of_ideal_beside_the_papers(
    tables: ModuleType, make_row: Callable[..., dict[str, Any]]
) -> None:
    rows = [
        make_row(),
        make_row("greedy", fraction_of_ideal=0.8),
        make_row("g10", fraction_of_ideal=0.5, evictions=3),
        make_row("on-demand", fraction_of_ideal=0.4, evictions=9),
        make_row("zero-offload") | {"no_plan": "CapacityError", "note": "why"},
        make_row(time_limit=300.0, fraction_of_ideal=0.92, gap=0.001),
        make_row(jitter=0.1, fraction_of_ideal=0.1),
    ]
    del rows[4]["fraction_of_ideal"]
    (line,) = _cells(tables.plans_table(rows))
    assert (line["no plan is above"], line["teraio"], line["gap"]) == ("92.6 %", "90.9 %", "1.85 %")
    assert (line["teraio, 300 s"], line["gap, 300 s"]) == ("92.0 %", "0.10 %")
    assert line["the paper's greedy"] == "80.0 %"
    assert line["G10"] == "50.0 % (3 evictions)"
    assert line["on demand"] == "40.0 %"
    assert line["ZeRO-Offload"] == "host or SSD too small"
    assert line["the paper measured"] == "59.7 %"


@pytest.mark.parametrize(
    ("no_plan", "note", "words"),
    [
        ("CapacityError", "needs 9 bytes (9 B) of host", "host or SSD too small"),
        ("CapacityError", "kernel 8 needs 9 bytes of GPU memory, because", "GPU too small"),
        ("InfeasibleError", "kernel 8 alone needs 9 bytes of GPU memory", "GPU too small"),
        ("timeout", "stopped after 600 s", "stopped after 600 s"),
    ],
)
def test_why_there_is_no_plan(
    tables: ModuleType,
    make_row: Callable[..., dict[str, Any]],
    no_plan: str,
    note: str,
    words: str,
) -> None:
    row = make_row("greedy", no_plan=no_plan, note=note)
    for name in ("fraction_of_ideal", "planning_seconds", "ideal_seconds"):
        del row[name]
    (line,) = _cells(tables.plans_table([row]))
    assert line["the paper's greedy"] == words
    assert line["ideal"] == "-"


def test_a_setting_that_a_planner_has_not_seen_has_a_dash(
    tables: ModuleType, make_row: Callable[..., dict[str, Any]]
) -> None:
    rows = [make_row(), make_row(dtype="tf32"), make_row("greedy", host_memory="512GB")]
    first, second, third = _cells(tables.plans_table(rows))
    assert [first["tiers"], second["tiers"], third["tiers"]] == ["SSD", "SSD and host", "SSD"]
    assert first["the paper's greedy"] == "-"
    assert second["teraio"] == "-"
    assert third["the paper measured"] == ""


def test_times_stand_beside_the_papers(
    tables: ModuleType, make_row: Callable[..., dict[str, Any]]
) -> None:
    (line,) = _cells(tables.times_table([make_row(), make_row("greedy", planning_seconds=99.0)]))
    assert line["first plan"] == "1 s"
    assert line["planning"] == "5 s"
    assert line["proved in"] == "7 s"
    assert line["greedy"] == "99 s"
    assert line["the paper's planning"] == "397 s"
    assert line["on-demand evictions"] == "0"


def test_robustness_is_a_growth_and_two_losses(
    tables: ModuleType, make_row: Callable[..., dict[str, Any]]
) -> None:
    rows = [
        make_row(gap=0.01),
        make_row(gap=0.015, jitter=0.1),
        make_row(real_bandwidth=0.9, slower_seconds=121.0),
        make_row(real_bandwidth=0.9, bandwidth_share=0.9, slower_seconds=110.55),
    ]
    (line,) = _cells(tables.robustness_table(rows))
    assert (line["gap"], line["with noise"], line["more by"]) == (
        "1.00 %",
        "1.50 %",
        "+0.50 points",
    )
    assert line["at 90 % of the rates, planned for all, it loses"] == "10.00 %"
    assert line["planned for 90 %, it loses"] == "0.50 %"


def test_rows_are_kept_resumed_and_rendered(
    script: ModuleType,
    make_row: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A failed run is told and tried again; a known one is not run again unless asked."""
    asked: list[str] = []
    broken = {"greedy"}

    def measure_apart(run: Any, folder: Path | None, timeout: float) -> dict[str, Any]:
        asked.append(run.planner)
        if run.planner in broken:
            raise RuntimeError("out of luck")
        return {name: value for name, value in make_row().items() if name not in asdict(run)}

    def call(*more: str) -> int:
        output, document = tmp_path / "rows.json", tmp_path / "paper.md"
        document.write_text("<!-- measured: plans -->\nold\n<!-- end -->\n")
        setting = ["--models", "8b", "--dtypes", "fp32", "--host", "0"]
        options = ["--planners", "greedy,optimal", "--output", output, "--document", document]
        monkeypatch.setattr(sys, "argv", ["x", *setting, *map(str, options), *more])
        with pytest.raises(SystemExit) as ended:
            script.main()
        assert isinstance(ended.value.code, int)
        return ended.value.code

    monkeypatch.setattr(script, "measure_apart", measure_apart)
    assert call() == 1
    assert asked == ["optimal", "greedy"]
    broken.clear()
    assert call() == 0
    assert asked == ["optimal", "greedy", "greedy"]
    assert call("--render-only") == call("--again", "--skip-greedy") == 0
    assert asked == ["optimal", "greedy", "greedy", "optimal"]
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["planner"] for row in rows] == ["greedy", "optimal"]
    assert "90.9 %" in (tmp_path / "paper.md").read_text()


def test_wrong_names_are_refused(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--models", "9b"])
    with pytest.raises(SystemExit, match="2"):
        script.main()
    assert "'9b' is not one of 8b, granite, 70b" in capsys.readouterr().err


def test_the_document_holds_every_block(script: ModuleType, tables: ModuleType) -> None:
    """If this fails: python benchmarks/paper_planning.py --render-only."""
    document = importlib.import_module("paper_document")
    assert set(tables.BLOCKS) <= set(document.blocks_of())


def test_the_document_tells_the_rows_that_are_kept(script: ModuleType, tables: ModuleType) -> None:
    """If this fails: python benchmarks/paper_planning.py --render-only."""
    document = importlib.import_module("paper_document")
    rows = json.loads(script._OUTPUT.read_text())["rows"]
    found = document.blocks_of()
    assert np.all([found[name] == text for name, text in tables.blocks(rows).items()])
