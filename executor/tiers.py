"""The stores of one run, their planned arenas and their overflow areas."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from teraio.contracts.hardware import HOST, Hardware
from teraio.errors import CapacityError, StoreError
from teraio.executor.slot_owners import SlotOwners
from teraio.executor.stores import (
    FileUse,
    HostStore,
    SlotAllocator,
    Store,
    VerifiedStore,
    open_ssd,
)
from teraio.executor.stores.ssd import check_backend
from teraio.executor.stores.striped_space import Directories


class Slot:
    """Bytes of a store that hold a copy of one storage. ``is_overflow``: not in the plan."""

    __slots__ = ("is_overflow", "nbytes", "offset_bytes", "store")

    def __init__(self, store: Store, offset_bytes: int, nbytes: int, *, is_overflow: bool) -> None:
        self.store = store
        self.offset_bytes = offset_bytes
        self.nbytes = nbytes
        self.is_overflow = is_overflow


class Tiers:
    """Stores by device name; hands out overflow slots, host first, then the SSD with most room."""

    def __init__(self, stores: Mapping[str, Store], arena_bytes: Mapping[str, int]) -> None:
        self.stores = dict(stores)
        self.owners: dict[str, SlotOwners[object]] = {name: SlotOwners() for name in stores}
        self._arena_bytes = {name: arena_bytes.get(name, 0) for name in stores}
        self._overflow = {
            name: SlotAllocator(
                self._arena_bytes[name], store.reserved_bytes, store.alignment_bytes
            )
            for name, store in self.stores.items()
        }

    @property
    def file_uses(self) -> list[FileUse]:
        """What each SSD file has done so far, in the order of the devices."""
        inner = [x.inner if isinstance(x, VerifiedStore) else x for x in self.stores.values()]
        return [use for store in inner for use in getattr(store, "file_uses", ())]

    @property
    def num_verified(self) -> int:
        """How many reads have been compared with what was written."""
        stores = self.stores.values()
        return sum(x.num_verified for x in stores if isinstance(x, VerifiedStore))

    def overflow_slot(self, nbytes: int) -> Slot:
        """A slot outside the plan's arenas. Raises CapacityError if no tier has room."""
        failures = ""
        for name in self._in_order_of_preference():
            try:
                slot = self.slot_in(name, nbytes)
            except StoreError as error:
                failures += f"; {error}"  # A full disk, where another tier may have room.
                continue
            if slot is not None:
                return slot
        rooms = {name: self._room_bytes(name) for name in self.stores}
        raise CapacityError(
            f"no tier has room for {nbytes} bytes that must leave the GPU (left: {rooms}); "
            f"give more --host-memory or a larger SSD{failures}"
        )

    def slot_in(self, name: str, nbytes: int) -> Slot | None:
        """A slot of one device outside the plan's arena; None if it has no room there."""
        offset_bytes = self._allocate(name, nbytes)
        if offset_bytes is None:
            return None
        return Slot(self.stores[name], offset_bytes, nbytes, is_overflow=True)

    def free(self, slot: Slot) -> None:
        """Give an overflow slot back."""
        self._overflow[slot.store.name].free(slot.offset_bytes)

    def close(self) -> None:
        """Close every store, also if one fails."""
        errors = []
        for store in self.stores.values():
            try:
                store.close()
            except OSError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _in_order_of_preference(self) -> list[str]:
        ssds = [name for name in self.stores if name != HOST]
        order = sorted(ssds, key=self._room_bytes, reverse=True)
        return [HOST, *order] if HOST in self.stores else order

    def _room_bytes(self, name: str) -> int:
        store = self.stores[name]
        growth = store.capacity_bytes - store.reserved_bytes
        return max(self._overflow[name].free_bytes, 0) + growth

    def _allocate(self, name: str, nbytes: int) -> int | None:
        allocator, store = self._overflow[name], self.stores[name]
        offset_bytes = allocator.allocate(nbytes)
        if offset_bytes is None and store.reserved_bytes < store.capacity_bytes:
            # Growing in steps of what has been needed so far keeps the number of steps small.
            room = store.capacity_bytes - store.reserved_bytes
            step = min(room, max(2 * nbytes, store.reserved_bytes // 4))
            store.grow(step - step % store.alignment_bytes)
            allocator.extend(store.reserved_bytes)
            offset_bytes = allocator.allocate(nbytes)
        return offset_bytes


def open_tiers(
    hardware: Hardware,
    rank: int,
    arena_bytes: Mapping[str, int],
    *,
    host_memory_bytes: int,
    ssd_path: Directories | None,
    device_type: str,
    ssd_backend: str = "auto",
    verify: Callable[[Store], Store] | None = None,
) -> Tiers:
    """Reserve every tier that a run may use: the plan's arenas, and room for what it misses.

    The SSD files lie in ``ssd_path``, else where the hardware says, else in a temporary folder; of
    several folders each holds one file of a stripe set. ``ssd_backend``: ``auto`` measures, where
    the plan uses an SSD of a GPU. ``verify`` wraps every store. Raises InputError, StoreError,
    CapacityError if host memory or disk cannot be had.
    """
    check_backend(ssd_backend)
    stores: dict[str, Store] = {}
    unplanned_bytes = 0
    with ExitStack() as undo:
        for ssd in hardware.ssds_of_rank(rank):
            planned_bytes = arena_bytes.get(ssd.name, 0)
            is_measured = ssd_backend != "auto" or planned_bytes > 0
            stores[ssd.name] = open_ssd(
                ssd,
                ssd_path or ssd.paths or tempfile.gettempdir(),
                planned_bytes,
                device=device_type,
                backend=ssd_backend if is_measured else "file",
            )
            undo.callback(stores[ssd.name].close)
            if ssd.gds and planned_bytes > 0:
                # It was to need no bounce buffers.
                unplanned_bytes += stores[ssd.name].pinned_bytes
        host_bytes = max(host_memory_bytes - unplanned_bytes, arena_bytes.get(HOST, 0))
        if host_bytes > 0:
            # First: it is asked first for room.
            stores = {HOST: HostStore(host_bytes, device=device_type), **stores}
        undo.pop_all()
    if verify is not None:
        stores = {name: verify(store) for name, store in stores.items()}
    return Tiers(stores, arena_bytes)
