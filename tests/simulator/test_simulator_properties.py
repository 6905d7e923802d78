"""Random small traces with random valid moves: what must hold, and a second, naive simulator.

The naive one follows the words of the design: every move of every iteration is an object, time is a
fraction, nothing is counted or cached. It knows plans that fit only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from teraio.contracts.hardware import Hardware, Host, Ssd
from teraio.contracts.plan import Plan
from teraio.contracts.timeline import Events, Timeline, channel_name
from teraio.simulator import simulate
from teraio.simulator.engine_setup import build_engine
from teraio.simulator.machine_arrays import machine_arrays
from teraio.simulator.state import DONE
from teraio.simulator.steady_state import clear_sums, run_one_iteration
from teraio.simulator.trace_arrays import residency
from teraio.traces.lifetimes import inactive_periods
from teraio.traces.trace import Trace

CaseBuilder = Callable[..., Any]

PLENTY = 10**15
DEVICES = ("host", "ssd", "ssd1")
MANY = settings(max_examples=150, deadline=None)


@st.composite
def machines(draw: st.DrawFn) -> dict[str, Any]:
    """Keywords of a case: rates, latencies and limits that meet in every way."""
    latency = st.sampled_from([0, 0.25])
    duplex = {"duplex_read_rate": 5, "duplex_write_rate": 8}
    return {
        "host": {
            "memory_rate": draw(st.sampled_from([None, 15])),
            "latency_seconds": draw(latency),
        },
        "ssd": {"gds": draw(st.booleans()), "latency_seconds": draw(latency)}
        | (duplex if draw(st.booleans()) else {}),
        "more_ssds": [{"name": "ssd1", "read_rate": 7, "write_rate": 4}],
        "link": draw(
            st.sampled_from([{}, {"read_rate": 12, "write_rate": 11, "duplex_read_rate": 9}])
        ),
        "slowdown": draw(st.sampled_from([{}, {"read": 1.25, "write": 1.5, "both": 2}])),
    }


@st.composite
def kernels_and_storages(draw: st.DrawFn) -> Callable[[Any], Any]:
    """Adds a random trace to a case."""
    num_kernels = draw(st.integers(3, 8))
    lives = draw(
        st.lists(
            st.tuples(
                st.integers(0, 30),
                st.booleans(),
                st.integers(0, num_kernels - 1),
                st.integers(0, num_kernels - 1),
            ),
            min_size=1,
            max_size=5,
        )
    )
    times = st.sampled_from([0, 0.25, 0.5, 1, 2])
    seconds = draw(st.lists(times, min_size=num_kernels, max_size=num_kernels))
    gaps = draw(st.lists(st.sampled_from([0, 0, 0.25]), min_size=num_kernels, max_size=num_kernels))
    touched = draw(
        st.sets(st.tuples(st.integers(0, num_kernels - 1), st.integers(0, len(lives) - 1)))
    )
    written = draw(st.sets(st.integers(0, len(lives) - 1)))

    def add(case: Any) -> Any:
        for index, (nbytes, is_persistent, birth, span) in enumerate(lives):
            ends = {} if is_persistent else {"birth": birth, "death": (birth + span) % num_kernels}
            case.storage(f"s{index}", nbytes, **ends)
        for kernel in range(num_kernels):
            reads: list[str] = []
            writes: list[str] = []
            for index, (_, is_persistent, birth, span) in enumerate(lives):
                age = (kernel - birth) % num_kernels
                is_alive = is_persistent or age <= span
                if is_alive and ((kernel, index) in touched or (age == 0 and not is_persistent)):
                    is_written = index in written or (age == 0 and not is_persistent)
                    (writes if is_written else reads).append(f"s{index}")
            case.kernel(*reads, writes=writes, seconds=seconds[kernel], gap=gaps[kernel])
        return case

    return add


@st.composite
def planned_cases(draw: st.DrawFn) -> Callable[[CaseBuilder], Any]:
    """Builds a case with a random trace, machine and plan; every storage of the plan is written,
    or never, so that clean moves are those of storages that no kernel writes."""
    machine, add = draw(machines()), draw(kernels_and_storages())
    choices = draw(st.lists(st.floats(0, 1), min_size=200, max_size=200))

    def build(builder: CaseBuilder) -> Any:
        case = add(builder(**machine))
        periods, trace, choice = inactive_periods(case.trace), case.trace, iter(choices)
        num_kernels = trace.num_kernels
        is_written = np.zeros(len(trace.storages), dtype=bool)
        np.logical_or.at(is_written, trace.accesses.storage, trace.accesses.writes)

        def pick(low: int, high: int) -> int:
            return low + round(next(choice) * (high - low))

        for row in range(len(periods)):
            storage, after = int(periods.storage[row]), int(periods.after_kernel[row])
            end, is_tail = int(periods.end_kernel[row]), bool(periods.is_tail[row])
            if next(choice) < 0.3 or end - after < (1 if is_tail else 2):
                continue
            offload = pick(after, end - (1 if is_tail else 2))
            free = pick(offload + 1, end - (0 if is_tail else 1))
            device = DEVICES[pick(0, 2)]
            prefetch = None if is_tail else pick(free + 1, end) % num_kernels
            case.move(
                f"s{storage}",
                after,
                None if is_tail else end % num_kernels,
                offload=offload % num_kernels,
                free=free % num_kernels,
                prefetch=prefetch,
                device=device,
                offset=64 * row,
                writes=bool(is_written[storage]) or is_tail,
            )
            if not is_written[storage] and not is_tail:
                case.copy(f"s{storage}", device=device, offset=64 * row)
        return case

    return build


def check_account(trace: Trace, timeline: Timeline, hardware: Hardware) -> None:
    """What holds for every timeline."""
    metadata = timeline.metadata
    assert np.isclose(sum(timeline.account.values()), timeline.iteration_seconds, atol=1e-11)
    assert timeline.iteration_seconds >= trace.ideal_seconds - 1e-9
    running = metadata.compute_alone_seconds + metadata.compute_overlapped_seconds
    assert running >= trace.kernels.duration_seconds.sum() - 1e-9
    assert metadata.peak_gpu_bytes <= metadata.capacity_bytes
    for part in (hardware.host, *hardware.ssd):
        name = getattr(part, "name", "host")
        for is_write, rate in ((False, part.read_rate), (True, part.write_rate)):
            channel = channel_name(name, is_write=is_write)
            assert metadata.channel_utilisation[channel] <= 1 + 1e-9
            if metadata.steady:
                # channel_bytes is a rounded mean.
                seconds = (metadata.channel_bytes[channel] - 0.5) / rate
                assert timeline.iteration_seconds >= seconds - 1e-9


def follow_each_other(events: Events) -> bool:
    """Whether none begins before the one before it has ended."""
    order = np.lexsort((events.end_seconds, events.start_seconds))
    start, end = events.start_seconds[order], events.end_seconds[order]
    return bool((start[1:] >= end[:-1]).all())


def check_events(timeline: Timeline) -> None:
    """Kernels follow each other, a channel serves one at a time, bytes add up."""
    events, metadata = timeline.events, timeline.metadata
    for what in ("kernel", "stall"):
        assert follow_each_other(events.take(events.what == what))
    for channel, mean_bytes in metadata.channel_bytes.items():
        rows = events.take((events.what == "transfer") & (events.channel == channel))
        assert follow_each_other(rows)
        assert mean_bytes == round(int(rows.bytes.sum()) / metadata.cycle_iterations)
    stalls = timeline.stalls.groupby("cause").seconds.sum() / metadata.cycle_iterations
    for cause in ("read", "memory"):
        assert np.isclose(stalls.get(cause, 0.0), timeline.stall_seconds[cause], atol=1e-11)


@MANY
@given(build=planned_cases())
def test_plan_that_fits(case: CaseBuilder, build: Callable[[CaseBuilder], Any]) -> None:
    """Account, bounds, events; nothing happens that is not planned; twice the same."""
    c = build(case)
    assume(c._moves)
    timeline = c.simulate().timeline
    check_account(c.trace, timeline, c.hardware)
    check_events(timeline)
    metadata = timeline.metadata
    assert metadata.demand_fetches == metadata.evictions == 0
    again = c.simulate().timeline
    assert again.events.equals(timeline.events)
    assert replace(again.metadata, simulating_seconds=0) == replace(metadata, simulating_seconds=0)


@MANY
@given(build=planned_cases(), tightness=st.floats(0, 1))
def test_plan_or_none_at_any_budget(
    case: CaseBuilder, build: Callable[[CaseBuilder], Any], tightness: float
) -> None:
    """Between what one kernel needs and what all need, everything runs, within the budget."""
    c = build(case)
    required = int(residency(c.trace).required_bytes.max())
    capacity = required + round(tightness * (c.trace.peak_allocated_bytes - required))
    for plan in (c.plan, None):
        timeline = simulate(c.trace, plan, c.hardware, gpu_memory=capacity)
        check_account(c.trace, timeline, c.hardware)
        check_events(timeline)
        held = timeline.events.bytes[timeline.events.what == "memory"]
        assert held.max() <= capacity


@MANY
@given(build=planned_cases())
def test_tracking_residency_changes_nothing_where_the_plan_fits(
    case: CaseBuilder, build: Callable[[CaseBuilder], Any]
) -> None:
    """The two ways through the engine take the same picoseconds, iteration by iteration."""
    c = build(case)
    assume(c._moves)
    with mock.patch(
        "teraio.simulator.engine_setup.planned_gpu_bytes",
        lambda moves, allocated, live: np.full_like(live, 2 * PLENTY),
    ):
        tracked = iteration_picoseconds(c)
    assert tracked == iteration_picoseconds(c)


def iteration_picoseconds(c: Any) -> list[int]:
    """Durations of the first four iterations from a cold start."""
    engine = build_engine(c.trace, c.plan, machine_arrays(c.hardware, 0), record=False)
    durations = []
    for _ in range(4):
        clear_sums(engine)
        assert run_one_iteration(engine) == DONE
        durations.append(int(engine.account["iteration"][0]))
        assert engine.account["demand_fetches"][0] == engine.account["evictions"][0] == 0
    return durations


@MANY
@given(build=planned_cases())
def test_same_times_as_the_naive_simulator(
    case: CaseBuilder, build: Callable[[CaseBuilder], Any]
) -> None:
    """Duration of each of four iterations from a cold start."""
    c = build(case)
    assume(c._moves)
    expected = Naive(c.trace, c.plan, c.hardware).iteration_seconds(4)
    picoseconds = [float(seconds) * 1e12 for seconds in expected]
    assert np.allclose(iteration_picoseconds(c), picoseconds, rtol=0, atol=1000)


@dataclass
class Transfer:
    """One direction of one move of one iteration."""

    row: int
    order: tuple[int, int, int]
    trigger: int
    device: str
    is_write: bool
    latency: Fraction
    nbytes: Fraction

    @property
    def is_over(self) -> bool:
        """Whether nothing is left of it."""
        return self.latency == 0 and self.nbytes == 0


class Naive:
    """The semantics of plans that fit, as they are written."""

    def __init__(self, trace: Trace, plan: Plan, hardware: Hardware) -> None:
        self.trace, self.plan, self.hardware = trace, plan, hardware
        self.moves = plan.moves.unrolled(trace.num_kernels)
        self.parts: dict[str, Host | Ssd] = {"host": hardware.host}
        self.parts |= {ssd.name: ssd for ssd in hardware.ssd}
        self.is_done: set[tuple[int, int, bool]] = set()
        self.active: dict[tuple[str, bool], tuple[tuple[int, int, bool], Transfer]] = {}
        self.now, self.ready = Fraction(0), Fraction(trace.kernels.gap_before_seconds[0])
        self.kernel, self.is_open = 0, False
        self.work: Fraction | None = None
        self.cuts = [Fraction(0)]

    def iteration_seconds(self, count: int) -> list[Fraction]:
        """Durations of the first iterations."""
        waiting = self._all_transfers(count)
        while len(self.cuts) <= count:
            self._end_transfers()
            if self.work == 0:
                self._end_kernel()
            self._work_off_boundary()
            self._start_transfers(waiting)
            if self.work != 0 and not any(t.is_over for _, t in self.active.values()):
                self._advance()
        return [end - start for start, end in pairwise(self.cuts)]

    def _end_transfers(self) -> None:
        for channel, (key, transfer) in list(self.active.items()):
            if transfer.is_over:
                self.is_done.add(key)
                del self.active[channel]

    def _end_kernel(self) -> None:
        num_kernels = self.trace.num_kernels
        for row in np.flatnonzero(~self.plan.moves.writes):
            iteration, offset = divmod(self.kernel - self.moves.offload_start[row], num_kernels)
            if offset == 0:
                self.is_done.add((int(row), int(iteration), True))
        self.kernel, self.is_open, self.work = self.kernel + 1, False, None
        gap = self.trace.kernels.gap_before_seconds[self.kernel % num_kernels]
        self.ready = self.now + Fraction(gap)
        if self.kernel % num_kernels == 0:
            self.cuts.append(self.now)

    def _work_off_boundary(self) -> None:
        self.is_open = self.is_open or self._have(self.moves.free_by, True)
        may_run = self.is_open and self.work is None and self.now >= self.ready
        if may_run and self._have(self.moves.before_kernel, False):
            durations = self.trace.kernels.duration_seconds
            self.work = Fraction(durations[self.kernel % self.trace.num_kernels])

    def _advance(self) -> None:
        rates = self._rates([c for c, (_, t) in self.active.items() if t.latency == 0])
        pace = self._pace(rates)
        steps = [t.latency for _, t in self.active.values() if t.latency > 0]
        steps += [self.active[channel][1].nbytes / rate for channel, rate in rates.items()]
        steps += [self.work / pace] if self.work is not None else []
        steps += [self.ready - self.now] if self.ready > self.now else []
        step = min(steps)
        self.now += step
        self.work = None if self.work is None else self.work - step * pace
        for channel, (_, transfer) in self.active.items():
            if channel in rates:
                transfer.nbytes -= rates[channel] * step
            else:
                transfer.latency -= step

    def _all_transfers(self, count: int) -> dict[tuple[str, bool], list[Any]]:
        """Per channel, in static order; what the cold start has done already is left out."""
        queues: dict[tuple[str, bool], list[Any]] = {}
        moves, num_kernels = self.plan.moves, self.trace.num_kernels
        for iteration in range(-2, count + 1):
            for row in range(len(moves)):
                shift = iteration * num_kernels
                offload = int(self.moves.offload_start[row]) + shift
                after = int(self.moves.after_kernel[row]) + shift
                prefetch = int(self.moves.prefetch_start[row]) + shift
                before = int(self.moves.before_kernel[row]) + shift
                is_tail = moves.prefetch_start[row] < 0
                if offload < 0:
                    self.is_done.add((row, iteration, True))
                elif moves.writes[row]:
                    self._queue(queues, row, iteration, True, (offload, after, row), offload + 1)
                if not is_tail and prefetch <= 0:
                    self.is_done.add((row, iteration, False))
                elif not is_tail:
                    self._queue(queues, row, iteration, False, (prefetch, before, row), prefetch)
        for queue in queues.values():
            queue.sort(key=lambda item: item[1].order)
        return queues

    def _queue(
        self, queues: Any, row: int, iteration: int, is_write: bool, order: Any, trigger: int
    ) -> None:
        device = self.plan.moves.device[row]
        latency = Fraction(self.parts[device].latency_seconds)
        latency += Fraction(self.hardware.link[0].latency_seconds)
        nbytes = Fraction(int(self.plan.moves.nbytes[row]))
        transfer = Transfer(row, order, trigger, device, is_write, latency, nbytes)
        queues.setdefault((device, is_write), []).append(((row, iteration, is_write), transfer))

    def _have(self, column: Any, is_write: bool) -> bool:
        """Whether every move that the kernel waits for has left, or arrived."""
        for row in np.flatnonzero(column >= 0).tolist():
            iteration, offset = divmod(self.kernel - int(column[row]), self.trace.num_kernels)
            if offset == 0 and (row, iteration, is_write) not in self.is_done and iteration > -3:
                return False
        return True

    def _start_transfers(self, waiting: Any) -> None:
        for channel, queue in waiting.items():
            if channel in self.active or not queue:
                continue
            (row, iteration, is_write), transfer = queue[0]
            ended = self.kernel if is_write else self.kernel + self.is_open - 1
            if transfer.trigger <= ended:
                assert is_write or (row, iteration, True) in self.is_done
                self.active[channel] = queue.pop(0)

    def _rates(self, channels: list[tuple[str, bool]]) -> dict[tuple[str, bool], Fraction]:
        """Raise all rates together, exactly; in each round some limit stops someone."""
        link, both = self.hardware.link[0], len({is_write for _, is_write in channels}) == 2
        room: dict[Any, Fraction] = {}
        users: dict[Any, dict[tuple[str, bool], int]] = {}
        for device, is_write in channels:
            channel, part = (device, is_write), self.parts[device]
            way = "write_rate" if is_write else "read_rate"
            duplex = "duplex_" if (device, not is_write) in channels else ""
            room[channel] = Fraction(getattr(part, duplex + way))
            users[channel] = {channel: 1}
            room[is_write] = Fraction(getattr(link, ("duplex_" if both else "") + way))
            users.setdefault(is_write, {})[channel] = 1
            weight = 1 if isinstance(part, Host) else 0 if part.gds else 2
            if self.hardware.host.memory_rate is not None and weight:
                room["memory"] = Fraction(self.hardware.host.memory_rate)
                users.setdefault("memory", {})[channel] = weight
        rates: dict[tuple[str, bool], Fraction] = dict.fromkeys(channels, Fraction(0))
        rising = set(channels)
        while rising:
            rise = {
                limit: room[limit] / weight
                for limit, of in users.items()
                if (weight := sum(w for channel, w in of.items() if channel in rising))
            }
            step = min(rise.values())
            for limit, of in users.items():
                room[limit] -= step * sum(w for channel, w in of.items() if channel in rising)
            for channel in rising:
                rates[channel] += step
            full = [of for limit, of in users.items() if limit in rise and rise[limit] == step]
            rising -= {channel for of in full for channel in of}
        return rates

    def _pace(self, rates: dict[tuple[str, bool], Fraction]) -> Fraction:
        directions = {is_write for _, is_write in rates}
        slowdown = self.hardware.slowdown
        names = {(): 1.0, (False,): slowdown.read, (True,): slowdown.write}
        return 1 / Fraction(names.get(tuple(directions), slowdown.both))
