"""The optimal planner: instances solved by hand, and promises kept on random ones."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from tests.planner.layered import layered_trace
from tests.planner.optimal_cases import (
    least_bytes,
    random_budget,
    random_case,
    random_hardware,
)
from tests.planner.tiny_instances import tiny_instances
from tests.traces.optimizer_traces import LOOP, PASSES, training_trace

from teraio.contracts.hardware import Hardware, Link
from teraio.contracts.plan import Plan
from teraio.errors import CapacityError, InfeasibleError, InputError
from teraio.planner import plan as make_plan
from teraio.planner import plan_summary
from teraio.planner.greedy import plan_greedy
from teraio.planner.milp.exact import plan_milp
from teraio.planner.optimal.guiding import Guiding
from teraio.planner.optimal.optimal import plan_optimal
from teraio.planner.optimal.periods import Problem
from teraio.planner.optimal.search import SECONDS_PER_MOVE, Search
from teraio.planner.verifier import verify
from teraio.simulator import simulate
from teraio.traces.trace import Trace
from teraio.traces.transforms import trace_of_plan

MakeTrace = Callable[..., Trace]
MakeHardware = Callable[..., Hardware]
RandomTrace = Callable[[int], Trace]

ROUNDING = 1 + 1e-9


def moves_cost(plan: Plan) -> float:
    """How much slower a plan with fewer moves may be."""
    return SECONDS_PER_MOVE * len(plan.moves)


def check(trace: Trace, hardware: Hardware, plan: Plan) -> None:
    """Valid, fits, and simulated as predicted without anything off plan."""
    verification = verify(trace, plan)
    assert verification.valid, verification.violations
    assert verification.fits, verification.violations
    simulated = simulate(trace, plan, hardware, record=False)
    assert (simulated.metadata.demand_fetches, simulated.metadata.evictions) == (0, 0)
    assert simulated.iteration_seconds == pytest.approx(plan.predicted_seconds, abs=1e-12)


@pytest.mark.parametrize(("ssd_rate", "seconds"), [(100.0, 6.0), (50.0, 8.0)])
def test_transfers_hide_as_far_as_they_can(
    ssd_rate: float, seconds: float, one_tensor: Trace, make_hardware: MakeHardware
) -> None:
    """A (100 B) must be away in 2 and 3, and has 1 s each way: hidden at 100 B/s; at 50 B/s the
    kernels wait 1 s for the offload and 1 s for the prefetch. B has no period.
    """
    hardware = make_hardware(100, host_bytes=0, ssd_rate=ssd_rate)
    plan = make_plan(one_tensor, hardware)
    check(one_tensor, hardware, plan)
    assert plan.predicted_seconds == pytest.approx(seconds, abs=1e-9)
    assert plan.metadata.lower_bound_seconds == pytest.approx(seconds, rel=1e-6)
    assert plan.metadata.bound_kind == ("ideal" if seconds == 6 else "dual")


def test_two_ssds_carry_what_one_cannot(make_trace: MakeTrace, make_hardware: MakeHardware) -> None:
    """A and C (100 B each) must be away in 2 and 3, with 1 s each way and 100 B/s per SSD.

    Optimum 6 s with one on each; 8 s with both on one.
    """
    trace = make_trace(
        [1.0] * 6,
        [("A", 100, 0, 5), ("C", 100, 0, 5), ("B", 200, 2, 3)],
        [(0, "A", "w"), (0, "C", "w"), (5, "A", "r"), (5, "C", "r"), (2, "B", "w"), (3, "B", "r")],
    )
    for num_ssds, seconds in ((2, 6.0), (1, 8.0)):
        hardware = make_hardware(200, host_bytes=0, num_ssds=num_ssds)
        plan = make_plan(trace, hardware)
        check(trace, hardware, plan)
        assert plan.predicted_seconds == pytest.approx(seconds, abs=1e-9)
        assert len(set(plan.moves.device.tolist())) == num_ssds


@pytest.mark.parametrize("block", range(4))
def test_promises_on_machines_of_any_kind(block: int, random_trace: RandomTrace) -> None:
    """Never worse than the greedy and sometimes better, never better than the bound.

    With and without host, GPUDirect Storage, duplex limits, latency, shared link, slowdown.
    """
    gains = []
    for seed in range(10 * block, 10 * block + 7):
        trace, hardware = random_case(seed, random_trace)
        share = (1.0, 0.8)[seed % 2]
        plan = make_plan(trace, hardware, bandwidth_share=share)
        check(trace, hardware, plan)
        assert plan.predicted_seconds * ROUNDING >= plan.metadata.lower_bound_seconds
        assert plan.metadata.lower_bound_seconds * ROUNDING >= trace.ideal_seconds
        greedy = plan_greedy(trace, hardware, bandwidth_share=share)
        assert plan.predicted_seconds <= greedy.predicted_seconds * ROUNDING + moves_cost(greedy)
        if len(plan.moves) > 0:
            gains.append(greedy.predicted_seconds / plan.predicted_seconds - 1)
    assert len(gains) > 2
    assert max(gains) > 0.001


def test_near_the_exact_optimum_on_tiny_instances() -> None:
    """Never below what the exact program proves best, at that in most cases, and seldom far off."""
    excess = []
    for tiny in tiny_instances(0, 15, 1e4):
        if tiny.hardware.gpu[0].memory_bytes < least_bytes(tiny.trace):
            continue
        exact = plan_milp(tiny.trace, tiny.hardware)
        plan = plan_optimal(tiny.trace, tiny.hardware)
        check(tiny.trace, tiny.hardware, plan)
        excess.append(plan.predicted_seconds / exact.predicted_seconds - 1)
    assert np.mean(np.array(excess) < 1e-6) >= 0.6
    assert np.mean(excess) < 0.1


def test_plan_without_limit_is_the_same_every_time(random_trace: RandomTrace) -> None:
    """All tables equal; only the time that planning took may differ."""
    for seed in range(2):
        trace, hardware = random_case(seed, random_trace)
        first, second = plan_optimal(trace, hardware), plan_optimal(trace, hardware)
        assert first.moves.equals(second.moves)
        assert first.predicted_seconds == second.predicted_seconds


@pytest.mark.parametrize("seconds", [0.05, 1e-6])
def test_time_limit_gives_a_plan_and_says_what_was_proved(seconds: float) -> None:
    """A whole iteration of layers, with next to no time: valid, and the bound is what it says.

    The first plan is made whatever the limit; it and the bound's share end soon.
    """
    trace = layered_trace(12, 8)
    hardware = random_hardware(random.Random(5), trace.peak_allocated_bytes * 2 // 3)
    # The first call in a fresh checkout compiles; no limit is kept while it does.
    make_plan(trace, hardware, time_limit=seconds)
    started = time.monotonic()
    plan = make_plan(trace, hardware, time_limit=seconds)
    assert time.monotonic() - started < seconds + 5
    check(trace, hardware, plan)
    summary = plan_summary(plan)
    assert summary["bound_kind"] in ("ideal", "dual", "tiled-dual")
    proved_more = summary["lower_bound_seconds"] > trace.ideal_seconds * ROUNDING
    assert proved_more == (summary["bound_kind"] != "ideal")
    assert summary["gap"] == pytest.approx(
        plan.predicted_seconds / summary["lower_bound_seconds"] - 1
    )
    assert plan.metadata.options["time_limit"] == pytest.approx(0.8 * seconds)
    assert plan.metadata.options["origin"]


def test_time_limit_much_too_long_changes_nothing_for_the_worse(random_trace: RandomTrace) -> None:
    """A generous limit never gives a slower plan than none at all."""
    trace, hardware = random_case(11, random_trace)
    unlimited = plan_optimal(trace, hardware)
    limited = plan_optimal(trace, hardware, time_limit=1.0)
    assert limited.predicted_seconds <= unlimited.predicted_seconds * ROUNDING


def test_kernel_that_needs_too_much_is_named(
    one_tensor: Trace, make_hardware: MakeHardware
) -> None:
    """Kernel 0 holds the 100 bytes of A, whatever leaves."""
    with pytest.raises(InfeasibleError, match=r"kernel 0 \(op0\) needs 100 bytes.* 99 bytes"):
        plan_optimal(one_tensor, make_hardware(99))


def test_storage_that_cannot_leave_makes_it_infeasible(
    make_trace: MakeTrace, make_hardware: MakeHardware
) -> None:
    """Kernel 2 holds A as well as B if the memory of A cannot be given back."""
    trace = make_trace(
        [1.0] * 6,
        [("A", 100, 0, 5), ("B", 100, 2, 3)],
        [(0, "A", "w"), (5, "A", "r"), (2, "B", "w"), (3, "B", "r")],
        resizable=False,
    )
    with pytest.raises(InfeasibleError, match=r"kernel 2 \(op2\).*200 bytes.*150"):
        plan_optimal(trace, make_hardware(150))


def test_tiers_too_small_are_an_error(one_tensor: Trace, make_hardware: MakeHardware) -> None:
    """Neither the host nor the SSD can hold A; without any tier at all neither."""
    for hardware in (
        make_hardware(100, host_bytes=99, capacity_bytes=99),
        make_hardware(100, host_bytes=0, num_ssds=0),
        make_hardware(100, host_bytes=0, num_ssds=0, host_rate=10.0),
    ):
        with pytest.raises(CapacityError):
            plan_optimal(one_tensor, hardware)


def test_ssd_without_room_for_its_bounce_buffer_is_not_used(
    one_tensor: Trace, make_hardware: MakeHardware
) -> None:
    """The host holds A (512 B with alignment) or a bounce buffer of 4096 B, not both."""
    bouncing = make_hardware(100, gds=False, bounce_bytes=4096, host_bytes=4000)
    plan = plan_optimal(one_tensor, bouncing)
    check(one_tensor, bouncing, plan)
    assert plan.moves.tier.tolist() == ["host"]
    roomy = bouncing.with_budgets(host_memory=4096)
    plan = plan_optimal(one_tensor, roomy)
    check(one_tensor, roomy, plan)
    with pytest.raises(CapacityError):
        plan_optimal(one_tensor, bouncing.with_budgets(host_memory=0))


def test_full_host_leaves_the_rest_to_the_ssd(
    make_trace: MakeTrace, make_hardware: MakeHardware
) -> None:
    """Four tensors of 100 B must leave, and the host has slots of 512 B for three of them.

    Within its budget, and faster than the slow SSD could be with all four.
    """
    names = "ACDE"
    trace = make_trace(
        [1.0] * 6,
        [*((name, 100, 0, 5) for name in names), ("B", 400, 2, 3)],
        [
            *((0, name, "w") for name in names),
            *((5, name, "r") for name in names),
            (2, "B", "w"),
            (3, "B", "r"),
        ],
    )
    hardware = make_hardware(400, ssd_rate=50.0, host_rate=300.0, host_bytes=3 * 512)
    plan = plan_optimal(trace, hardware)
    check(trace, hardware, plan)
    assert sorted(plan.moves.tier.tolist()) == ["host", "host", "host", "ssd"]
    # 2 s each way on the SSD, of which 1 s hides.
    assert plan.predicted_seconds == pytest.approx(8.0, abs=1e-9)


def test_slow_ssd_is_left_alone_where_the_host_does(
    make_trace: MakeTrace, make_hardware: MakeHardware
) -> None:
    """Ten tensors of 10 B leave for a link that the host fills: an SSD of a tenth of its rate would
    add nothing, and hold up the kernel that waits for what is on it.
    """
    names = [f"s{i}" for i in range(10)]
    trace = make_trace(
        [1.0] * 6,
        [*((name, 10, 0, 5) for name in names), ("B", 100, 2, 3)],
        [
            (2, "B", "w"),
            (3, "B", "r"),
            *((k, name, how) for name in names for k, how in ((0, "w"), (5, "r"))),
        ],
    )
    hardware = make_hardware(100, ssd_rate=5.0, host_rate=50.0)
    hardware = replace(hardware, link=(Link(name="pcie", read_rate=50.0, write_rate=50.0),))
    plan = plan_optimal(trace, hardware)
    check(trace, hardware, plan)
    assert set(plan.moves.tier.tolist()) == {"host"}
    # 2 s each way, of which 1 s hides.
    assert plan.predicted_seconds == pytest.approx(8.0, abs=1e-9)


def test_of_plans_as_fast_the_one_with_fewer_moves(
    make_trace: MakeTrace, make_hardware: MakeHardware
) -> None:
    """One tensor of 100 B, or twenty of 5 B that wait as long, or longer: all hide."""
    small = [f"s{i}" for i in range(20)]
    trace = make_trace(
        [1.0] * 12,
        [("A", 100, 2, 9), *((name, 5, 0, 11) for name in small), ("B", 100, 5, 6)],
        [
            *((2, "A", "w"), (9, "A", "r"), (5, "B", "w"), (6, "B", "r")),
            *((k, name, how) for name in small for k, how in ((0, "w"), (11, "r"))),
        ],
    )
    hardware = make_hardware(200, host_bytes=0)
    plan = plan_optimal(trace, hardware)
    check(trace, hardware, plan)
    assert plan.predicted_seconds == pytest.approx(12.0)
    assert len(plan.moves) == 1


def test_optimizer_in_backward_is_planned_as_it_will_run(make_hardware: MakeHardware) -> None:
    """The plan names the transform, refers to the trace as recorded, and is judged on the other."""
    trace = training_trace([*PASSES, *LOOP])
    hardware = make_hardware(random_budget(trace, random.Random(3)), host_bytes=0)
    plan = make_plan(trace, hardware, transform="optimizer-in-backward")
    assert plan.metadata.transform == "optimizer-in-backward"
    assert plan.metadata.trace_hash == trace.hash
    transformed = trace_of_plan(trace, plan)
    check(trace, hardware, plan)
    assert plan.metadata.lower_bound_seconds <= plan.predicted_seconds * ROUNDING
    assert transformed.num_kernels == len(plan.kernels)


@pytest.mark.parametrize("memory_share", [0.5, 0.6, 0.75])
def test_plan_for_less_bandwidth_bears_it(memory_share: float, make_hardware: MakeHardware) -> None:
    """A plan at the ideal that counts on 0.9 of the rates loses at most half a percent at those.

    One that counts on all of them has the lead that memory leaves, and may lose more. Predictions
    are at full rates for both.
    """
    trace = layered_trace(8, 4)
    gpu_bytes = int(memory_share * trace.peak_allocated_bytes)
    hardware = make_hardware(gpu_bytes, ssd_rate=40.0, host_bytes=0)
    lost = {}
    for share in (0.9, 1.0):
        plan = plan_optimal(trace, hardware, bandwidth_share=share)
        check(trace, hardware, plan)
        assert plan.predicted_seconds == pytest.approx(trace.ideal_seconds, rel=1e-6)
        slower = simulate(trace, plan, at_rates(hardware, 0.9), record=False)
        lost[share] = slower.iteration_seconds / trace.ideal_seconds - 1
    assert lost[0.9] <= 0.005
    assert lost[0.9] <= lost[1.0] + 1e-9


def at_rates(hardware: Hardware, share: float) -> Hardware:
    names = ("read_rate", "write_rate", "duplex_read_rate", "duplex_write_rate")
    return replace(
        hardware,
        host=replace(hardware.host, **{n: share * getattr(hardware.host, n) for n in names}),
        ssd=tuple(
            replace(ssd, **{n: share * getattr(ssd, n) for n in names}) for ssd in hardware.ssd
        ),
    )


def test_earlier_plan_as_a_start(make_hardware: MakeHardware) -> None:
    """For less memory: it fits, and is not slower by far than a plan made anew.

    A plan of another trace is refused.
    """
    trace = layered_trace(8, 4)
    hardware = make_hardware(trace.peak_allocated_bytes // 2, ssd_rate=60.0, host_bytes=0)
    first = plan_optimal(trace, hardware)
    tighter = hardware.with_budgets(gpu_memory=int(0.45 * trace.peak_allocated_bytes))
    again = plan_optimal(trace, tighter, start=first)
    check(trace, tighter, again)
    anew = plan_optimal(trace, tighter)
    assert again.predicted_seconds <= 1.05 * anew.predicted_seconds
    with pytest.raises(InputError, match="start: the plan is for another trace"):
        plan_optimal(layered_trace(7, 4), tighter, start=first)


def test_planning_again_for_other_budgets(make_hardware: MakeHardware) -> None:
    """From tight to plenty: each plan fits its own budget; the bound only falls, and at the peak
    of the trace nothing moves.
    """
    trace = layered_trace(4, 3)
    least = random_budget(trace, random.Random(1))
    hardware = make_hardware(least, ssd_rate=50.0, host_bytes=0)
    bounds = []
    for budget in np.linspace(least, trace.peak_allocated_bytes, 4).astype(int).tolist():
        plan = make_plan(trace, hardware, gpu_memory=budget)
        check(trace, plan.hardware, plan)
        assert plan.metadata.peak_gpu_bytes <= budget
        bounds.append(plan.metadata.lower_bound_seconds)
    assert bounds == sorted(bounds, reverse=True)
    assert len(plan.moves) == 0
    assert plan.gap == pytest.approx(0.0, abs=1e-9)


def test_large_traces_do_without_a_guide_that_fails(
    random_trace: RandomTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first choice that was to be made up by guides is then made with all its rounds."""
    trace, hardware = random_case(1, random_trace)
    monkeypatch.setattr(Problem, "is_small", False)
    guided = plan_optimal(trace, hardware)
    monkeypatch.setattr(Guiding, "advise", lambda *_, **__: None)
    rounds: list[int | None] = []
    try_longest_idle = Search.try_longest_idle

    def watched(self: Search, max_rounds: int | None = None) -> None:
        rounds.append(max_rounds)
        try_longest_idle(self, max_rounds)

    monkeypatch.setattr(Search, "try_longest_idle", watched)
    plan = plan_optimal(trace, hardware)
    assert (rounds[0], rounds[-1]) == (1, None)
    assert len(guided.moves) > 0
    assert len(plan.moves) > 0
    check(trace, hardware, plan)
