"""The optimal planner's guide: what it wants away, whole tensors of it, and folded iterations."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from tests.planner.layered import layered_trace
from tests.planner.optimal_cases import least_bytes, random_case
from tests.traces.micro_batch_programs import Habits, play
from tests.traces.test_folding import with_jitter

from teraio.contracts.hardware import Hardware
from teraio.planner.fluid.bound import lower_bound
from teraio.planner.fluid.linear_program import LinearProgram
from teraio.planner.fluid.solve import Solution, solve
from teraio.planner.optimal import guide as guide_module
from teraio.planner.optimal import guiding as guiding_module
from teraio.planner.optimal import optimal as optimal_module
from teraio.planner.optimal import periods as periods_module
from teraio.planner.optimal.guide import solve_guide
from teraio.planner.optimal.guiding import FOLDED_MICRO_BATCHES, Guiding
from teraio.planner.optimal.optimal import plan_optimal
from teraio.planner.optimal.periods import STAYS, Problem
from teraio.planner.optimal.repairing import repair
from teraio.planner.optimal.repetition import find_repeated
from teraio.planner.optimal.rounding import round_guide
from teraio.planner.optimal.slots import guide_slots
from teraio.planner.residency import cyclic_sum
from teraio.traces.trace import Trace

MakeHardware = Callable[..., Hardware]
RandomTrace = Callable[[int], Trace]


def folding_trace(stages_after: int = 1) -> Trace:
    """Sixteen alike micro-batches of eight layers, kernels of a millisecond."""
    return play(Habits(stages_after=stages_after, parameters=8), 16)


def pressed(trace: Trace, make_hardware: MakeHardware, ssd_rate: float = 5e5) -> Hardware:
    """A third of what could leave may stay, and the SSD hides most of the rest."""
    least = least_bytes(trace)
    gpu_bytes = least + (trace.peak_allocated_bytes - least) // 3
    return make_hardware(gpu_bytes, ssd_rate=ssd_rate, host_bytes=0)


def test_slots_end_with_phases_and_before_steps_become_too_large() -> None:
    """No slot crosses a phase, and none of the optimizer touches more than it may.

    All slots together are the iteration.
    """
    # Each of five steps touches parameter, gradient and state, 40 B each.
    trace, most = layered_trace(layers=5), 300.0
    slots = guide_slots(trace, trace.ideal_seconds, most)
    slot = slots.of_piece[0::2]
    phases, micro_batches = trace.kernels.phase, trace.kernels.micro_batch
    together = np.flatnonzero(np.diff(slot) == 0)
    assert len(together) > 0
    assert (phases[together] == phases[together + 1]).all()
    assert (micro_batches[together] == micro_batches[together + 1]).all()
    touched = np.zeros(len(slots))
    sizes = trace.storages.allocated_bytes[trace.accesses.storage]
    np.add.at(touched, slot[trace.accesses.kernel], sizes)
    steps = np.flatnonzero(phases == "optimizer")
    assert len(set(slot[steps].tolist())) == 3
    for number in set(slot[steps].tolist()):
        assert touched[number] <= most
    assert slots.seconds.sum() == pytest.approx(trace.ideal_seconds)


@pytest.mark.parametrize("spare_bytes", [0, 3])
def test_guide_wants_enough_away_for_every_kernel(
    spare_bytes: int, random_trace: RandomTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wanted of the periods around a kernel covers its need, where slots allow it; kernels
    inside a slot may miss it, and repair sees to them.

    Never more of a class than it has, never less time than the ideal.
    """
    statuses: list[str] = []

    def watched(program: LinearProgram, time_limit: float | None) -> Solution:
        solution = solve(program, time_limit)
        statuses.append(solution.status)
        return solution

    monkeypatch.setattr(guide_module, "solve", watched)
    num_covered = num_pressed = 0
    for seed in range(30):
        trace, hardware = random_case(seed, random_trace)
        hardware = hardware.with_budgets(gpu_memory=hardware.gpu[0].memory_bytes + spare_bytes)
        problem = Problem.of(trace, hardware)
        needed = problem.resident_bytes - problem.capacity_bytes + spare_bytes
        statuses.clear()
        guide = solve_guide(
            problem, guide_slots(trace, 0.0, math.inf), None, spare_bytes=spare_bytes
        )
        if needed.max() <= 0 or guide is None:
            continue
        gaps, wanted = guide.gaps, guide.wanted_bytes
        assert (wanted.sum(axis=0) <= gaps.num_bytes * (1 + 1e-6) + 1e-6).all()
        assert guide.seconds >= trace.ideal_seconds * (1 - 1e-9)
        assert (guide.stretch >= 1).all()
        row = gaps.row_of_period[problem.period]
        inside = row >= 0
        share = np.zeros(len(row))
        share[inside] = (wanted.sum(axis=0) / gaps.num_bytes)[row[inside]]
        lap = problem.away_first // trace.num_kernels * trace.num_kernels
        away = cyclic_sum(
            problem.away_first - lap,
            problem.away_end - lap,
            np.ceil(share * problem.relief_bytes).astype(np.int64),
            trace.num_kernels,
        )
        if "infeasible" not in statuses:
            num_pressed += int((needed > 0).sum())
            num_covered += int((away >= needed)[needed > 0].sum())
    assert num_pressed > 50
    assert num_covered >= 0.95 * num_pressed


