"""Where each storage is, and the moves between the GPU and the tiers (DESIGN: Semantics, rule 5).

A storage is on the GPU, or it is away and exactly one slot holds its bytes. While it is on the GPU
a slot may also hold a clean copy; a write makes the copy stale, and the slot is given up. Memory is
counted where it is decided: a storage counts from its birth or fetch until its release or death.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from teraio.errors import CapacityError
from teraio.executor.stores import Store, Transfer
from teraio.executor.tiers import Slot, Tiers
from teraio.profiler.storages import StorageState, original_resize

SMALL_BYTES = 4096
"""Storages below this are evicted only when no larger one is left: they free next to nothing."""


class Holding:
    """What the executor knows of one storage; the attachment of its StorageState."""

    __slots__ = (
        "allocated_bytes",
        "arriving",
        "is_fixed",
        "is_resident",
        "last_use",
        "leaving",
        "row",
        "slot",
        "state",
    )

    def __init__(self, state: StorageState, allocated_bytes: int, *, is_fixed: bool) -> None:
        self.state = state
        self.row = -1
        self.allocated_bytes = allocated_bytes
        self.is_fixed = is_fixed
        self.is_resident = True
        self.slot: Slot | None = None
        self.arriving: Transfer | None = None
        self.leaving: Transfer | None = None
        self.last_use = 0


class TransferRecord(NamedTuple):
    """A transfer for the timeline: its kernel, storage row, channel and cause."""

    transfer: Transfer
    device: str
    kernel: int
    row: int
    cause: str


class Wait(NamedTuple):
    """Time in which the next kernel waited; cause: read | memory."""

    kernel: int
    row: int
    cause: str
    start_seconds: float
    end_seconds: float


@dataclass
class Traffic:
    """What was moved off plan, and what happened in the current iteration."""

    demand_fetches: int = 0
    demand_fetch_bytes: int = 0
    evictions: int = 0
    eviction_bytes: int = 0
    dropped_prefetches: int = 0
    transfers: list[TransferRecord] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)


class Residency:
    """All holdings of a run under one GPU budget.

    ``victim_key`` maps a holding to its eviction key, and the largest leaves first; ``kernel`` is
    the index that records bear. Both are set by the mode that drives it.
    """

    def __init__(
        self,
        tiers: Tiers,
        capacity_bytes: int,
        *,
        rounding_bytes: int = 1,
        untracked_bytes: int = 0,
    ) -> None:
        self.tiers = tiers
        self.capacity_bytes = capacity_bytes
        self.used_bytes = untracked_bytes
        self.peak_bytes = untracked_bytes
        self.kernel = 0
        self.traffic = Traffic()
        self.victim_key: Callable[[Holding], float] = least_recently_used
        self._rounding_bytes = rounding_bytes
        self._holdings: set[Holding] = set()
        self._dead: deque[StorageState] = deque()
        self._is_saving = False

    # Births and deaths

    def adopt(self, state: StorageState) -> Holding:
        """Start to account for a storage that lies on the GPU."""
        storage = state.reference()
        size = -(-state.nbytes // self._rounding_bytes) * self._rounding_bytes
        is_fixed = storage is None or not storage.resizable()
        holding = Holding(state, size, is_fixed=is_fixed)
        state.attachment = holding
        self._holdings.add(holding)
        self.used_bytes += size
        return holding

    def note_death(self, state: StorageState) -> None:
        """A storage was freed; callable from any thread, takes effect in :meth:`bury`."""
        self._dead.append(state)

    def bury(self) -> None:
        """Stop to account for the storages that died."""
        while self._dead:
            holding = self._dead.popleft().attachment
            if holding is None or holding not in self._holdings:
                continue
            self._holdings.discard(holding)
            if holding.is_resident:
                self.used_bytes -= holding.allocated_bytes
            self._give_up_slot(holding)

    # Planned moves

    def offload(self, holding: Holding, slot: Slot, cause: str = "offload") -> None:
        """Start to write a resident storage into a slot; its memory stays until ``release``."""
        storage = holding.state.reference()
        if storage is None or not holding.is_resident or holding.is_fixed:
            return
        self._settle_arrival(holding)
        self._take_slot(holding, slot)
        holding.leaving = slot.store.write(
            storage, slot.offset_bytes, holding.state.nbytes, urgent=cause != "offload"
        )
        self._record(holding.leaving, slot.store, holding, cause)

    def can_take(self, slot: Slot, holding: Holding) -> bool:
        """Whether no other storage would lose its only copy if the slot were written now."""
        owners = self.tiers.owners[slot.store.name]
        end = slot.offset_bytes + max(slot.nbytes, 1)
        others = owners.overlapping(slot.offset_bytes, end)
        return all(
            other is holding or (isinstance(other, Holding) and other.is_resident)
            for _, other in others
        )

    def release(self, holding: Holding) -> None:
        """Give back the GPU memory of a storage whose copy is good; wait for the copy if need be.

        Does nothing where there is no good copy: the plan was wrong there, the data stays.
        """
        if not holding.is_resident or holding.is_fixed or holding.slot is None:
            return
        storage = holding.state.reference()
        if storage is None:
            return
        if not storage.resizable():
            # numpy() and the like have taken a pointer to it since.
            holding.is_fixed = True
            return
        self._settle_arrival(holding)
        if holding.leaving is not None:
            self._await(holding.leaving, holding, "memory")
            holding.leaving = None
        original_resize(storage, 0)
        holding.is_resident = False
        self.used_bytes -= holding.allocated_bytes

    def fetch(self, holding: Holding, cause: str = "prefetch") -> None:
        """Take GPU memory for a storage that is away and start to read it back."""
        storage, slot = holding.state.reference(), holding.slot
        if holding.is_resident or storage is None or slot is None:
            return
        original_resize(storage, holding.state.nbytes)
        holding.is_resident = True
        self.used_bytes += holding.allocated_bytes
        holding.arriving = slot.store.read(
            storage, slot.offset_bytes, holding.state.nbytes, urgent=cause != "prefetch"
        )
        self._record(holding.arriving, slot.store, holding, cause)

    def prefetch(self, holding: Holding, reserved_bytes: int) -> bool:
        """Fetch ahead of need if there is room beside ``reserved_bytes``; whether it is there."""
        if holding.is_resident:
            return True
        if self.used_bytes + holding.allocated_bytes + reserved_bytes > self.capacity_bytes:
            return False
        self.fetch(holding)
        return True

    # What a kernel needs

    def require(self, holdings: Collection[Holding], need_bytes: int = 0) -> None:
        """Make storages resident, with ``need_bytes`` of room beside them, and their bytes visible
        to the next kernel. Raises CapacityError if that much cannot be had.
        """
        missing = [holding for holding in holdings if not holding.is_resident]
        for holding in missing:
            need_bytes += holding.allocated_bytes
        if need_bytes > 0 and not self._is_saving:
            self.make_room(need_bytes, holdings)
        for holding in missing:
            self.traffic.demand_fetches += 1
            self.traffic.demand_fetch_bytes += holding.state.nbytes
            self.fetch(holding, "demand_fetch")
        for holding in holdings:
            self._settle_arrival(holding)

    def written(self, holding: Holding) -> None:
        """A kernel writes the storage: its copy, if any, is stale from now on."""
        holding.leaving = None
        self._give_up_slot(holding)

    def make_room(self, need_bytes: int, protected: Collection[Holding]) -> None:
        """Evict until ``need_bytes`` fit. Raises CapacityError if nothing more can leave."""
        if self.used_bytes + need_bytes <= self.capacity_bytes:
            return
        # Storages that died since the boundary (between a view and its kernel) are still counted.
        self.bury()
        if self.used_bytes + need_bytes <= self.capacity_bytes:
            return
        for victim in self._victims(protected):
            self._evict(victim)
            if self.used_bytes + need_bytes <= self.capacity_bytes:
                return
        raise CapacityError(
            f"kernel {self.kernel} needs {need_bytes} bytes more, but {self.used_bytes} of the "
            f"{self.capacity_bytes} in the GPU budget cannot leave; raise --gpu-memory"
        )

    def bring_back(self) -> Callable[[], None]:
        """Fetch everything that is away, over the budget if it must be: nothing is lost.

        Nothing is evicted until the returned function is called, which sends the same storages
        away again, at no cost: their copies stay good.
        """
        self.bury()
        away = [h for h in self._holdings if not h.is_resident]
        for holding in away:
            self.fetch(holding, "demand_fetch")
        for holding in list(self._holdings):
            self._settle_arrival(holding)
        self._is_saving = True

        def send_away_again() -> None:
            self.resume()
            for holding in away:
                self.release(holding)

        return send_away_again

    def resume(self) -> None:
        """Evict again where memory is short, after :meth:`bring_back`."""
        self._is_saving = False

    def settle_books(self, allocated_bytes: int) -> None:
        """Correct the account by the allocator's own: blocks may be larger than was asked for, and
        libraries hold memory that no dispatch mode sees.
        """
        self.used_bytes = allocated_bytes

    def note_peak(self, workspace_bytes: int) -> None:
        """A kernel has run with everything resident and this much scratch."""
        self.peak_bytes = max(self.peak_bytes, self.used_bytes + workspace_bytes)

    def take_peak(self) -> int:
        """Most bytes held since the last call."""
        peak, self.peak_bytes = self.peak_bytes, self.used_bytes
        return peak

    def holdings(self) -> Iterable[Holding]:
        """All storages that live, in no order."""
        return self._holdings

    # Parts

    def _victims(self, protected: Collection[Holding]) -> list[Holding]:
        protected = set(protected)
        candidates = [
            h
            for h in self._holdings
            if h.is_resident and not h.is_fixed and h.allocated_bytes and h not in protected
        ]
        key = self.victim_key
        return sorted(
            candidates,
            # What is just arriving was asked for: it leaves last.
            key=lambda h: (
                h.arriving is None,
                h.allocated_bytes >= SMALL_BYTES,
                key(h),
                h.state.serial,
            ),
            reverse=True,
        )

    def _evict(self, holding: Holding) -> None:
        storage = holding.state.reference()
        if storage is None:
            return
        self.traffic.evictions += 1
        if holding.slot is None:
            self.traffic.eviction_bytes += holding.state.nbytes
            slot = self.tiers.overflow_slot(holding.state.nbytes)
            self.offload(holding, slot, "eviction")
        del storage
        self.release(holding)

    def _take_slot(self, holding: Holding, slot: Slot) -> None:
        self._give_up_slot(holding)
        if not slot.is_overflow:
            owners = self.tiers.owners[slot.store.name]
            end = slot.offset_bytes + max(slot.nbytes, 1)
            for _, other in owners.overlapping(slot.offset_bytes, end):
                assert isinstance(other, Holding)
                self._displace(other)
            owners.add(slot.offset_bytes, end, holding)
        holding.slot = slot

    def _displace(self, other: Holding) -> None:
        # It is resident (can_take), so only a clean copy goes; a read of it still under way was
        # issued earlier, and the store serves the two in that order.
        other.leaving = None
        self._give_up_slot(other)

    def _give_up_slot(self, holding: Holding) -> None:
        slot, holding.slot = holding.slot, None
        if slot is None:
            return
        if slot.is_overflow:
            self.tiers.free(slot)
        else:
            self.tiers.owners[slot.store.name].remove(slot.offset_bytes, holding)

    def _settle_arrival(self, holding: Holding) -> None:
        if holding.arriving is not None:
            self._await(holding.arriving, holding, "read")
            holding.arriving = None

    def _await(self, transfer: Transfer, holding: Holding, cause: str) -> None:
        start = time.perf_counter()
        transfer.make_stream_wait()
        end = time.perf_counter()
        self.traffic.waits.append(Wait(self.kernel, holding.row, cause, start, end))

    def _record(self, transfer: Transfer, store: Store, holding: Holding, cause: str) -> None:
        self.traffic.transfers.append(
            TransferRecord(transfer, store.name, self.kernel, holding.row, cause)
        )


def least_recently_used(holding: Holding) -> float:
    """Eviction key of a run that does not follow its trace."""
    return -holding.last_use
