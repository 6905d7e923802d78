"""The greedy planner: instances solved by hand, and promises kept on random ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Moves, Plan
from teraio.errors import CapacityError, InfeasibleError
from teraio.planner.greedy import plan_greedy
from teraio.planner.greedy_search import GreedySearch
from teraio.planner.residency import resident_bytes
from teraio.planner.verifier import verify
from teraio.traces.trace import Trace

MakeTrace = Callable[..., Trace]
MakeHardware = Callable[..., Hardware]


def check(trace: Trace, plan: Plan) -> None:
    """The independent verifier agrees, and no kernel exceeds the budget."""
    verification = verify(trace, plan)
    assert verification.valid, verification.violations
    assert verification.fits, verification.violations
    assert plan.metadata.peak_gpu_bytes <= plan.metadata.gpu_memory_bytes


def test_transfer_that_hides_behind_kernels_costs_nothing(
    one_tensor: Trace, make_hardware: MakeHardware
) -> None:
    """Capacity 100, 100 B/s. A must be away in 2 and 3: out during 1, back during 4.

    Optimum 6 s, the ideal; every plan moves A, and any other window of it stalls.
    """
    plan = plan_greedy(one_tensor, make_hardware(100, host_bytes=0))
    check(one_tensor, plan)
    moves = plan.moves
    assert (moves.storage.tolist(), moves.tier.tolist()) == ([0], ["ssd"])
    assert (moves.free_by.tolist(), moves.prefetch_start.tolist()) == ([2], [4])
    assert plan.predicted_seconds == pytest.approx(6.0, abs=1e-9)


def test_transfer_too_slow_to_hide_stalls_by_the_difference(
    one_tensor: Trace, make_hardware: MakeHardware
) -> None:
    """At 50 B/s each transfer takes 2 s and only 1 s of kernels is there to hide it.

    Optimum 8 s = 6 s of kernels + 1 s for the offload + 1 s for the prefetch: A has no other
    period, and B none at all.
    """
    plan = plan_greedy(one_tensor, make_hardware(100, ssd_rate=50.0, host_bytes=0))
    check(one_tensor, plan)
    assert plan.predicted_seconds == pytest.approx(8.0, abs=1e-9)


def two_tensors(make_trace: MakeTrace) -> Trace:
    """A and C (100 B each) wait from 0 to 5; B (200 B) lives in 2 and 3."""
    return make_trace(
        [1.0] * 6,
        [("A", 100, 0, 5), ("C", 100, 0, 5), ("B", 200, 2, 3)],
        [(0, "A", "w"), (0, "C", "w"), (5, "A", "r"), (5, "C", "r"), (2, "B", "w"), (3, "B", "r")],
    )


def test_host_takes_what_the_ssd_cannot(make_trace: MakeTrace, make_hardware: MakeHardware) -> None:
    """Capacity 200: both must be away in 2 and 3, and each tier can carry one in time.

    Optimum 6 s with one on each; both on one tier would cost 8 s.
    """
    trace = two_tensors(make_trace)
    plan = plan_greedy(trace, make_hardware(200))
    check(trace, plan)
    assert sorted(plan.moves.tier.tolist()) == ["host", "ssd"]
    assert plan.predicted_seconds == pytest.approx(6.0, abs=1e-9)


def test_without_host_budget_the_ssd_carries_both(
    make_trace: MakeTrace, make_hardware: MakeHardware
) -> None:
    """Optimum 8 s: 200 B at 100 B/s take 2 s each way, of which 1 s hides."""
    trace = two_tensors(make_trace)
    plan = plan_greedy(trace, make_hardware(200, host_bytes=0))
    check(trace, plan)
    assert plan.moves.tier.tolist() == ["ssd", "ssd"]
    assert plan.predicted_seconds == pytest.approx(8.0, abs=1e-9)


def test_storage_that_is_only_read_is_dropped_without_a_write(
    make_trace: MakeTrace, make_hardware: MakeHardware
) -> None:
    """W is read by 0 and 5 and never written; moving it costs a read only.

    Optimum 6 s even at a write rate at which no tensor could leave in time.
    """
    trace = make_trace(
        [1.0] * 6,
        [("W", 100, None, None), ("B", 100, 1, 4)],
        [(0, "W", "r"), (5, "W", "r"), (1, "B", "w"), (4, "B", "r")],
    )
    plan = plan_greedy(trace, make_hardware(150, host_bytes=0, ssd_rate=200.0))
    check(trace, plan)
    assert not plan.moves.writes.any()
    assert plan.metadata.ssd_bytes_written == {"ssd0": 0}


def test_tail_is_moved_where_it_helps(make_trace: MakeTrace, make_hardware: MakeHardware) -> None:
    """A is last read by 1 but dies after 5; B needs its room in 3 and 4.

    Optimum 6 s: A is written out during 2 and never comes back.
    """
    trace = make_trace(
        [1.0] * 6,
        [("A", 100, 0, 5), ("B", 100, 3, 4)],
        [(0, "A", "w"), (1, "A", "r"), (3, "B", "w"), (4, "B", "r")],
    )
    plan = plan_greedy(trace, make_hardware(100, host_bytes=0))
    check(trace, plan)
    assert plan.moves.prefetch_start.tolist() == [-1]
    assert plan.predicted_seconds == pytest.approx(6.0, abs=1e-9)


def test_period_over_the_cut_is_used(make_trace: MakeTrace, make_hardware: MakeHardware) -> None:
    """W is used by 3 only, so it may be away from 4 to 2; B needs its room in 0 and 1.

    Optimum 6 s: out during 4 or 5, back during 2.
    """
    trace = make_trace(
        [1.0] * 6,
        [("W", 100, None, None), ("B", 100, 0, 1)],
        [(3, "W", "rw"), (0, "B", "w"), (1, "B", "r")],
    )
    plan = plan_greedy(trace, make_hardware(100, host_bytes=0))
    check(trace, plan)
    assert plan.storages.placement.tolist() == ["ssd", "gpu"]
    assert plan.predicted_seconds == pytest.approx(6.0, abs=1e-9)


def test_nothing_moves_where_everything_fits(
    one_tensor: Trace, make_hardware: MakeHardware
) -> None:
    """At the trace's own peak the plan is empty; one byte less, and A must leave."""
    assert len(plan_greedy(one_tensor, make_hardware(200)).moves) == 0
    assert len(plan_greedy(one_tensor, make_hardware(199)).moves) == 1


