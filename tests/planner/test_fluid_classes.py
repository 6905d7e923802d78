"""Classes of gaps: which periods are part of which, that bytes add up, and what tails cost."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.planner.layered import layered_trace
from tests.planner.optimal_cases import least_bytes

from teraio.contracts.hardware import Hardware
from teraio.planner.fluid.bound import lower_bound
from teraio.planner.fluid.classes import gap_classes
from teraio.planner.fluid.slots import cut_into_slots
from teraio.planner.planning import plan as make_plan
from teraio.traces.lifetimes import inactive_periods
from teraio.traces.trace import Trace

MakeTrace = Callable[..., Trace]
MakeHardware = Callable[..., Hardware]


@pytest.mark.parametrize("max_seconds", [None, 1.0, 3.0])
def test_each_period_is_in_the_row_of_its_slots(
    random_trace: Callable[[int], Trace], max_seconds: float | None
) -> None:
    """A row's bytes are those of its periods, and all of them move in its slots."""
    compared = 0
    for seed in range(40):
        trace = random_trace(seed)
        slots = cut_into_slots(trace, max_seconds, runs_may_stretch=False)
        gaps, periods = gap_classes(trace, slots), inactive_periods(trace)
        row, count = gaps.row_of_period, len(slots)
        assert len(row) == len(periods)
        who = np.flatnonzero(row >= 0)
        release = slots.unrolled(2 * periods.after_kernel[who] + 1)
        due = slots.unrolled(2 * periods.end_kernel[who] - 1)
        assert np.array_equal(gaps.release[row[who]] % count, release % count)
        assert np.array_equal((gaps.due - gaps.release)[row[who]], due - release)
        sizes = trace.storages.nbytes[periods.storage]
        total = np.bincount(row[who], weights=sizes[who], minlength=len(gaps))
        assert np.array_equal(total, gaps.num_bytes)
        moves = trace.storages.resizable[periods.storage] & (sizes > 0) & ~periods.is_tail
        out = np.flatnonzero((row < 0) & moves)
        release = slots.unrolled(2 * periods.after_kernel[out] + 1)
        assert np.array_equal(release, slots.unrolled(2 * periods.end_kernel[out] - 1))
        compared += len(who)
    assert compared > 100


def test_alike_versions_are_one_class(make_trace: MakeTrace) -> None:
    """X and Y wait in the same slots, Z in others; P is never written, and its copy serves it."""
    trace = make_trace(
        [1.0] * 5,
        [("X", 10, 0, 3), ("Y", 7, 0, 3), ("Z", 5, 1, 4), ("P", 3, None, None)],
        [
            *((0, "X", "w"), (3, "X", "r"), (0, "Y", "w"), (3, "Y", "r")),
            *((1, "Z", "w"), (4, "Z", "r"), (0, "P", "r"), (2, "P", "r")),
        ],
    )
    gaps = gap_classes(trace, cut_into_slots(trace, None, runs_may_stretch=False))
    assert sorted(gaps.num_bytes.tolist()) == [3, 3, 5, 17]
    served = np.flatnonzero(gaps.previous >= 0)
    assert sorted(gaps.previous[served].tolist()) == served.tolist()


def test_classes_by_size_keep_large_and_small_apart(make_trace: MakeTrace) -> None:
    """Three wait in the same slots: 8 B and 15 B are alike within a factor of two, 64 B is not."""
    trace = make_trace(
        [1.0] * 4,
        [("X", 8, 0, 3), ("Y", 15, 0, 3), ("Z", 64, 0, 3)],
        [(k, name, how) for name in "XYZ" for k, how in ((0, "w"), (3, "r"))],
    )
    slots = cut_into_slots(trace, None, runs_may_stretch=False)
    assert gap_classes(trace, slots).num_bytes.tolist() == [87]
    assert sorted(gap_classes(trace, slots, by_size=True).num_bytes.tolist()) == [23, 64]


def test_what_is_never_read_again_is_written(
    make_trace: MakeTrace, make_hardware: MakeHardware
) -> None:
    """A (100 B) is last used by 1 and must be away in 3: at 50 B/s kernel 2 hides half of it."""
    trace = make_trace(
        [1.0] * 6,
        [("A", 100, 0, 5), ("B", 100, 3, 3)],
        [(0, "A", "w"), (1, "A", "r"), (3, "B", "w")],
    )
    for rate, seconds in ((50.0, 7.0), (100.0, 6.0)):
        hardware = make_hardware(100, ssd_rate=rate, host_bytes=0)
        assert lower_bound(trace, hardware).seconds == pytest.approx(seconds, abs=1e-6)
        assert make_plan(trace, hardware).predicted_seconds == pytest.approx(seconds, abs=1e-6)


def test_slots_end_with_layers_and_where_they_are_full(make_trace: MakeTrace) -> None:
    """Kernels of 1 s in slots of at most 2.5 s; one that is longer has a slot of its own."""
    trace = make_trace([1.0, 1.0, 1.0, 4.0, 1.0], [("X", 1, 0, 1)], [(0, "X", "w"), (1, "X", "r")])
    slots = cut_into_slots(trace, 2.5, runs_may_stretch=False)
    assert slots.of_piece[0::2].tolist() == [0, 0, 1, 2, 3]
    assert slots.seconds.tolist() == [2.0, 1.0, 4.0, 1.0]


def test_steps_of_the_optimizer_are_told_apart_in_slots_however_long(
    make_hardware: MakeHardware,
) -> None:
    """Six steps touch 120 B each, and the GPU has 150 B: the bound knows with slots of a layer what
    it knows with one for each kernel. In one slot for all steps they would come and go for nothing.
    """
    trace = layered_trace(layers=6, micro_batches=1)
    hardware = make_hardware(least_bytes(trace), ssd_rate=10.0, host_bytes=0)
    fine, coarse = (
        lower_bound(trace, hardware, slot_seconds=seconds).seconds for seconds in (0.5, 1e6)
    )
    assert coarse == pytest.approx(fine, rel=1e-6)
