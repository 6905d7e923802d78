"""Where each storage is, and the moves between the GPU and the tiers (DESIGN: Semantics, rule 5).

A storage is on the GPU, or it is away and exactly one slot holds its bytes. While it is on the GPU
a slot may also hold a clean copy; a write makes the copy stale, and the slot is given up. Memory is
counted where it is decided: a storage counts from its birth or fetch until its release or death.

Anything here may be interrupted (a failed transfer, Ctrl-C) between any two steps. So the order of
steps is such that a storage is never taken for resident without its bytes, nor a slot for a copy
that was not issued; at worst a good copy is read or written once more.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress

from teraio.errors import CapacityError, StoreError
from teraio.executor.eviction_order import EvictionOrder, least_recently_used
from teraio.executor.holding import Holding, Traffic, TransferRecord, Wait, died, ghost_of, parted
from teraio.executor.shortage import why_no_room
from teraio.executor.storage_memory import StorageMemory, bytes_of
from teraio.executor.stores import Store, Transfer
from teraio.executor.tiers import Slot, Tiers
from teraio.profiler.storages import StorageState


class Residency:
    """All holdings of a run under one GPU budget.

    ``victim_key`` maps a holding to its eviction key, and the largest leaves first; ``find_slot``
    says where one goes that has no copy; ``kernel`` is the index that records bear. All are set by
    those who drive it.
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
        self.untracked_bytes = untracked_bytes
        self.used_bytes = untracked_bytes
        self.peak_bytes = untracked_bytes
        self.kernel = 0
        self.memory = StorageMemory()
        self.traffic = Traffic()
        self.victim_key: Callable[[Holding], float] = least_recently_used
        self.order = EvictionOrder(lambda holding: self.victim_key(holding))
        self.find_slot: Callable[[Holding], Slot] = lambda h: tiers.overflow_slot(h.state.nbytes)
        self._rounding_bytes = rounding_bytes
        self._holdings: set[Holding] = set()
        self._dead: deque[StorageState] = deque()
        self._keepers = 0

    # Births and deaths

    def adopt(self, state: StorageState) -> Holding:
        """Start to account for a storage that lies on the GPU; of one that has died, a ghost."""
        storage = state.reference()
        if storage is None or state.attachment is not None:
            return ghost_of(state)
        size = -(-state.nbytes // self._rounding_bytes) * self._rounding_bytes
        holding = state.attachment = Holding(state, size, is_fixed=not storage.resizable())
        self._holdings.add(holding)
        self.memory.note(holding)
        self.used_bytes += size
        self.order.note_use(holding)
        return holding

    def note_death(self, state: StorageState) -> None:
        """A storage was freed; callable from any thread, takes effect in :meth:`bury`."""
        if died(state):
            self._dead.append(state)

    def bury(self) -> None:
        """Stop to account for the storages that died."""
        while self._dead:
            holding = parted(self._dead.popleft())
            self._holdings.discard(holding)
            self.memory.forget(holding)
            if holding.is_resident:
                self.used_bytes -= holding.allocated_bytes
            self._give_up_slot(holding)

    # Planned moves

    def offload(self, holding: Holding, slot: Slot, cause: str = "offload") -> None:
        """Start to write a resident storage into a slot; its memory stays until ``release``."""
        storage = holding.state.reference()
        if storage is None or not holding.is_resident or holding.must_stay:
            return
        self._settle_arrival(holding)
        self._vacate(slot, holding)
        self.written(holding)
        holding.leaving = slot.store.write(
            storage, slot.offset_bytes, holding.state.nbytes, urgent=cause != "offload"
        )
        if not slot.is_overflow:
            end = slot.offset_bytes + max(slot.nbytes, 1)
            self.tiers.owners[slot.store.name].add(slot.offset_bytes, end, holding)
        holding.slot = slot
        self._record(holding.leaving, slot.store, holding, cause)

    def can_take(self, slot: Slot, holding: Holding) -> bool:
        """Whether no other storage would lose its only copy if the slot were written now."""
        end = slot.offset_bytes + max(slot.nbytes, 1)
        others = self.tiers.owners[slot.store.name].overlapping(slot.offset_bytes, end)
        return all(
            other is holding
            or (isinstance(other, Holding) and (other.is_resident or other.is_dead))
            for _, other in others
        )

    def release(self, holding: Holding) -> None:
        """Give back the GPU memory of a storage whose copy is good; wait for the copy if need be.

        Does nothing where there is no good copy: the plan was wrong there, the data stays. Raises
        StoreError if the copy could not be made; the data stays then too.
        """
        if holding.slot is None or not holding.can_leave or self._keepers:
            return
        storage = holding.state.reference()
        if storage is None:
            return
        if not storage.resizable():
            # numpy() and the like have taken a pointer to it since.
            holding.is_fixed = True
            return
        self._settle_arrival(holding)
        self._settle_departure(holding)
        self._await_superseded(holding)
        self._free(holding)

    def fetch(self, holding: Holding, cause: str = "prefetch") -> None:
        """Take GPU memory for a storage that is away and start to read it back."""
        storage, slot = holding.state.reference(), holding.slot
        if holding.is_resident or storage is None:
            return
        assert slot is not None, "a storage that is away has a slot"
        self.memory.allocate(holding, storage)
        try:
            holding.arriving = holding.arrived = slot.store.read(
                storage, slot.offset_bytes, holding.state.nbytes, urgent=cause != "prefetch"
            )
        except BaseException:
            self.memory.give_back(holding, storage)
            raise
        holding.is_resident = True
        self.used_bytes += holding.allocated_bytes
        self.order.note_use(holding)
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

    def require(
        self, holdings: Collection[Holding], need_bytes: int = 0, *, is_guess: bool = False
    ) -> None:
        """Make storages resident, with ``need_bytes`` of room beside them, and their bytes visible
        to the next kernel. Raises CapacityError if that much cannot be had, unless it was a guess.
        """
        missing: list[Holding] = []
        missing_bytes, is_arriving = 0, False
        for holding in holdings:
            if not holding.is_resident:
                missing.append(holding)
                missing_bytes += holding.allocated_bytes
            elif holding.arriving is not None:
                is_arriving = True
        if self.used_bytes + missing_bytes + need_bytes > self.capacity_bytes:
            if is_guess:
                with suppress(CapacityError):
                    self.make_room(missing_bytes + need_bytes, holdings)
                need_bytes = 0
            self.make_room(missing_bytes + need_bytes, holdings)
        for holding in missing:
            self.traffic.demand_fetches += 1
            self.traffic.demand_fetch_bytes += holding.state.nbytes
            self.fetch(holding, "demand_fetch")
        if missing or is_arriving:
            for holding in holdings:
                self._settle_arrival(holding)

    def written(self, holding: Holding) -> None:
        """A kernel writes the storage: its copy, if any, is stale from now on."""
        leaving = holding.leaving
        if leaving is not None:
            if not leaving.done:
                holding.superseded = [*(holding.superseded or ()), leaving]
            holding.leaving = None
        if holding.slot is not None:
            self._give_up_slot(holding)

    def settle(self, holding: Holding) -> None:
        """Wait until no transfer uses the storage's memory, which is about to be replaced."""
        self._settle_arrival(holding)
        with suppress(StoreError):
            self._settle_departure(holding)
        self._await_superseded(holding)

    def make_room(self, need_bytes: int, protected: Collection[Holding]) -> None:
        """Evict until ``need_bytes`` fit; nothing while :meth:`keeping`. Raises CapacityError if
        everything that could leave has left, and StoreError.
        """
        if self._keepers:
            return
        # Storages may have died since the kernel's boundary, while views of it were taken.
        self.bury()
        homeless: CapacityError | None = None
        while self.used_bytes + need_bytes > self.capacity_bytes:
            victim = self.order.pop(self._holdings, protected)
            if victim is None:
                raise homeless or CapacityError(why_no_room(self, need_bytes, protected))
            try:
                self._evict(victim)
            except CapacityError as error:
                # Another may find a place. A traceback would keep alive what its frames hold.
                homeless, protected = error.with_traceback(None), {*protected, victim}
                self.order.note_use(victim)

    def bring_back(self) -> Callable[[], None]:
        """Fetch everything that is away, over the budget if it must be: nothing is lost.

        Nothing is evicted until the returned function is called, which sends the same storages
        away again, at no cost: their copies stay good. Raises the first StoreError, after having
        brought back whatever else can be.
        """
        self.bury()
        errors: list[StoreError] = []
        away = [holding for holding in self._holdings if not holding.is_resident]
        for holding in [*away, *self._holdings]:
            try:
                self.fetch(holding, "demand_fetch")
            except StoreError as error:
                errors.append(error)
        for holding in list(self._holdings):
            try:
                self._settle_arrival(holding)
            except StoreError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        self._keepers += 1

        def send_away_again() -> None:
            self._keepers -= 1
            for holding in away:
                self.release(holding)

        return send_away_again

    def restore(self) -> None:
        """Fetch everything that is away, over the budget until the next kernel if it must be."""
        self.bring_back()
        self._keepers -= 1

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Inside, storages may come but none may leave, over the budget if it must be."""
        self._keepers += 1
        try:
            yield
        finally:
            self._keepers -= 1

    def end(self) -> None:
        """Bring everything back for good. What cannot be read is filled with 0xFF (NaN in floating
        point) before the StoreError is raised: nobody shall take it for data.
        """
        try:
            self.bring_back()
        except (StoreError, KeyboardInterrupt):
            for holding in list(self._holdings):
                storage = holding.state.reference()
                if not holding.is_resident and storage is not None:
                    self.memory.allocate(holding, storage)
                    bytes_of(storage).fill_(0xFF)
            raise

    def settle_books(self, at_least_bytes: int = 0) -> int:
        """Correct the account by the GPU allocator's own, where no mode looks; bytes reserved."""
        self.bury()
        in_use_bytes, reserved_bytes = self.memory.end_iteration()
        self.used_bytes = max(in_use_bytes, at_least_bytes)
        return reserved_bytes

    def note_peak(self, workspace_bytes: int) -> None:
        """A kernel has run with everything resident and this much scratch."""
        self.peak_bytes = max(self.peak_bytes, self.used_bytes + workspace_bytes)

    def take_peak(self) -> int:
        """Most bytes held since the last call."""
        peak, self.peak_bytes = self.peak_bytes, self.used_bytes
        return peak

    def holdings(self) -> Collection[Holding]:
        """All storages that live, in no order."""
        return self._holdings

    # Parts

    def _evict(self, holding: Holding) -> None:
        self.traffic.evictions += 1
        if holding.slot is None:
            self.traffic.eviction_bytes += holding.state.nbytes
            slot = self.find_slot(holding)
            try:
                self.offload(holding, slot, "eviction")
            finally:
                if holding.slot is not slot and slot.is_overflow:
                    self.tiers.free(slot)
        self.release(holding)

    def _vacate(self, slot: Slot, holding: Holding) -> None:
        """Give the planned place to ``holding``; who lies there is resident (:meth:`can_take`)."""
        if slot.is_overflow:
            return
        owners = self.tiers.owners[slot.store.name]
        end = slot.offset_bytes + max(slot.nbytes, 1)
        for begin, other in owners.overlapping(slot.offset_bytes, end):
            assert isinstance(other, Holding)
            # Only a clean copy goes; a read of it still under way was issued earlier, and the store
            # serves the two in that order.
            if other is not holding:
                self.written(other)
                owners.remove(begin, other)

    def _give_up_slot(self, holding: Holding) -> None:
        slot, holding.slot = holding.slot, None
        if slot is None:
            return
        if slot.is_overflow:
            self.tiers.free(slot)
        else:
            self.tiers.owners[slot.store.name].remove(slot.offset_bytes, holding)

    def _settle_arrival(self, holding: Holding) -> None:
        if holding.arriving is None:
            return
        try:
            self._await(holding.arriving, holding, "read")
        except StoreError:
            # Its bytes are not there: it is still away, and the next use reads it again.
            holding.arriving = None
            self._free(holding)
            raise
        holding.arriving = None

    def _free(self, holding: Holding) -> None:
        holding.is_resident = False
        self.used_bytes -= holding.allocated_bytes
        storage = holding.state.reference()
        if storage is not None:
            self.memory.give_back(holding, storage)

    def _settle_departure(self, holding: Holding) -> None:
        if holding.leaving is None:
            return
        try:
            self._await(holding.leaving, holding, "memory")
        except StoreError:
            # There is no copy, so whatever leaves next time is written anew.
            holding.leaving = None
            self._give_up_slot(holding)
            raise
        holding.leaving = None

    def _await_superseded(self, holding: Holding) -> None:
        for write in holding.superseded or ():
            # Nobody needs what it wrote; it must only be through with the memory.
            with suppress(StoreError):
                self._await(write, holding, "memory")
        holding.superseded = None

    def _await(self, transfer: Transfer, holding: Holding, cause: str) -> None:
        start = time.perf_counter()
        transfer.make_stream_wait()
        wait = Wait(self.kernel, holding.row, cause, start, time.perf_counter(), transfer)
        self.traffic.waits.append(wait)

    def _record(self, transfer: Transfer, store: Store, holding: Holding, cause: str) -> None:
        self.traffic.transfers.append(
            TransferRecord(transfer, store.name, self.kernel, holding.row, cause)
        )