def test_guide_whose_slots_are_too_coarse_still_advises(
    one_tensor: Trace, make_hardware: MakeHardware
) -> None:
    """In one slot for all kernels nothing can be away throughout; a plan is found all the same."""
    hardware = make_hardware(100, host_bytes=0)
    guiding = Guiding.of(Problem.of(one_tensor, hardware))
    advice = guiding.advise(slot_seconds=one_tensor.ideal_seconds)
    if advice is not None:
        assert repair(guiding.problem, advice.device) is not None
    assert plan_optimal(one_tensor, hardware).predicted_seconds == pytest.approx(6.0)


def test_large_storages_leave_first_among_equals(
    make_trace: Callable[..., Trace], make_hardware: MakeHardware
) -> None:
    """100 B must be away in kernel 4: A alone has them, and twenty others of 5 B each."""
    small = [f"s{i}" for i in range(20)]
    names = ["A", *small]
    trace = make_trace(
        [1.0] * 9,
        [("A", 100, 0, 8), *((name, 5, 0, 8) for name in small), ("B", 100, 4, 4)],
        [
            (4, "B", "w"),
            *((k, name, how) for name in names for k, how in ((0, "w"), (8, "r"))),
        ],
    )
    hardware = make_hardware(200, host_bytes=0)
    problem = Problem.of(trace, hardware)
    advice = Guiding.of(problem).advise(slot_seconds=1.0, by_size=True)
    assert advice is not None
    moved = problem.storage[advice.device != STAYS]
    assert [names[storage] for storage in moved.tolist()] == ["A"]


def test_gaps_too_short_for_a_round_trip_are_left_alone(
    one_tensor: Trace, make_hardware: MakeHardware
) -> None:
    """A waits for 4 s: two round trips of 2 s are worth it, of 2.5 s are not."""
    for rate, is_moved in ((100.0, True), (80.0, False)):
        hardware = make_hardware(100, host_bytes=0, host_rate=rate, ssd_rate=rate)
        problem = Problem.of(one_tensor, hardware)
        advice = Guiding.of(problem).advise(slot_seconds=0.5)
        assert (advice is not None and bool((advice.device != STAYS).any())) == is_moved


def test_rounding_stays_within_half_a_tensor_above(random_trace: RandomTrace) -> None:
    """Of each device, never more than wanted so far and half of the largest; in all, about that."""
    short, total = 0.0, 0.0
    for seed in range(30):
        trace, hardware = random_case(seed, random_trace)
        problem = Problem.of(trace, hardware)
        guide = solve_guide(problem, guide_slots(trace, 0.0, math.inf), None)
        if guide is None:
            continue
        device = round_guide(problem, guide)
        assert (device[guide.gaps.row_of_period[problem.period] < 0] == STAYS).all()
        largest = problem.num_bytes.max()
        for number, wanted in enumerate(guide.wanted_bytes.sum(axis=1).tolist()):
            chosen = int(problem.num_bytes[device == number].sum())
            assert chosen <= wanted + largest / 2 + 1e-6
            short += max(0.0, wanted - chosen)
            total += wanted
    assert total > 1000
    assert short < 0.25 * total