def test_kernel_that_needs_too_much_is_named(
    one_tensor: Trace, make_hardware: MakeHardware
) -> None:
    """Kernel 0 holds the 100 bytes of A, whatever leaves."""
    with pytest.raises(InfeasibleError, match=r"kernel 0 \(op0\) alone needs 100 bytes.*99"):
        plan_greedy(one_tensor, make_hardware(99))


def test_storage_that_cannot_leave_makes_it_infeasible(
    make_trace: MakeTrace, make_hardware: MakeHardware
) -> None:
    """The same trace with memory that cannot be given back needs both tensors at once."""
    trace = make_trace(
        [1.0] * 6,
        [("A", 100, 0, 5), ("B", 100, 2, 3)],
        [(0, "A", "w"), (5, "A", "r"), (2, "B", "w"), (3, "B", "r")],
        resizable=False,
    )
    with pytest.raises(InfeasibleError, match="kernel 2"):
        plan_greedy(trace, make_hardware(150))


def test_tiers_too_small_are_an_error(one_tensor: Trace, make_hardware: MakeHardware) -> None:
    """Neither the host nor the SSD can hold A."""
    hardware = make_hardware(100, host_bytes=99, capacity_bytes=99)
    with pytest.raises(
        CapacityError, match=r"kernel \d \(op\d\): the tiers have no room .*host 99 B, ssd0 99 B"
    ):
        plan_greedy(one_tensor, hardware)


