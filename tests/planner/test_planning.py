"""plan() and compare(): arguments, baselines, and a verified plan or a plain error."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Plan
from teraio.errors import InfeasibleError, InputError
from teraio.planner import PLANNERS, compare, plan, plan_summary
from teraio.planner import planning as planning_module
from teraio.traces.trace import Trace


def test_plan_records_where_it_comes_from(
    small_trace: Trace, small_hardware: Hardware, tmp_path: Path
) -> None:
    """Budgets applied to the hardware's text, hashes and identities copied; it survives a save."""
    made = plan(small_trace, small_hardware, gpu_memory="12kB", host_memory="90kB")
    metadata = made.metadata
    assert made.hardware == small_hardware.with_budgets(12_000, 90_000)
    assert (metadata.gpu_memory_bytes, metadata.host_memory_bytes) == (12_000, 90_000)
    assert metadata.trace_hash == small_trace.hash
    assert metadata.planner == "optimal"
    assert metadata.allocator_rounding_bytes == 512
    assert metadata.planning_seconds > 0
    assert made.ideal_seconds <= metadata.lower_bound_seconds <= made.predicted_seconds
    assert made.gap == pytest.approx(made.predicted_seconds / metadata.lower_bound_seconds - 1)
    made.save(tmp_path / "small.plan")
    assert Plan.load(tmp_path / "small.plan").content_hash() == made.content_hash()


def test_paths_are_as_good_as_values(
    small_trace: Trace, small_hardware: Hardware, tmp_path: Path
) -> None:
    """A saved trace and a hardware file give the plan that the values give."""
    small_trace.save(tmp_path / "small.trace")
    small_hardware.save(tmp_path / "small.toml")
    from_files = plan(tmp_path / "small.trace", str(tmp_path / "small.toml"), gpu_memory=13_000)
    from_values = plan(small_trace, small_hardware, gpu_memory=13_000)
    assert from_files.moves.equals(from_values.moves)


def test_ideal_has_unlimited_memory_and_on_demand_none_to_spare(
    small_trace: Trace, small_hardware: Hardware
) -> None:
    """Neither moves anything; only the ideal one fits, and only it takes the ideal time."""
    ideal = plan(small_trace, small_hardware, planner="ideal", gpu_memory=12_000)
    assert ideal.predicted_seconds == pytest.approx(small_trace.ideal_seconds, abs=1e-11)
    assert ideal.metadata.gpu_memory_bytes == small_trace.peak_allocated_bytes
    on_demand = plan(small_trace, small_hardware, planner="on-demand", gpu_memory=12_000)
    assert on_demand.metadata.gpu_memory_bytes == 12_000
    assert len(ideal.moves) == len(on_demand.moves) == 0
    optimal = plan(small_trace, small_hardware, gpu_memory=12_000)
    assert ideal.predicted_seconds <= optimal.predicted_seconds < on_demand.predicted_seconds


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"planner": "psychic"}, r"'psychic' is not one of \['activation-only', "),
        ({"transform": "unroll"}, "transform: 'unroll'"),
        ({"bandwidth_share": 0.0}, "bandwidth_share: must be above 0"),
        ({"bandwidth_share": 1.5}, "bandwidth_share: must be above 0 and at most 1, got 1.5"),
        ({"time_limit": 0.0}, "time_limit: must be above 0"),
        ({"gpu_memory": "lots"}, "gpu_memory: cannot read 'lots'"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: dict[str, object], message: str, small_trace: Trace, small_hardware: Hardware
) -> None:
    """Each error names the argument and what it may be."""
    with pytest.raises(InputError, match=message):
        plan(small_trace, small_hardware, **arguments)  # type: ignore[arg-type]


def test_infeasible_budget_is_an_answer(small_trace: Trace, small_hardware: Hardware) -> None:
    """One kernel alone needs more than 3 kB."""
    with pytest.raises(InfeasibleError, match=r"kernel \d \(aten\.\w+\) needs \d+ bytes.*3000"):
        plan(small_trace, small_hardware, gpu_memory="3kB")


