"""What simulate() accepts and refuses, and with which words."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Plan
from teraio.errors import InputError
from teraio.simulator import simulate
from teraio.simulator.engine_setup import build_engine
from teraio.simulator.machine_arrays import machine_arrays
from teraio.simulator.simulation import failure_of
from teraio.simulator.steady_state import find_cycle
from teraio.traces.trace import Trace

CaseBuilder = Callable[..., Any]

SSD_READ = 2


def five_kernels(case: CaseBuilder) -> Any:
    """x at kernels 0 and 4, t from 1 to 3, f fixed."""
    c = case().storage("x", 10).storage("t", 10, birth=1, death=3)
    c.storage("f", 10, resizable=False)
    c.kernel("x", "f").kernel(writes=["t"]).kernels(2).kernel("x")
    c.move("x", 0, 4, offload=0, free=2, prefetch=3)
    c.move("t", 1, None, offload=1, free=2, offset=32)
    return c


def test_five_kernels_is_right(case: CaseBuilder) -> None:
    """The plan that the table below breaks is accepted as it is."""
    assert five_kernels(case).simulate().seconds == 6


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"storage": [0, 7]}, r"moves.storage, row 1: must be in 0..2, got 7"),
        ({"storage": [0, 2]}, r"moves.storage, row 1: is not resizable and cannot move, got 2"),
        ({"offload_start": [0, 5]}, r"moves.offload_start, row 1: must be a kernel in 0..4, got 5"),
        ({"prefetch_start": [-1, -1]}, r"moves.prefetch_start, row 0: must be null exactly if"),
        (
            {"nbytes": [-1, 0]},
            r"moves.nbytes, row 0: must be the nbytes of the row",
        ),
        ({"device": ["nvme", "ssd"]}, r"moves.device, row 0: must be one of \['host', 'ssd'\]"),
        ({"tier": ["host", "ssd"]}, r"moves.tier, row 0: must be the tier of the row's device"),
        ({"after_kernel": [1, 1]}, r"moves.after_kernel, row 0: must be an access of the storage"),
        ({"before_kernel": [3, -1]}, r"moves.before_kernel, row 0: must be the storage's next acc"),
        (
            {"before_kernel": [-1, -1], "prefetch_start": [-1, -1]},
            r"moves.before_kernel, row 0: must not be null, the storage is accessed again",
        ),
        (
            {"before_kernel": [4, 3], "prefetch_start": [3, 3]},
            r"moves.before_kernel, row 1: must be null, the storage is never accessed again",
        ),
        ({"free_by": [2, 1]}, r"moves.free_by, row 1: must not come after the storage's death"),
        ({"offload_start": [2, 1]}, r"moves.free_by, row 0: must come after offload_start, got 2"),
        ({"free_by": [3, 2]}, r"moves.prefetch_start, row 0: must come after free_by, got 3"),
        ({"prefetch_start": [0, -1]}, r"moves.prefetch_start, row 0: must not come after before"),
    ],
)
def test_wrong_moves_are_refused(
    case: CaseBuilder, columns: dict[str, list[Any]], message: str
) -> None:
    """One line that names column, row and what it must be."""
    c = five_kernels(case)
    with pytest.raises(InputError, match=message):
        simulate(c.trace, c.edited(**columns), c.hardware)


def test_two_moves_for_one_period_are_refused(case: CaseBuilder) -> None:
    """A storage leaves once per inactive period."""
    c = five_kernels(case)
    c.move("x", 0, 4, offload=1, free=2, prefetch=4, offset=64)
    with pytest.raises(InputError, match=r"row 2: a second move for the same inactive period"):
        c.simulate()


def test_plan_of_another_trace_is_refused(case: CaseBuilder) -> None:
    """Other numbers of kernels or storages, or other sizes."""
    c, longer = five_kernels(case), five_kernels(case).kernel()
    with pytest.raises(InputError, match="another trace; it has 5 kernels, the trace 6"):
        simulate(longer.trace, c.plan)
    more = five_kernels(case).storage("more", 1)
    with pytest.raises(InputError, match="another trace; it has 3 storages, the trace 4"):
        simulate(more.trace, c.plan)
    other = case().storage("x", 11).storage("t", 10, birth=1, death=3).storage("f", 10)
    other.kernel("x", "f").kernel(writes=["t"]).kernels(2).kernel("x")
    with pytest.raises(InputError, match="another trace; sizes"):
        simulate(other.trace, c.plan)


def test_hardware_is_needed_without_a_plan(case: CaseBuilder) -> None:
    """With a plan, the plan's machine serves."""
    c = five_kernels(case)
    with pytest.raises(InputError, match="hardware: needed where there is no plan"):
        simulate(c.trace)
    assert simulate(c.trace, c.plan).iteration_seconds == 6


