"""One iteration of a replay: what the executor does around each kernel, with a stand-in for it.

The moves are the executor's own (:class:`PlannedMoves` over a :class:`Residency`), called at the
moments at which :class:`teraio.executor.mode.ExecutorMode` calls them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

from teraio.contracts.plan import Plan
from teraio.contracts.table import MISSING
from teraio.executor.binding import Binding
from teraio.executor.holding import Holding
from teraio.executor.iteration_log import IterationLog
from teraio.executor.placement import Placement
from teraio.executor.planned_moves import PlannedMoves
from teraio.executor.replaying.patterns import Patterns
from teraio.executor.replaying.stand_ins import StandIns
from teraio.executor.replaying.synthetic import SyntheticStorages
from teraio.executor.residency import Residency
from teraio.executor.schedule import Schedule, prepare_schedule
from teraio.traces.trace import Trace


class _Access(NamedTuple):
    """A storage that a kernel accesses; ``is_born``: by that kernel."""

    row: int
    is_written: bool
    is_born: bool


class Player:
    """Plays a plan iteration by iteration; ``trace`` is the one that the plan's rows are about.

    ``gap_seconds``: idle time before each kernel, what executing adds on a CPU included.
    """

    def __init__(
        self,
        trace: Trace,
        plan: Plan,
        residency: Residency,
        stand_ins: StandIns,
        patterns: Patterns,
        device_type: str,
    ) -> None:
        kernels = trace.kernels
        self.log = IterationLog(device_type)
        self.memory_bytes: list[int] = []
        self.gap_seconds: list[float] = (
            kernels.gap_before_seconds + trace.metadata.dispatch_seconds
        ).tolist()
        self._plan = plan
        self._residency = residency
        self._stand_ins = stand_ins
        self._patterns = patterns
        self._storages = SyntheticStorages(trace, device_type, residency, patterns)
        self._schedule = _schedule(plan)
        self._placement = Placement(plan)
        self._binding = Binding(self._schedule, self._placement)
        self._moves = PlannedMoves(self._schedule, residency, self._binding)
        self._seconds: list[float] = kernels.duration_seconds.tolist()
        self._accesses = _accesses_by_kernel(trace)
        self._accessed_bytes = _accessed_bytes(trace)
        self._iteration = 0
        self._clock = 0
        residency.victim_key = self._next_use

    def start(self) -> None:
        """The cold start: everything where kernel 0 expects it."""
        self._storages.place(self._plan, self._placement, self._binding)
        self._residency.order.forget()
        self.log.restart_clock(self._residency)

    def play_iteration(self, *, is_warm_up: bool) -> None:
        """All kernels once. Raises StoreError, and CapacityError where no tier has room."""
        residency, log = self._residency, self.log
        self._stand_ins.begin_iteration()
        self.memory_bytes = []
        for kernel in range(self._schedule.num_kernels):
            self._stand_ins.idle(self.gap_seconds[kernel])
            self._play(kernel)
        residency.bury()
        log.end_iteration(residency, is_warm_up=is_warm_up)
        if not log.last.traffic.evictions:
            residency.order.forget()
        log.last.moves_found = self._moves.end_iteration(is_on_plan=log.last.is_on_plan)
        self._iteration += 1

    def clear(self) -> None:
        """Free everything."""
        self._storages.clear()

    def _play(self, kernel: int) -> None:
        residency = self._residency
        num_waits = len(residency.traffic.waits)
        self._boundary(kernel)
        self._clock += 1
        arrived = self._make_ready(kernel)
        start, end = self._stand_ins.run(
            kernel,
            self._seconds[kernel],
            self._accessed_bytes[kernel],
            residency.traffic.waits[num_waits:],
            partial(self._work, kernel, arrived),
        )
        self.log.kernel(kernel, start, end)
        residency.note_peak(self._placement.workspace_bytes[kernel])
        self.log.memory(residency.used_bytes)
        self.memory_bytes.append(residency.used_bytes)
        self._moves.after_kernel(kernel)
        self._storages.free(self._storages.deaths[kernel])

    def _boundary(self, kernel: int) -> None:
        residency, moves = self._residency, self._moves
        residency.bury()
        residency.kernel = kernel
        if moves.late_offloads:
            moves.issue_late_offloads()
        moves.before_kernel(kernel)
        if moves.late_prefetches:
            moves.retry_prefetches()

    def _make_ready(self, kernel: int) -> list[int]:
        """Storages resident, and stale copies given up; the rows that have just come back."""
        residency = self._residency
        accesses = [access for access in self._accesses[kernel] if not access.is_born]
        holdings = [self._living(access.row) for access in accesses]
        arrived = [
            access.row
            for access, holding in zip(accesses, holdings, strict=True)
            if holding.arriving is not None or not holding.is_resident
        ]
        residency.require(holdings, self._schedule.need_bytes[kernel])
        for access, holding in zip(accesses, holdings, strict=True):
            holding.last_use = self._clock
            if access.is_written and holding.slot is not None:
                residency.written(holding)
            if residency.order.is_kept:
                residency.order.note_use(holding)
        return arrived

    def _work(self, kernel: int, arrived: list[int]) -> None:
        """What a kernel does with its storages, within its time."""
        for row in arrived:
            self._patterns.check(row, kernel)
        for row in self._storages.births[kernel]:
            self._storages.create(row, self._binding).last_use = self._clock
        for access in self._accesses[kernel]:
            if access.is_written:
                self._patterns.write(access.row)

    def _living(self, row: int) -> Holding:
        holding = self._binding.holding(row)
        assert holding is not None, "a trace's accesses lie within the lifetimes"
        return holding

    def _next_use(self, holding: Holding) -> float:
        """Position of the next use in kernels since the replay began, so that it does not age."""
        kernel = self._residency.kernel
        here = self._iteration * self._schedule.num_kernels + kernel
        if holding.row < 0:
            return here
        return here + self._schedule.distance_to_next_use(holding.row, kernel)


def _schedule(plan: Plan) -> Schedule:
    """The executor's, with room for births that no kernel accesses: here they are made like others,
    while in training they are what is left of an earlier life (DESIGN: Trace).
    """
    schedule = prepare_schedule(plan)
    need_bytes = list(schedule.need_bytes)
    storages = plan.storages
    births = zip(storages.birth.tolist(), storages.allocated_bytes.tolist(), strict=True)
    for row, (birth, size) in enumerate(births):
        if birth != MISSING and not schedule.uses[row]:
            need_bytes[birth] += size
    return replace(schedule, need_bytes=need_bytes)


def _accesses_by_kernel(trace: Trace) -> list[list[_Access]]:
    table: list[list[_Access]] = [[] for _ in range(trace.num_kernels)]
    accesses, birth = trace.accesses, trace.storages.birth
    columns = (
        accesses.storage.tolist(),
        accesses.writes.tolist(),
        (birth[accesses.storage] == accesses.kernel).tolist(),
    )
    for kernel, *access in zip(accesses.kernel.tolist(), *columns, strict=True):
        table[kernel].append(_Access(*access))
    return table


def _accessed_bytes(trace: Trace) -> list[float]:
    """Bytes read and written by each kernel, every storage once each way."""
    accesses, sizes = trace.accesses, trace.storages.nbytes
    totals = [0.0] * trace.num_kernels
    ways = accesses.reads.astype(int) + accesses.writes.astype(int)
    moved = (sizes[accesses.storage] * ways).tolist()
    for kernel, num_bytes in zip(accesses.kernel.tolist(), moved, strict=True):
        totals[kernel] += num_bytes
    return totals