def test_invalid_plan_never_leaves(
    small_trace: Trace, small_hardware: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planner that shifts a slot is caught by the verifier, with the first violation."""

    def broken(
        trace: Trace, hardware: Hardware, bandwidth_share: float, time_limit: float | None
    ) -> Plan:
        made = PLANNERS["greedy"](trace, hardware, bandwidth_share, time_limit)
        moves = replace(made.moves, tier_offset_bytes=made.moves.tier_offset_bytes + 1)
        return replace(made, moves=moves)

    monkeypatch.setattr(planning_module, "PLANNERS", {"broken": broken})
    with pytest.raises(RuntimeError, match="planner broken made a plan that does not verify"):
        plan(small_trace, small_hardware, planner="broken", gpu_memory=12_000)


def test_progress_is_reported(small_trace: Trace, small_hardware: Hardware) -> None:
    """In words, in order."""
    told: list[str] = []
    plan(small_trace, small_hardware, progress=told.append)
    assert told == ["planning (optimal)", "bounding", "verifying"]
    told.clear()
    plan(small_trace, small_hardware, bound=False, progress=told.append)
    assert told == ["planning (optimal)", "verifying"]


def test_comparison_has_a_row_per_planner(small_trace: Trace, small_hardware: Hardware) -> None:
    """In the order given; the disjoint account sums to the iteration, which was predicted."""
    table = compare(small_trace, small_hardware, gpu_memory=12_000)
    assert table["planner"].tolist() == ["ideal", "optimal", "greedy", "on-demand"]
    assert set(plan_summary(plan(small_trace, small_hardware))) <= set(table.columns)
    account = table[[c for c in table.columns if c.startswith(("stall_", "compute_", "gap_"))]]
    np.testing.assert_allclose(account.sum(axis=1), table["iteration_seconds"], rtol=1e-9)
    np.testing.assert_allclose(table["predicted_seconds"], table["iteration_seconds"], rtol=1e-12)
    assert table["peak_gpu_bytes"].dtype == "Int64"
    assert table["demand_fetches"].tolist()[:3] == [0, 0, 0]
    assert table["demand_fetches"].tolist()[3] > 0
    assert (table["note"] == "").all()


def test_planner_without_a_plan_has_nulls_and_a_note(
    small_trace: Trace, small_hardware: Hardware
) -> None:
    """The ideal is unlimited; the others need more than 3 kB for one kernel."""
    table = compare(small_trace, small_hardware, gpu_memory="3kB").set_index("planner")
    assert table.loc["ideal", "note"] == ""
    for planner in ("optimal", "greedy", "on-demand"):
        assert "needs" in str(table.loc[planner, "note"])
        assert table["predicted_seconds"].isna()[planner]
        assert table["peak_gpu_bytes"].isna()[planner]


def test_summary_has_the_promised_keys(small_trace: Trace, small_hardware: Hardware) -> None:
    """Those of the command ``plan``; unknown values are None."""
    summary = plan_summary(plan(small_trace, small_hardware))
    assert list(summary) == [
        "planner",
        "predicted_seconds",
        "ideal_seconds",
        "lower_bound_seconds",
        "bound_kind",
        "gap",
        "fraction_of_ideal",
        "peak_gpu_bytes",
        "peak_host_bytes",
        "ssd_bytes_written",
        "planning_seconds",
        "bound_seconds",
        "value_of_gb",
        "value_of_gb_per_second",
        "dollars_per_million_tokens",
        "ssd_years",
    ]
    assert summary["value_of_gb"] is None


def test_planning_loads_neither_torch_nor_matplotlib() -> None:
    """Checked in a fresh interpreter, after all public names have loaded."""
    code = (
        "import sys, teraio.planner as p; [getattr(p, n) for n in p.__all__];"
        "sys.exit(any(m in sys.modules for m in ('torch', 'matplotlib')))"
    )
    path = {"PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src")}
    assert subprocess.run([sys.executable, "-c", code], env=path, check=False).returncode == 0


G10 = [("BERT_Base-256", 0.9965), ("Inceptionv3-1536", 0.9772), ("ResNet152-1280", 0.9840)]


@pytest.mark.parametrize(("name", "published"), G10)
def test_published_results_of_g10_are_reached(
    name: str, published: float, shared_data: Path, import_g10: Callable[[Path], Trace]
) -> None:
    """On its machine with 128 GiB of host memory, at least G10's own fraction of the ideal.

    The figures are those of the headline comparison; its simulator moves pages, ours storages.
    """
    trace = import_g10(shared_data / "g10" / "derived" / f"{name}.json.gz")
    made = plan(trace, "g10")
    assert made.fraction_of_ideal >= published


def test_gains_from_host_memory_and_ssd_rate_are_monotone_enough(
    shared_data: Path, import_g10: Callable[[Path], Trace]
) -> None:
    """ResNet152-1280 with 0, 32 and 128 GiB of host memory, and with a twice faster SSD."""
    trace = import_g10(shared_data / "g10" / "derived" / "ResNet152-1280.json.gz")
    hardware = Hardware.preset("g10")
    host = [plan(trace, hardware, host_memory=f"{g}GiB").fraction_of_ideal for g in (0, 32, 128)]
    assert host == sorted(host)
    ssd = replace(
        hardware.ssd[0],
        read_rate=6.4e9,
        write_rate=6.4e9,
        duplex_read_rate=6.4e9,
        duplex_write_rate=6.4e9,
    )
    faster = plan(trace, replace(hardware, ssd=(ssd,)), host_memory="32GiB")
    assert faster.fraction_of_ideal > host[1]