def test_repeated_turn_is_found_and_leaves_what_it_finds(make_hardware: MakeHardware) -> None:
    """Slots of whole turns, as many as were folded away and one; rows pair by pair a turn apart."""
    trace = folding_trace()
    problem = Problem.of(trace, pressed(trace, make_hardware))
    guiding = Guiding.of(problem)
    folding, folded = guiding.folding, guiding.folded
    assert folding is not None
    assert folded.num_kernels == trace.num_kernels - folding.num_turns * folding.turn_kernels
    slots = guide_slots(folded.trace, folded.trace.ideal_seconds, math.inf)
    guide = solve_guide(folded, slots, folding)
    assert guide is not None
    repeated = guide.repeated
    assert repeated is not None
    again = find_repeated(folded, slots, guide.gaps, folding)
    assert again is not None
    assert repeated.times == folding.num_turns + 1
    slot = slots.of_piece[0::2]
    turn = np.flatnonzero((slot >= repeated.first_slot) & (slot < repeated.end_slot))
    assert len(turn) == folding.turn_kernels
    assert turn[-1] == folding.first_kernel - 1
    rows_in, rows_out = repeated.rows_in, repeated.rows_out
    assert len(rows_in) > 0
    assert (folded.after[rows_out] - folded.after[rows_in] == folding.turn_kernels).all()
    assert (folded.num_bytes[rows_in] == folded.num_bytes[rows_out]).all()
    device = round_guide(folded, guide)
    np.testing.assert_array_equal(device[rows_in], device[rows_out])


def test_advice_for_a_folded_iteration_repeats_in_every_turn(make_hardware: MakeHardware) -> None:
    """Of the turns that one stands for, each has the same number of moves at the same places."""
    trace = folding_trace()
    problem = Problem.of(trace, pressed(trace, make_hardware))
    guiding = Guiding.of(problem)
    folding = guiding.folding
    assert folding is not None
    advice = guiding.advise(slot_seconds=trace.ideal_seconds)
    assert advice is not None
    assert advice.starts[-1] >= trace.ideal_seconds * (1 - 1e-9)
    begin = folding.first_kernel - folding.turn_kernels
    turns = []
    for number in range(folding.num_turns + 1):
        first = begin + number * folding.turn_kernels
        inside = (problem.after >= first) & (problem.after < first + folding.turn_kernels)
        places = (problem.after - first)[inside & (advice.device != STAYS)]
        turns.append(sorted(places.tolist()))
    assert len(turns[0]) > 0
    assert all(turn == turns[0] for turn in turns)


def test_few_micro_batches_are_not_folded(make_hardware: MakeHardware) -> None:
    """At most as many as would be left."""
    trace = play(Habits(stages_after=1), FOLDED_MICRO_BATCHES)
    guiding = Guiding.of(Problem.of(trace, pressed(trace, make_hardware)))
    assert guiding.folding is None
    assert guiding.folded_row.tolist() == list(range(len(guiding.problem.period)))


@pytest.mark.parametrize("stages_after", [0, 1])
@pytest.mark.parametrize("is_jittered", [False, True])
def test_folded_is_as_good_as_whole(
    stages_after: int,
    is_jittered: bool,
    make_hardware: MakeHardware,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Within a point of what the guide of all micro-batches leads to, though their times differ.

    Neither local search nor the greedy plan may help.
    """
    monkeypatch.setattr(periods_module, "SMALL_KERNELS", 0)
    monkeypatch.setattr(optimal_module, "search_locally", lambda *_: None)
    trace = folding_trace(stages_after)
    if is_jittered:
        trace = with_jitter(trace)
    hardware = pressed(trace, make_hardware)
    bound = lower_bound(trace, hardware).seconds
    gaps = []
    for micro_batches in (FOLDED_MICRO_BATCHES, 1000):
        monkeypatch.setattr(guiding_module, "FOLDED_MICRO_BATCHES", micro_batches)
        gaps.append(plan_optimal(trace, hardware).predicted_seconds / bound - 1)
    assert gaps[0] <= gaps[1] + 0.01
    assert gaps[0] < 0.06
