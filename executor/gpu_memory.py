"""Memory for storages, and the GPU's kept together, so that little more is reserved than in use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from teraio.contracts.plan import Plan
from teraio.executor.holding import Holding
from teraio.executor.residency import Residency
from teraio.executor.storage_memory import StorageMemory, allocator_books
from teraio.profiler.storages import original_resize
from teraio.simulator.caching_allocator import LARGE_PAGE_BYTES, MIB
from teraio.simulator.compaction import RESERVED_SHARE, Occupied, prepare, tidy
from teraio.simulator.holes import Holes

_TRIM_SHARE = 1.045
"""Of the budget: what is reserved beyond it at an iteration's end is given back to the driver."""

_LOOKS = 12
_LOOKS_AT_START = 1000
"""Looks into the allocator in one iteration, and until it has settled; some milliseconds each."""


class Layout(NamedTuple):
    """How an allocator has laid out its pool for large requests, (address, bytes) each."""

    holes: list[tuple[int, int]]
    blocks: list[tuple[int, int]]
    reserved_bytes: int


class GpuAllocator:
    """PyTorch's CUDA allocator on the current device and stream."""

    def __init__(self) -> None:
        self._device = torch.cuda.current_device()
        self._stream = torch.cuda.current_stream()

    def is_usable(self) -> bool:
        """Whether storages can be moved now: not on another stream, nor into a CUDA graph."""
        return (
            torch.cuda.current_stream() == self._stream
            and not torch.cuda.is_current_stream_capturing()
        )

    def look(self) -> Layout | None:
        """Its present layout; None without expandable segments, where blocks lie in many ranges."""
        holes: list[tuple[int, int]] = []
        blocks: list[tuple[int, int]] = []
        reserved_bytes = 0
        for segment in torch.cuda.memory_snapshot():
            if segment["device"] != self._device:
                continue
            reserved_bytes += segment["total_size"]
            if not self._is_pool(segment):
                continue
            if not segment["is_expandable"]:
                return None
            for block in segment["blocks"]:
                kind = holes if block["state"] == "inactive" else blocks
                kind.append((block["address"], block["size"]))
        return Layout(holes, blocks, reserved_bytes)

    def _is_pool(self, segment: dict[str, Any]) -> bool:
        return (
            segment["segment_type"] == "large"
            and segment["stream"] == self._stream.cuda_stream
            and tuple(segment["segment_pool_id"]) == (0, 0)
        )

    @staticmethod
    def address(storage: torch.UntypedStorage) -> int:
        """Where a storage lies."""
        # Not the method of the storage: a pointer that is asked for there is given away.
        address: int = torch._C.StorageBase.data_ptr(storage)  # type: ignore[attr-defined]
        return address

    def move(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """New memory for a storage, a copy in the order of the stream, the old memory back."""
        original_resize(storage, nbytes)

    def allocate(self, nbytes: int) -> int:
        """A block of no storage: its address."""
        address: int = torch.cuda.caching_allocator_alloc(nbytes)
        return address

    def free(self, address: int) -> None:
        """Give such a block back."""
        torch.cuda.caching_allocator_delete(address)

    def books(self) -> tuple[int, int]:
        """Bytes in use, and reserved."""
        return allocator_books()

    def trim(self) -> None:
        """Give back to the driver what is not in use."""
        torch.cuda.empty_cache()


class CompactMemory(StorageMemory):
    """Moves storages within the GPU where fragmentation would make the allocator reserve more than
    :data:`RESERVED_SHARE` of the budget (:mod:`teraio.simulator.compaction`).

    Once that much is reserved it looks into the allocator, and from then on keeps account of its
    holes by what storages take and give back; where that does not add up it looks again. A storage
    moves only if nothing beside the compute stream uses it: it is copied in the stream's order, so
    kernels before the move find it at the old address and kernels after it at the new one.
    """

    def __init__(self, residency: Residency, allocator: GpuAllocator) -> None:
        self._residency = residency
        self._allocator = allocator
        self._limit_bytes = RESERVED_SHARE * residency.capacity_bytes
        self._holes = Holes()
        self._lying_at: dict[int, Holding] = {}
        self._others: dict[int, int] = {}
        self._plugs: dict[int, int] = {}
        self._may_move: Sequence[bool] = ()
        self._reserved_bytes = 0
        self._is_known = False
        self._is_possible = True
        self._looks_left = 0
        self.begin()

    # Storages come and go

    def note(self, holding: Holding) -> None:
        """A storage lies on the GPU."""
        nbytes = holding.allocated_bytes
        if not self._is_known or nbytes <= MIB:
            return
        storage = holding.state.reference()
        if storage is None:
            return
        address = self._allocator.address(storage)
        if self._others.get(address) == nbytes:
            del self._others[address]
        elif not self._holes.take_at(address, nbytes):
            self._lose()
            return
        holding.address = address
        self._lying_at[address] = holding

    def forget(self, holding: Holding) -> None:
        """A storage no longer has memory."""
        if self._lying_at.get(holding.address) is holding:
            del self._lying_at[holding.address]
            self._holes.put_back(holding.address, holding.allocated_bytes)
        holding.address = 0

    def allocate(self, holding: Holding, storage: torch.UntypedStorage) -> None:
        """Memory for a storage that has none."""
        super().allocate(holding, storage)
        self.note(holding)

    def give_back(self, holding: Holding, storage: torch.UntypedStorage) -> None:
        """The storage's memory goes back."""
        if holding.shared_with is not None:
            # It is free only when another stream is through with it.
            self._lose()
        super().give_back(holding, storage)
        self.forget(holding)

    def prepare(self, requests: Sequence[int], may_move: Sequence[bool]) -> None:
        """Let blocks of these sizes, which are about to be allocated, find holes."""
        if not requests or not self._is_possible:
            return
        if self._is_known:
            if self._holes.largest_bytes >= sum(requests):
                return
        elif not self._must_know(requests) or not self._look():
            return
        if not self._allocator.is_usable():
            return
        self._may_move = may_move
        traffic = self._residency.traffic
        try:
            compacted = prepare(requests, self)
        except torch.OutOfMemoryError:
            # Another program has taken what would have been the room for it; nothing is lost.
            self._lose()
            return
        traffic.relocated_bytes += compacted.moved_bytes
        traffic.homeless_requests += compacted.num_failed

    def tidy(self, may_move: Sequence[bool]) -> None:
        """Where much is reserved already: between two iterations much of it is free."""
        is_due = self._is_known and self.would_exceed(LARGE_PAGE_BYTES)
        if is_due and self._allocator.is_usable():
            self._may_move = may_move
            with suppress(torch.OutOfMemoryError):
                self._residency.traffic.relocated_bytes += tidy(self)

    # Iterations

    def begin(self) -> None:
        """A run begins, or begins anew: what the training before it has reserved goes back."""
        self._looks_left = _LOOKS_AT_START
        self._trim_above(self._limit_bytes)

    def end_iteration(self) -> tuple[int, int]:
        """What is reserved may have grown by requests for which no room could be made."""
        books = self._allocator.books()
        self._looks_left = max(self._looks_left - _LOOKS, _LOOKS)
        if books[1] != self._reserved_bytes:
            self._lose()
        if self._is_possible:
            self._trim_above(_TRIM_SHARE * self._residency.capacity_bytes)
        return books

    def _trim_above(self, limit_bytes: float) -> None:
        self._reserved_bytes = self._allocator.books()[1]
        if self._reserved_bytes > limit_bytes:
            self._allocator.trim()
            self._reserved_bytes = self._allocator.books()[1]
            self._lose()

    # The allocator, as compaction sees it

    @property
    def holes(self) -> Holes:
        """Reserved and free."""
        return self._holes

    @property
    def spare_bytes(self) -> int:
        """Up to the budget."""
        residency = self._residency
        return residency.capacity_bytes - residency.used_bytes - sum(self._plugs.values())

    def would_exceed(self, nbytes: int) -> bool:
        """Whether new pages for a block would be more than the limit."""
        return self._reserved_bytes + _pages_bytes(nbytes) > self._limit_bytes

    def blocks(self) -> Iterator[Occupied]:
        """Owners are addresses."""
        for address, holding in self._lying_at.items():
            is_movable = holding.row >= 0 and self._may_move[holding.row] and can_move(holding)
            yield Occupied(address, holding.allocated_bytes, address if is_movable else None)
        for address, nbytes in (*self._others.items(), *self._plugs.items()):
            yield Occupied(address, nbytes, None)

    def plug(self, nbytes: int) -> int:
        """A block of no storage."""
        address = self._allocator.allocate(nbytes)
        self._plugs[address] = nbytes
        if not self._holes.take_at(address, nbytes):
            self._lose()
        return address

    def unplug(self, begin: int) -> None:
        """Free it."""
        self._allocator.free(begin)
        nbytes = self._plugs.pop(begin)
        if self._is_known:
            self._holes.put_back(begin, nbytes)

    def move(self, owner: int) -> bool:
        """By a resize to the size that it has: the allocator chooses where."""
        holding = self._lying_at[owner]
        nbytes = holding.allocated_bytes
        storage, expected = holding.state.reference(), self._holes.best_fit(nbytes)
        if storage is None:
            return False
        self._allocator.move(storage, holding.state.nbytes)
        if expected is None:
            # It lies in new pages.
            return self._look()
        address = self._allocator.address(storage)
        if not self._holes.take_at(address, nbytes):
            self._lose()
            return False
        self._holes.put_back(owner, nbytes)
        del self._lying_at[owner]
        self._lying_at[address] = holding
        holding.address = address
        return address == expected[0]

    # What is known of it

    def _must_know(self, requests: Sequence[int]) -> bool:
        """Whether these requests could make the allocator reserve more than the limit."""
        pages_bytes = sum(map(_pages_bytes, requests))
        self._reserved_bytes += pages_bytes
        if self._reserved_bytes > self._limit_bytes:
            # It was assumed that every request until now has found no hole.
            self._reserved_bytes = self._allocator.books()[1] + pages_bytes
        return self._reserved_bytes > self._limit_bytes

    def _look(self) -> bool:
        """Learn the layout from the allocator; False if that was done too often."""
        if not self._looks_left:
            return False
        self._looks_left -= 1
        layout = self._allocator.look()
        if layout is None:
            self._is_possible = False
            return False
        self._lose()
        self._is_known = True
        self._reserved_bytes = layout.reserved_bytes
        self._others = {a: nbytes for a, nbytes in layout.blocks if a not in self._plugs}
        for address, nbytes in layout.holes:
            self._holes.put_back(address, nbytes)
        for holding in self._residency.holdings():
            storage = holding.state.reference()
            if holding.is_resident and not holding.is_dead and storage is not None:
                address = self._allocator.address(storage)
                if self._others.get(address) == holding.allocated_bytes:
                    del self._others[address]
                    holding.address = address
                    self._lying_at[address] = holding
        return True

    def _lose(self) -> None:
        """The account does not hold any more; the next look begins another."""
        self._is_known = False
        self._holes, self._lying_at, self._others = Holes(), {}, {}


def _pages_bytes(nbytes: int) -> int:
    return -(-nbytes // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES


def memory_for(plan: Plan, residency: Residency, device_type: str) -> StorageMemory:
    """Of a run: kept together where a plan moves anything and PyTorch's own allocator serves."""
    if device_type != "cuda" or not len(plan.moves):
        return StorageMemory()
    if torch.cuda.memory.get_allocator_backend() != "native":
        return StorageMemory()
    return CompactMemory(residency, GpuAllocator())


def can_move(holding: Holding) -> bool:
    """Whether nothing but kernels of the compute stream uses the storage's memory."""
    return (
        holding.can_leave
        and holding.arriving is None
        and holding.shared_with is None
        and (holding.leaving is None or holding.leaving.done)
        and all(write.done for write in holding.superseded or ())
        and _is_resizable(holding)
    )


def _is_resizable(holding: Holding) -> bool:
    storage = holding.state.reference()
    return storage is not None and storage.resizable()
