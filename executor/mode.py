"""The executor's dispatch mode: residency before every operator, the plan's moves around them.

Results never depend on the plan. Before an operator runs, every storage that it touches is made
resident; what the plan got wrong is fetched on demand. The plan only decides what leaves early and
what comes back ahead of need. Three states: *cold* until the first iteration boundary at which the
plan's storages exist; *following* while kernels match the plan, a few extra ones among them aside;
*adrift* after too many did not, until the stream of kernels is recognised again or the iteration
ends.
"""

from __future__ import annotations

import time
from collections import deque
from enum import Enum
from typing import Any

import torch

from teraio.errors import DriftError
from teraio.executor.iteration_log import IterationLog
from teraio.executor.output_sizes import OutputSizes
from teraio.executor.placement import Placement
from teraio.executor.residency import Holding, Residency, least_recently_used
from teraio.executor.schedule import PlannedMove, Schedule
from teraio.executor.tiers import Slot
from teraio.profiler.dispatch import WRITE, KernelCall, KernelMode
from teraio.profiler.storages import StorageState

_RESYNC_WINDOW = 8
"""Kernels in a row that must match before a run that drifted is taken to follow its plan again."""

_MAX_EXTRA_KERNELS = 32
"""Unplanned kernels in a row (a metric, a log line) that a run may have and still be on plan."""


class RunState(Enum):
    """How a run relates to its plan."""

    COLD = "cold"
    FOLLOWING = "following"
    ADRIFT = "adrift"