def test_ssd_without_room_for_its_bounce_buffer_is_not_used(
    one_tensor: Trace, make_hardware: MakeHardware
) -> None:
    """The host holds A (512 B with alignment), but not a bounce buffer of 4096 B as well."""
    bouncing = make_hardware(100, gds=False, bounce_bytes=4096, host_bytes=4000)
    plan = plan_greedy(one_tensor, bouncing)
    check(one_tensor, plan)
    assert plan.moves.tier.tolist() == ["host"]
    with pytest.raises(CapacityError, match="host 0 B, ssd0 0 B"):
        plan_greedy(one_tensor, bouncing.with_budgets(host_memory=0))


def test_bandwidth_share_shapes_the_plan_but_not_the_prediction(
    one_tensor: Trace, make_hardware: MakeHardware
) -> None:
    """Planned for half the rate, A must still be away in 2 and 3; the real rate hides it."""
    plan = plan_greedy(one_tensor, make_hardware(100, host_bytes=0), bandwidth_share=0.5)
    check(one_tensor, plan)
    assert plan.predicted_seconds == pytest.approx(6.0, abs=1e-9)
    assert plan.metadata.options["bandwidth_share"] == 0.5


def budgets(trace: Trace, make_hardware: MakeHardware, share: float) -> tuple[int, int]:
    """A GPU budget between what some kernel must hold and what the trace would like to."""
    search = GreedySearch.begin(trace, make_hardware(10**9), 1.0)
    away = np.zeros(trace.num_kernels, dtype=np.int64)
    for period in search.candidates:
        for kernel in range(period["away_first"], period["away_end"]):
            away[kernel % trace.num_kernels] += period["relief_bytes"]
    needed = int((search.resident - away).max())
    return needed + int(share * (trace.peak_allocated_bytes - needed)), needed


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    share=st.sampled_from([0.0, 0.1, 0.5, 0.9]),
    host_bytes=st.sampled_from([0, 100, 10**6]),
    num_ssds=st.sampled_from([0, 1, 2]),
    ssd_rate=st.sampled_from([20.0, 1000.0]),
)
def test_plans_of_random_traces_are_valid_and_fit(
    seed: int,
    share: float,
    host_bytes: int,
    num_ssds: int,
    ssd_rate: float,
    random_trace: Callable[[int], Trace],
    make_hardware: MakeHardware,
) -> None:
    """Down to the last byte that any plan needs; never faster than the ideal."""
    trace = random_trace(seed)
    gpu_bytes, needed = budgets(trace, make_hardware, share)
    host_bytes = host_bytes if num_ssds > 0 else 10**6
    hardware = make_hardware(gpu_bytes, host_bytes=host_bytes, num_ssds=num_ssds, ssd_rate=ssd_rate)
    plan = plan_greedy(trace, hardware)
    check(trace, plan)
    assert plan.predicted_seconds >= trace.ideal_seconds * (1 - 1e-9)
    if needed > 0:
        with pytest.raises(InfeasibleError):
            plan_greedy(trace, make_hardware(needed - 1))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_planning_twice_gives_the_same_plan(
    seed: int, random_trace: Callable[[int], Trace], make_hardware: MakeHardware
) -> None:
    """All tables equal; only the time that planning took may differ."""
    trace = random_trace(seed)
    hardware = make_hardware(budgets(trace, make_hardware, 0.3)[0], host_bytes=200)
    first, second = plan_greedy(trace, hardware), plan_greedy(trace, hardware)
    assert first.moves.equals(second.moves)
    assert first.storages.equals(second.storages)
    assert first.copies.equals(second.copies)
    assert first.predicted_seconds == second.predicted_seconds


def test_resident_bytes_without_moves_is_the_trace_own_peak(
    random_trace: Callable[[int], Trace],
) -> None:
    """Two ways to count what is allocated agree."""
    for seed in range(50):
        trace = random_trace(seed)
        resident = resident_bytes(
            trace.storages, trace.kernels.workspace_bytes, Moves.empty(), trace.num_kernels
        )
        assert int(resident.max()) == trace.peak_allocated_bytes
