"""Exact times of the optimal planner: queues against a plain simulation, windows, the verdict."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest
from tests.planner.optimal_cases import random_case, random_choice

from teraio.contracts.plan import Moves
from teraio.contracts.table import FloatArray, IntArray
from teraio.planner.drafts import draft_moves
from teraio.planner.optimal.judging import Judged, judge
from teraio.planner.optimal.periods import STAYS, Problem
from teraio.planner.optimal.repairing import repair
from teraio.planner.optimal.search import Search
from teraio.planner.optimal.tier_fitting import fit_tiers
from teraio.planner.optimal.timing import Pace, Timed, time_moves
from teraio.planner.optimal.transfer_times import end_seconds
from teraio.planner.plan_building import build_plan
from teraio.traces.lifetimes import kernel_starts_seconds
from teraio.traces.trace import Trace

RandomTrace = Callable[[int], Trace]


def ends(
    release: list[float],
    num_bytes: list[int],
    device: list[int],
    *,
    rates: list[float],
    link_rate: float = 1e9,
    latency: list[float] | None = None,
    iteration: float = 10.0,
) -> list[float]:
    """:func:`end_seconds` of lists."""
    result = end_seconds(
        np.array(release, dtype=float),
        np.array(num_bytes),
        np.array(device),
        rates=np.array(rates),
        link_rate=link_rate,
        latency_seconds=np.array(latency or [0.0] * len(rates)),
        iteration_seconds=iteration,
    )
    return [round(seconds, 9) for seconds in result.tolist()]


def test_a_device_serves_one_after_another() -> None:
    """At 10 B/s: 20 B released at 0, 10 B at 1 and 10 B at 5, however the rows are ordered."""
    assert ends([5, 0, 1], [10, 20, 10], [0, 0, 0], rates=[10.0]) == [6, 2, 3]


def test_devices_share_the_link_fairly() -> None:
    """A link of 10 B/s: a device that takes 3 leaves 7 to the other, then all."""
    assert ends([0, 0], [6, 20], [0, 1], rates=[3.0, 10.0], link_rate=10.0) == [2, 2.6]


def test_latency_holds_the_channel() -> None:
    """A second before each transfer."""
    assert ends([0, 0], [10, 10], [0, 0], rates=[10.0], latency=[1.0]) == [2, 4]


def test_what_is_left_over_delays_the_next_iteration() -> None:
    """Of 3 s: released at 2, 20 B end at 4, so that the 10 B of the next second 0 wait for 1 s."""
    assert ends([2, 0], [20, 10], [0, 0], rates=[10.0], iteration=3.0) == [4, 2]


def test_times_of_another_lap_keep_their_lap() -> None:
    """Released at -1 and at 11 in an iteration of 10 s, the one in the lap before, one in the next.

    On the common clock they are at 9 and 1.
    """
    assert ends([-1, 11], [10, 10], [0, 0], rates=[10.0]) == [0, 12]


def test_iteration_that_takes_no_time() -> None:
    """Kernels of 0 s: both laps begin at once, and the second waits for the first."""
    assert ends([0, 0], [10, 10], [0, 0], rates=[10.0], iteration=0.0) == [3, 4]


class Transfer(NamedTuple):
    """On a clock without end; ``which`` row it is of."""

    release: Fraction
    left: Fraction
    device: int
    which: int


def fair_speeds(active: list[int], rates: list[Fraction], link: Fraction) -> dict[int, Fraction]:
    """Water filling: the slowest get their rate, the others equal shares of what is left."""
    speeds: dict[int, Fraction] = {}
    for position, d in enumerate(sorted(active, key=lambda d: rates[d])):
        share = (link - sum(speeds.values())) / (len(active) - position)
        speeds[d] = min(rates[d], share)
    return speeds


def played(
    release: list[Fraction],
    sizes: list[Fraction],
    device: list[int],
    rates: list[Fraction],
    link: Fraction,
    iteration: Fraction,
) -> list[Fraction]:
    """Ends in the second of two laps, less a lap: exactly, event by event."""
    queues: dict[int, list[Transfer]] = {}
    for d in set(device):
        rows = [i for i in range(len(device)) if device[i] == d]
        rows.sort(key=lambda i: release[i])
        queues[d] = [
            Transfer(release[i] + lap * iteration, sizes[i], d, i) for lap in (0, 1) for i in rows
        ]
    now, result = Fraction(0), [Fraction(0)] * len(device)
    while any(queues.values()):
        heads = [queue[0] for queue in queues.values() if queue]
        speeds = fair_speeds([h.device for h in heads if h.release <= now], rates, link)
        events = [now + h.left / speeds[h.device] for h in heads if h.device in speeds]
        events += [h.release for h in heads if h.release > now]
        then = min(events)
        for d, speed in speeds.items():
            head = queues[d][0]
            left = head.left - speed * (then - now)
            if left > 0:
                queues[d][0] = head._replace(left=left)
                continue
            queues[d].pop(0)
            result[head.which] = then - iteration
        now = then
    return result


@pytest.mark.parametrize("seed", range(40))
def test_queues_against_a_plain_simulation(seed: int) -> None:
    """Up to three devices behind a link that may be narrow; often more work than fits into a lap.

    Latency takes as long as its bytes would at the device's own rate.
    """
    chance = random.Random(seed)
    count, num_devices, iteration = chance.randint(1, 12), chance.randint(1, 3), 12
    release = [Fraction(chance.randrange(48), 4) for _ in range(count)]
    # Of equal release the order is that of the rows.
    num_bytes = [chance.randint(1, 40) for _ in range(count)]
    device = [chance.randrange(num_devices) for _ in range(count)]
    rates = [chance.choice((2, 5, 10)) for _ in range(num_devices)]
    latency = [Fraction(chance.choice((0, 1)), 4) for _ in range(num_devices)]
    link = chance.choice((3, 8, 1000))
    expected = played(
        release,
        [num_bytes[i] + latency[device[i]] * rates[device[i]] for i in range(count)],
        device,
        [Fraction(rate) for rate in rates],
        Fraction(link),
        Fraction(iteration),
    )
    found = ends(
        [float(r) for r in release],
        num_bytes,
        device,
        rates=[float(r) for r in rates],
        link_rate=float(link),
        latency=[float(s) for s in latency],
        iteration=float(iteration),
    )
    assert found == pytest.approx([float(e) for e in expected], abs=1e-8)


def timed_cases(random_trace: RandomTrace, count: int) -> list[tuple[Problem, IntArray, Timed]]:
    """Problems, choices that fit, and their times on timelines with and without stalls."""
    result = []
    for seed in range(count):
        trace, hardware = random_case(seed, random_trace)
        problem = Problem.of(trace, hardware)
        device = repair(problem, random_choice(problem, seed, share=0.2))
        if device is None:
            continue
        timed = time_moves(
            problem, device, stretched(trace, seed), lead_seconds=(0.0, 1.0)[seed % 2]
        )
        assert timed is not None, "what was repaired fits"
        result.append((problem, device, timed))
    return result


def stretched(trace: Trace, seed: int) -> FloatArray:
    """The timeline with each kernel up to three times as long, or as it is."""
    longer = 1 + 2 * np.random.default_rng(seed).random(trace.num_kernels) * (seed % 3)
    starts: FloatArray = np.r_[0.0, np.cumsum(np.diff(kernel_starts_seconds(trace)) * longer)]
    return starts


def test_windows_fit_and_lie_within_the_longest_absence(random_trace: RandomTrace) -> None:
    """Never a byte over, never an empty window; what is given back is as late as it fits."""
    cases = timed_cases(random_trace, 60)
    assert len(cases) > 40
    for problem, device, timed in cases:
        rows, (free_by, prefetch_start) = timed.rows, timed.windows
        assert rows.tolist() == np.flatnonzero(device != STAYS).tolist()
        assert (problem.away_first[rows] <= free_by).all()
        assert (free_by < prefetch_start).all()
        assert (prefetch_start <= problem.away_end[rows]).all()
        assert (prefetch_start == problem.away_end[rows])[problem.is_tail[rows]].all()
        resident = problem.resident_with(rows, free_by, prefetch_start)
        assert resident.max() <= problem.capacity_bytes
        for row in range(len(rows)):
            if prefetch_start[row] - free_by[row] > 1:
                kernel = free_by[row] % problem.num_kernels
                later = resident[kernel] + problem.relief_bytes[rows[row]]
                assert later > problem.capacity_bytes, "could leave a kernel later"


def test_choice_that_does_not_fit_has_no_times(random_trace: RandomTrace) -> None:
    """With nothing away and a byte too few."""
    trace, hardware = random_case(0, random_trace)
    problem = Problem.of(trace, hardware.with_budgets(gpu_memory=trace.peak_allocated_bytes - 1))
    nothing = np.full(len(problem.period), STAYS)
    assert time_moves(problem, nothing, kernel_starts_seconds(trace)) is None


def verdicts(problem: Problem, device: IntArray, starts: FloatArray) -> dict[Pace, Judged]:
    """What the simulator says of times for each pace."""
    result = {}
    for pace in Pace:
        timed = time_moves(problem, device, starts, pace=pace)
        assert timed is not None
        result[pace] = judge(problem, timed, device)
    return result


def test_times_are_those_of_the_faster_pace(random_trace: RandomTrace) -> None:
    """Where a direction is slower while the other is busy, timing for that pays at times, and at
    times not: the search takes what is faster, also on the timeline that comes of it.
    """
    faster, better_again = dict.fromkeys(Pace, 0), 0
    for seed in range(60):
        trace, hardware = random_case(seed, random_trace)
        problem = Problem.of(trace, hardware)
        device = repair(problem, random_choice(problem, seed, share=0.2))
        if device is None or not problem.is_faster_one_way:
            continue
        device, starts = fit_tiers(problem, device), kernel_starts_seconds(trace)
        first = verdicts(problem, device, starts)
        found = Search(problem).try_choice(device, starts, "test")
        if found is None:
            continue
        seconds = {pace: judged.seconds for pace, judged in first.items()}
        fastest = min(seconds, key=lambda pace: seconds[pace])
        faster[fastest] += len(set(seconds.values())) > 1
        again = verdicts(problem, device, first[fastest].starts)
        again_seconds = min(judged.seconds for judged in again.values())
        assert found.seconds <= min(seconds[fastest], again_seconds)
        better_again += again_seconds < seconds[fastest]
    assert min(faster.values()) > 0
    assert better_again > 0


def as_moves(problem: Problem, device: IntArray, timed: Timed) -> Moves:
    return draft_moves(
        problem.trace,
        problem.all_periods,
        problem.period[timed.rows],
        offload_start=problem.after[timed.rows],
        free_by=timed.windows.free_by,
        prefetch_start=timed.windows.prefetch_start,
        device=np.array(problem.machine.devices, dtype=object)[device[timed.rows]],
    )


def test_verdict_is_the_simulation_of_the_plan(random_trace: RandomTrace) -> None:
    """To the picosecond, on machines of any kind, and its timeline ends with the iteration."""
    num_moves, waits = 0, 0.0
    for problem, device, timed in timed_cases(random_trace, 60):
        roomy = problem.hardware.with_budgets(host_memory=10**9)
        judged = judge(problem, timed, device)
        plan = build_plan(problem.trace, as_moves(problem, device, timed), roomy, planner="test")
        assert judged.seconds == pytest.approx(plan.predicted_seconds, abs=1e-12)
        assert (np.diff(judged.starts) >= -1e-12).all()
        stays = np.setdiff1d(np.arange(len(judged.waits)), problem.storage[timed.rows])
        assert judged.waits.min() >= 0
        assert judged.waits[stays].sum() == 0, "no kernel waits for what does not move"
        waits += judged.waits.sum()
        num_moves += len(plan.moves)
    assert num_moves > 100
    assert waits > 10