class ExecutorMode(KernelMode):
    """Executes a prepared schedule over a residency; see the module's docstring."""

    def __init__(
        self,
        schedule: Schedule,
        residency: Residency,
        placement: Placement,
        *,
        device_type: str,
        optimizer_steps: int,
        bucket_bytes: int,
        stops_on_drift: bool = False,
    ) -> None:
        self.residency = residency
        super().__init__(
            device_type=device_type, optimizer_steps=optimizer_steps, bucket_bytes=bucket_bytes
        )
        self.schedule = schedule
        self.placement = placement
        self.state = RunState.COLD
        self.log = IterationLog(device_type)
        self._sizes = OutputSizes(placement.rounding_bytes)
        self._stops_on_drift = stops_on_drift
        self._holding_of_row: list[Holding | None] = [None] * len(schedule.uses)
        self._shift = 0
        self._has_begun = False
        self._late_prefetches: list[Holding] = []
        self._shape_differs = False
        self._is_extra = False
        self._num_extra = 0
        self._clock = 0
        self._recent_ops: deque[str] = deque(maxlen=_RESYNC_WINDOW)
        self._windows = _positions_of_windows(schedule.ops)
        residency.victim_key = least_recently_used

    def start(self) -> None:
        """Begin the run: cold where the optimizer has no state yet, else by the plan at once."""
        self.log.restart_clock()
        self.take_places(must_start=False)
        self._settle_books()

    # Moments of KernelMode

    def on_view(self, state: StorageState) -> None:
        self._begin_kernel()
        self.residency.require((self._holding(state),))

    def before_kernel(self, call: KernelCall) -> None:
        self._begin_kernel()
        if self._late_prefetches:
            self._retry_prefetches()
        self._compare_with_plan(call)
        self._clock += 1
        holdings = [self._holding(state) for state in call.flags]
        if self.state is not RunState.COLD:
            self._bind_first_touches(holdings)
        residency = self.residency
        residency.require(holdings, self._need_bytes(call))
        for holding, flags in zip(holdings, call.flags.values(), strict=True):
            holding.last_use = self._clock
            if flags & WRITE:
                residency.written(holding)
            if call.operator.is_collective:
                # Asynchronous communication may use it after the call has returned.
                holding.is_fixed = True

    def run_kernel(self, call: KernelCall) -> Any:
        start = time.perf_counter()
        result = call.func(*call.args, **call.kwargs)
        self.log.kernel(self._planned_kernel, start, time.perf_counter())
        return result

    def after_kernel(self, call: KernelCall) -> None:
        for state in call.born:
            holding = self._holding(state)
            holding.last_use = self._clock
            if self._is_planned:
                self._bind_birth(state, holding)
        self.residency.note_peak(self._workspace_bytes())
        self.log.memory(self.residency.used_bytes)
        if self._is_planned:
            for move in self.schedule.offloads_after[self._planned_kernel]:
                self._offload(move)
        if self._is_extra:
            self._shift -= 1
        self._has_begun = False

    def on_death(self, state: StorageState) -> None:
        self.residency.note_death(state)

    def on_iteration_end(self) -> None:
        self.residency.bury()
        is_clean = (
            self.state is RunState.FOLLOWING and self._planned_kernel == self.schedule.num_kernels
        )
        if self.state is RunState.FOLLOWING and not is_clean:
            self.log.drift(self.kernel, "the iteration ended early")
        self.log.end_iteration(self.residency, is_warm_up=self.state is RunState.COLD)
        self._shift = 0
        self._late_prefetches.clear()
        if not (is_clean and self.log.last.is_on_plan):
            self.take_places(must_start=True)
        self._settle_books()

    def _settle_books(self) -> None:
        if self.registry.device_type == "cuda":
            self.residency.bury()
            self.residency.settle_books(torch.cuda.memory_allocated())

    # Identity

    def take_places(self, *, must_start: bool) -> None:
        """Bind named storages to the plan's rows and put everything where kernel 0 expects it.

        Called where a run begins (which stays cold if the optimizer has no state yet), and at the
        end of an iteration that did not go by the plan (``must_start``).
        """
        start = time.perf_counter()
        if self._bind_names() or must_start:
            self.residency.victim_key = self._by_next_use
            with torch._C._DisableTorchDispatch():
                self.placement.establish(self.residency, self._holding_of_row)
            self.state = RunState.FOLLOWING
            self.log.cold_start_seconds += time.perf_counter() - start
            self.log.restart_clock()

    def _bind_names(self) -> bool:
        """Find the plan's named storages; whether all of them exist."""
        found = set()
        for tensor, name, _ in self.names.tensors():
            row = self.schedule.row_of_name.get(name)
            if row is None or row in found:
                continue
            state, _ = self.registry.find_or_add(tensor, self._birth_before, is_foreign=True)
            if state is not None:
                found.add(row)
                self._bind(self._holding(state), row)
        return self.placement.is_complete(found)

    def _birth_before(self) -> tuple[int, int, int]:
        return -1, -1, len(self.registry)

    def _holding(self, state: StorageState) -> Holding:
        holding = state.attachment
        return holding if holding is not None else self.residency.adopt(state)

    def _bind(self, holding: Holding, row: int) -> None:
        if holding.state.nbytes != self.placement.nbytes_of_row[row]:
            return
        if holding.row >= 0 and self._holding_of_row[holding.row] is holding:
            self._holding_of_row[holding.row] = None
        holding.row = row
        self._holding_of_row[row] = holding

    def _bind_birth(self, state: StorageState, holding: Holding) -> None:
        row = self.schedule.row_of_birth.get((self._planned_kernel, state.birth_ordinal))
        if row is not None:
            self._bind(holding, row)

    def _bind_first_touches(self, holdings: list[Holding]) -> None:
        for position, row in self.schedule.row_of_first_touch.get(self._planned_kernel, ()):
            if position < len(holdings) and self._holding_of_row[row] is None:
                self._bind(holdings[position], row)

    def _bound(self, row: int) -> Holding | None:
        """The holding that plays a plan's storage now, if it lives and still plays it."""
        holding = self._holding_of_row[row]
        if holding is None or holding.row != row or holding.state.reference() is None:
            return None
        return holding

    # Following the plan

    @property
    def _planned_kernel(self) -> int:
        return self.kernel + self._shift

    def _begin_kernel(self) -> None:
        """The boundary before a kernel, once: frees, then prefetches (DESIGN: Semantics)."""
        if self._has_begun:
            return
        self._has_begun = True
        residency = self.residency
        residency.bury()
        kernel = residency.kernel = self._planned_kernel
        if self.state is not RunState.FOLLOWING or kernel >= self.schedule.num_kernels:
            return
        for move in self.schedule.frees_before[kernel]:
            holding = self._bound(move.storage)
            if holding is not None:
                residency.release(holding)
        reserved_bytes = self.schedule.need_bytes[kernel]
        for move in self.schedule.prefetches_before[kernel]:
            holding = self._bound(move.storage)
            if holding is not None and not residency.prefetch(holding, reserved_bytes):
                self._late_prefetches.append(holding)

    def _retry_prefetches(self) -> None:
        """What found no room at a view may find it at the kernel: storages die in between."""
        late, self._late_prefetches = self._late_prefetches, []
        residency = self.residency
        residency.bury()
        reserved_bytes = self.schedule.need_bytes[residency.kernel]
        for holding in late:
            if not residency.prefetch(holding, reserved_bytes):
                residency.traffic.dropped_prefetches += 1

    def _offload(self, move: PlannedMove) -> None:
        holding = self._bound(move.storage)
        if holding is None or not holding.is_resident:
            return
        slot = holding.slot
        lies_there = (
            slot is not None
            and slot.store.name == move.device
            and slot.offset_bytes == move.offset_bytes
        )
        if not move.writes and lies_there:
            return
        target = Slot(
            self.residency.tiers.stores[move.device],
            move.offset_bytes,
            move.nbytes,
            is_overflow=False,
        )
        if self.residency.can_take(target, holding):
            self.residency.offload(holding, target)

    def _need_bytes(self, call: KernelCall) -> int:
        if self._is_planned and not self._shape_differs:
            return self.schedule.need_bytes[self._planned_kernel] - self._foreign_bytes(call)
        return self._sizes.predict_bytes(call)

    def _foreign_bytes(self, call: KernelCall) -> int:
        # Storages first seen among the arguments exist already and are accounted for; the plan
        # counts them among the births of this kernel.
        return sum(self._holding(state).allocated_bytes for state in call.born)

    def _workspace_bytes(self) -> int:
        if self._is_planned:
            return self.placement.workspace_bytes[self._planned_kernel]
        return 0

    def _by_next_use(self, holding: Holding) -> float:
        if self.state is not RunState.FOLLOWING:
            return least_recently_used(holding)
        if holding.row < 0:
            return self.schedule.num_kernels / 2
        return self.schedule.distance_to_next_use(holding.row, self._planned_kernel)

    # Drift

    @property
    def _is_planned(self) -> bool:
        """Whether the kernel under way is the one that the plan has at this place."""
        return self.state is RunState.FOLLOWING and not self._is_extra

    def _compare_with_plan(self, call: KernelCall) -> None:
        self._shape_differs = self._is_extra = False
        if self.state is RunState.COLD:
            return
        name, schedule = call.operator.name, self.schedule
        if self.state is RunState.ADRIFT:
            self._recognise(name)
            if self.state is RunState.ADRIFT:
                self._count_drift(self._planned_kernel, f"{name} while adrift")
                return
        kernel = self._planned_kernel
        if kernel < schedule.num_kernels and schedule.ops[kernel] == name:
            self._num_extra = 0
            self._shape_differs = schedule.signatures[kernel] != call.signature
            if self._shape_differs:
                self._count_drift(kernel, f"{name} has other shapes")
            return
        planned = schedule.ops[kernel] if kernel < schedule.num_kernels else "the end"
        self._count_drift(kernel, f"{name} instead of {planned}")
        self._num_extra += 1
        self._is_extra = self._num_extra <= _MAX_EXTRA_KERNELS
        if not self._is_extra:
            self.state = RunState.ADRIFT
            self._shift += self._num_extra - 1
            self._recent_ops.clear()

    def _count_drift(self, kernel: int, what: str) -> None:
        self.log.drift(kernel, what)
        if self._stops_on_drift:
            raise DriftError(f"kernel {kernel}: {what}; the run no longer follows its trace")

    def _recognise(self, name: str) -> None:
        """Find the place in the plan whose last kernels are the run's last kernels."""
        self._recent_ops.append(name)
        if len(self._recent_ops) < _RESYNC_WINDOW:
            return
        places = self._windows.get(tuple(self._recent_ops))
        if places:
            here = self._planned_kernel
            nearest = min(places, key=lambda place: abs(place - here))
            self._shift += nearest - here
            self.state = RunState.FOLLOWING


def _positions_of_windows(ops: list[str]) -> dict[tuple[str, ...], list[int]]:
    """Index of the last kernel of every run of _RESYNC_WINDOW operators, by their names."""
    positions: dict[tuple[str, ...], list[int]] = {}
    for last in range(_RESYNC_WINDOW - 1, len(ops)):
        window = tuple(ops[last - _RESYNC_WINDOW + 1 : last + 1])
        positions.setdefault(window, []).append(last)
    return positions
