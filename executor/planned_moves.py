"""Issuing the moves of a schedule at the boundaries between kernels (DESIGN: Semantics)."""

from __future__ import annotations

from teraio.executor.binding import Binding
from teraio.executor.holding import Holding
from teraio.executor.residency import Residency
from teraio.executor.schedule import PlannedMove, Schedule
from teraio.executor.tiers import Slot
from teraio.simulator.caching_allocator import MIB


class PlannedMoves:
    """Frees and prefetches before kernels, offloads after them; what must wait is tried again.

    ``num_found`` counts offloads whose storage was there.
    """

    def __init__(self, schedule: Schedule, residency: Residency, binding: Binding) -> None:
        self.schedule = schedule
        self.num_found = 0
        self._residency = residency
        self._binding = binding
        self.late_prefetches: list[Holding] = []
        self.late_offloads: list[PlannedMove] = []
        self.late_frees: dict[int, Holding] = {}

    def issue_late_offloads(self) -> None:
        """Who held their places died after the kernel: the user's reference outlived it.

        What a collective still uses waits on.
        """
        late, self.late_offloads = self.late_offloads, []
        for move in late:
            holding = self._binding.holding(move.storage)
            if holding is not None and not self._offload(move, holding) and holding.in_flight:
                self.late_offloads.append(move)

    def release_late(self) -> None:
        """Free what was in use when its memory was to be given back, once its copy is there."""
        for row, holding in list(self.late_frees.items()):
            if not holding.is_resident or holding.is_dead:
                del self.late_frees[row]
            elif holding.slot is not None and (holding.leaving is None or holding.leaving.done):
                self._residency.release(holding)
                del self.late_frees[row]

    def before_kernel(self, kernel: int) -> None:
        """Frees, then prefetches, then holes for what the kernel creates."""
        schedule, residency, placement = self.schedule, self._residency, self._binding.placement
        if kernel == 0 and placement.is_unsettled:
            # Who held their places died after the iteration (gradients, in zero_grad), or leaves.
            placement.establish_by_force(residency, self._binding.holding_of_row)
            placement.is_unsettled = False  # Once is enough; the rest comes on demand.
        for move in schedule.frees_before[kernel]:
            holding = self._binding.holding(move.storage)
            if holding is not None:
                residency.release(holding)
                if holding.in_flight or (self.late_offloads and holding.can_leave):
                    self.late_frees[move.storage] = holding
        prefetches = schedule.prefetches_before[kernel]
        reserved_bytes = schedule.need_bytes[kernel] if prefetches else 0
        memory, may_move = residency.memory, schedule.may_move
        if kernel == 0:
            memory.tidy(may_move)
        for move in prefetches:
            self.late_frees.pop(move.storage, None)
            holding = self._binding.holding(move.storage)
            if holding is not None:
                if holding.allocated_bytes > MIB and not holding.is_resident:
                    memory.prepare((holding.allocated_bytes,), may_move)
                if not residency.prefetch(holding, reserved_bytes):
                    self.late_prefetches.append(holding)
        memory.prepare(schedule.requests[kernel], may_move)

    def before_view(self, holding: Holding) -> None:
        """Beside a view nothing is created yet, so its prefetch may fit already."""
        if holding in self.late_prefetches and self._residency.prefetch(holding, 0):
            self.late_prefetches.remove(holding)

    def retry_prefetches(self) -> None:
        """What found no room at a view may find it at the kernel: storages die in between."""
        late, self.late_prefetches = self.late_prefetches, []
        residency = self._residency
        residency.bury()
        reserved_bytes = self.schedule.need_bytes[residency.kernel]
        for holding in late:
            if not residency.prefetch(holding, reserved_bytes):
                residency.traffic.dropped_prefetches += 1

    def after_kernel(self, kernel: int) -> None:
        """Offloads."""
        for move in self.schedule.offloads_after[kernel]:
            holding = self._binding.holding(move.storage)
            if holding is not None:
                self.num_found += 1
                if not self._offload(move, holding) and move not in self.late_offloads:
                    self.late_offloads.append(move)

    def end_iteration(self, *, is_on_plan: bool) -> int:
        """Give up what is late, offloads too unless all went by the plan; offloads found."""
        self.late_prefetches.clear()
        if not is_on_plan:
            self.late_offloads.clear()
            self.late_frees.clear()
        found, self.num_found = self.num_found, 0
        return found

    def _offload(self, move: PlannedMove, holding: Holding) -> bool:
        """Start a planned write; False if another storage's only copy lies in its place."""
        if not holding.is_resident:
            return True
        if holding.in_flight:
            return False
        slot = holding.slot
        lies_there = (
            slot is not None
            and slot.store.name == move.device
            and slot.offset_bytes == move.offset_bytes
        )
        if not move.writes and lies_there:
            return True
        residency = self._residency
        target = Slot(
            residency.tiers.stores[move.device], move.offset_bytes, move.nbytes, is_overflow=False
        )
        if not residency.can_take(target, holding):
            return False
        residency.offload(holding, target)
        return True