@pytest.mark.parametrize("iterations", [0, -1, 1.5, True])
def test_max_iterations_must_be_positive(case: CaseBuilder, iterations: Any) -> None:
    """Zero iterations have no mean."""
    with pytest.raises(InputError, match="max_iterations: must be a positive integer"):
        five_kernels(case).simulate(max_iterations=iterations)


def test_budget_must_be_a_size(case: CaseBuilder) -> None:
    """The message names the argument."""
    with pytest.raises(InputError, match="gpu_memory: cannot read 'much'"):
        five_kernels(case).simulate(gpu_memory="much")


def test_paths_and_presets_serve_as_well(case: CaseBuilder, tmp_path: Path) -> None:
    """Trace and plan from disk, hardware by a preset's name."""
    c = five_kernels(case)
    c.trace.save(tmp_path / "t.trace")
    c.plan.save(tmp_path / "p.plan")
    timeline = simulate(tmp_path / "t.trace", tmp_path / "p.plan")
    assert timeline.iteration_seconds == 6
    with pytest.raises(InputError, match="must be one of"):
        simulate(str(tmp_path / "t.trace"), str(tmp_path / "p.plan"), "paper")
    assert simulate(str(tmp_path / "t.trace"), None, "paper").iteration_seconds == 5


def test_a_rank_sees_the_ssds_that_its_gpu_reaches(small_hardware: Hardware) -> None:
    """Rank 0 does not reach the SSD of GPU 1."""
    assert machine_arrays(small_hardware, 0).devices == ["host", "near"]
    assert machine_arrays(small_hardware, 1).devices == ["host", "near", "far"]


def test_the_shared_small_plan_runs(
    small_trace: Trace, small_plan: Plan, small_hardware: Hardware
) -> None:
    """Every kind of move in one plan: it follows itself, within its budget to the byte."""
    timeline = simulate(small_trace, small_plan)
    metadata = timeline.metadata
    assert metadata.demand_fetches == metadata.evictions == 0
    assert metadata.peak_gpu_bytes == small_plan.metadata.gpu_memory_bytes
    assert metadata.steady
    read, written = metadata.channel_bytes["host read"], metadata.channel_bytes["host write"]
    assert (read, written) == (7000, 2500)
    events = timeline.to_pandas()
    moved = events[events.what == "transfer"].groupby("channel").bytes.sum()
    assert {k: v for k, v in metadata.channel_bytes.items() if v} == moved.to_dict()
    assert np.isclose(
        sum(timeline.account.values()), timeline.iteration_seconds, rtol=0, atol=1e-12
    )


def test_engine_that_cannot_go_on_says_what_it_waits_for(case: CaseBuilder) -> None:
    """Never a hang: a requirement that no transfer meets is an error with kernel and storage."""
    c = five_kernels(case)
    machine = machine_arrays(c.hardware, 0)
    engine = build_engine(c.trace, c.plan, machine, record=False)
    engine.required[4, SSD_READ] = 99
    with pytest.raises(InputError, match=r"plan: kernel 4 \(op4\) waits for storage 0"):
        find_cycle(engine, 8, partial(failure_of, c.trace, machine), None)


def test_progress_can_stop_a_simulation(case: CaseBuilder) -> None:
    """An exception in the callback reaches the caller."""

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        five_kernels(case).simulate(progress=stop)
