"""Memory for storages, and the GPU's kept together, so that little more is reserved than in use."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from teraio.contracts.plan import Plan
from teraio.executor.gpu_allocator import GpuAllocator
from teraio.executor.holding import Holding
from teraio.executor.residency import Residency
from teraio.executor.storage_memory import StorageMemory
from teraio.simulator.blocks import Blocks
from teraio.simulator.caching_allocator import LARGE_PAGE_BYTES, MIB
from teraio.simulator.compaction import RESERVED_SHARE, prepare, relocatable_rows, tidy
from teraio.simulator.holes import Holes

_TRIM_SHARE = 1.045
"""Of the budget: what is reserved beyond it at an iteration's end is given back to the driver."""

_TRIM_PAUSE = 4
"""Iterations from the first time to the second, then twice as many each time: what is given back is
mostly taken again, and both wait for the GPU.
"""

_ALERT_SHARE = 0.01
"""Of the budget: account is kept of the holes once no more than this is missing to the limit."""

_LOOKS = 12
_LOOKS_ANEW = 100
_LOOKS_AT_START = 1000
"""Looks into the allocator in one iteration, after one that did not go by the plan, and until it
has settled; some milliseconds each.
"""

_FAILURES = 30
"""In one iteration, some 10 ms each; after so many the allocator is left to itself until the next:
what is asked for may never be allocated, where a run has other kernels than its plan.
"""


class CompactMemory(StorageMemory):
    """Moves storages within the GPU where fragmentation would make the allocator reserve more than
    :data:`RESERVED_SHARE` of the budget (:mod:`teraio.simulator.compaction`).

    Once that much is reserved it looks into the allocator, and from then on keeps account of its
    holes by what storages take and give back; where that does not add up it looks again. A storage
    moves only if nothing beside the compute stream uses it: it is copied in the stream's order, so
    kernels before the move find it at the old address and kernels after it at the new one.
    """

    def __init__(
        self, residency: Residency, allocator: GpuAllocator, may_move: Sequence[bool] = ()
    ) -> None:
        self._residency = residency
        self._allocator = allocator
        self._limit_bytes = RESERVED_SHARE * residency.capacity_bytes
        self._holes = Holes()
        self._blocks = Blocks()
        self._lying_at: dict[int, Holding] = {}
        self._others: dict[int, int] = {}
        self._plugs: dict[int, int] = {}
        self._may_move = may_move
        self._reserved_bytes = 0
        self._is_known = False
        self._has_unsure = False
        self._is_possible = True
        self._looks_left = _LOOKS_AT_START
        self._failures_left = _FAILURES
        self._trim_pause = 0
        self._next_pause = _TRIM_PAUSE
        self._trim_above(self._limit_bytes)

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
        elif not self._take(address, nbytes):
            # Another stream's memory is none of this pool.
            if self._allocator.is_on_stream():
                self._lose()
            return
        self._note_at(address, holding)

    def forget(self, holding: Holding) -> None:
        """A storage no longer has memory."""
        address, nbytes = holding.address, holding.allocated_bytes
        holding.address = 0
        if self._lying_at.get(address) is not holding:
            return
        del self._lying_at[address]
        self._blocks.remove(address)
        if holding.shared_with:
            # It is free only when another stream is through with it, of which nobody tells.
            self._others[address] = nbytes
            self._has_unsure = True
        elif not self._holes.put_back(address, nbytes):
            self._lose()

    def note_uses(self, holdings: Collection[Holding], arguments: Sequence[Any] = ()) -> None:
        """A kernel with these arguments uses storages, maybe on another stream than the run's."""
        if not self._allocator.is_on_stream():
            stream = self._allocator.current_stream()
        elif len(arguments) == 2 and isinstance(arguments[1], torch.Stream):
            # Tensor.record_stream: promised for the memory that they have now.
            stream = arguments[1]
        else:
            return
        is_captured = self._allocator.is_capturing()
        for holding in holdings:
            holding.shared_with |= {stream}
            # A CUDA graph will read it at this address each time it is replayed.
            holding.is_fixed |= is_captured

    def allocate(self, holding: Holding, storage: torch.UntypedStorage) -> None:
        """Memory for a storage that has none."""
        # Most is fetched by the plan, which has seen to a hole; not what comes on demand.
        self.prepare_unplanned((holding.allocated_bytes,))
        super().allocate(holding, storage)
        self.note(holding)

    def give_back(self, holding: Holding, storage: torch.UntypedStorage) -> None:
        """The storage's memory goes back."""
        self.forget(holding)
        super().give_back(holding, storage)

    def prepare(self, requests: Sequence[int], may_move: Sequence[bool]) -> None:
        """Let blocks of these sizes, which are about to be allocated, find holes."""
        if not requests or not self._is_possible or not self._failures_left:
            return
        if self._is_known:
            if self._holes.largest_bytes >= sum(requests):
                return
        elif not self._looks_left or not self._must_know(requests) or not self._look():
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
            self._failures_left = 0
            return
        traffic.relocated_bytes += compacted.moved_bytes
        traffic.homeless_requests += compacted.num_failed
        self._failures_left -= compacted.num_failed

    def prepare_unplanned(self, sizes: Sequence[int]) -> None:
        """Let a kernel of the first iteration, or of one that strays from the plan, find holes."""
        self.prepare([size for size in sizes if size > MIB], self._may_move)

    def tidy(self, may_move: Sequence[bool]) -> None:
        """Where much is reserved already: between two iterations much of it is free."""
        is_due = self._is_known and self.would_exceed(LARGE_PAGE_BYTES)
        if is_due and self._allocator.is_usable():
            self._may_move = may_move
            try:
                self._residency.traffic.relocated_bytes += tidy(self)
            except torch.OutOfMemoryError:
                self._lose()

    # Iterations

    def begin(self) -> None:
        """A run begins, or begins anew: what the training before it has reserved goes back."""
        self._looks_left = max(self._looks_left, _LOOKS_ANEW)
        self._trim_now_and_then(self._limit_bytes)

    def end_iteration(self) -> tuple[int, int]:
        """What is reserved may have grown by requests for which no room could be made."""
        books = self._allocator.books()
        self._looks_left = max(self._looks_left - _LOOKS, _LOOKS)
        self._failures_left = _FAILURES
        if books[1] != self._reserved_bytes or self._has_unsure:
            self._lose()
        self._reserved_bytes = books[1]
        self._trim_pause = max(self._trim_pause - 1, 0)
        if self._is_possible:
            self._trim_now_and_then(_TRIM_SHARE * self._residency.capacity_bytes)
        return books

    def _trim_now_and_then(self, limit_bytes: float) -> None:
        if not self._trim_pause and self._trim_above(limit_bytes):
            self._trim_pause = self._next_pause
            self._next_pause *= 2

    def _trim_above(self, limit_bytes: float) -> bool:
        self._reserved_bytes = self._allocator.books()[1]
        if self._reserved_bytes <= limit_bytes:
            return False
        self._allocator.trim()
        self._reserved_bytes = self._allocator.books()[1]
        self._lose()
        return True

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

    @property
    def blocks(self) -> Blocks:
        """Of the storages that are known."""
        return self._blocks

    def can_move(self, begin: int) -> bool:
        """Whether the plan, and what is under way, let the storage that lies there move."""
        holding = self._lying_at.get(begin)
        if holding is None:
            # Since the blocks were listed it has died, or the account was lost.
            return False
        row, may_move = holding.row, self._may_move
        if row < 0:
            # Of what no plan knows: what a kernel of this run has made.
            return not holding.state.is_foreign and can_move(holding)
        return row < len(may_move) and may_move[row] and can_move(holding)

    def plug(self, nbytes: int) -> int:
        """A block of no storage."""
        expected = self._holes.best_fit(nbytes)
        address = self._allocator.allocate(nbytes)
        self._plugs[address] = nbytes
        if expected is None:
            # It lies in new pages.
            self._look()
        elif address != expected[0] or not self._take(address, nbytes):
            self._lose()
        return address

    def unplug(self, begin: int) -> None:
        """Free it."""
        self._allocator.free(begin)
        nbytes = self._plugs.pop(begin)
        if self._is_known and not self._holes.put_back(begin, nbytes):
            self._lose()

    def move(self, begin: int) -> bool:
        """By a resize to the size that it has: the allocator chooses where."""
        holding = self._lying_at.get(begin)
        storage = None if holding is None else holding.state.reference()
        # Asked again: garbage may have been collected since the blocks were listed.
        if holding is None or storage is None or not can_move(holding):
            return False
        nbytes, expected = holding.allocated_bytes, self._holes.best_fit(holding.allocated_bytes)
        holding.arrived = self._allocator.move(storage, holding.state.nbytes)
        if expected is None:
            # It lies in new pages.
            return self._look()
        address = self._allocator.address(storage)
        if not self._take(address, nbytes) or not self._holes.put_back(begin, nbytes):
            self._lose()
            return False
        del self._lying_at[begin]
        self._blocks.remove(begin)
        self._note_at(address, holding)
        return address == expected[0]

    # What is known of it

    def _note_at(self, address: int, holding: Holding) -> None:
        holding.address = address
        self._lying_at[address] = holding
        self._blocks.add(address, holding.allocated_bytes)

    def _take(self, address: int, nbytes: int) -> bool:
        """Take a range from the holes, the places of what has just died among them."""
        if self._holes.take_at(address, nbytes):
            return True
        self._residency.bury()
        return self._holes.take_at(address, nbytes)

    def _must_know(self, requests: Sequence[int]) -> bool:
        """Whether these requests could make the allocator reserve almost the limit."""
        pages_bytes = sum(map(_pages_bytes, requests))
        limit_bytes = self._limit_bytes - _ALERT_SHARE * self._residency.capacity_bytes
        self._reserved_bytes += pages_bytes
        if self._reserved_bytes > limit_bytes:
            # It was assumed that every request until now has found no hole.
            self._reserved_bytes = self._allocator.books()[1] + pages_bytes
        return self._reserved_bytes > limit_bytes

    def _look(self) -> bool:
        """Learn the layout from the allocator; False if that was done too often."""
        self._lose()
        if not self._looks_left:
            return False
        self._looks_left -= 1
        self._residency.traffic.allocator_looks += 1
        # Nothing that dies later is taken for alive.
        self._residency.bury()
        layout = self._allocator.look()
        if layout is None:
            self._is_possible = False
            return False
        self._reserved_bytes = layout.reserved_bytes
        self._others = {a: nbytes for a, nbytes in layout.blocks if a not in self._plugs}
        self._holes.growth = layout.growth
        for address, nbytes in layout.holes:
            self._holes.put_back(address, nbytes)
        for holding in self._residency.holdings():
            storage = holding.state.reference()
            if holding.is_resident and not holding.is_dead and storage is not None:
                address = self._allocator.address(storage)
                if self._others.get(address) == holding.allocated_bytes:
                    del self._others[address]
                    self._note_at(address, holding)
        self._is_known = True
        return True

    def _lose(self) -> None:
        """The account does not hold any more; the next look begins another."""
        self._is_known = self._has_unsure = False
        self._holes, self._blocks, self._lying_at, self._others = Holes(), Blocks(), {}, {}


def _pages_bytes(nbytes: int) -> int:
    return -(-nbytes // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES


def memory_for(plan: Plan, residency: Residency, device_type: str) -> StorageMemory:
    """Of a run: kept together where a plan moves anything and PyTorch's own allocator serves."""
    if device_type != "cuda" or not len(plan.moves):
        return StorageMemory()
    if torch.cuda.memory.get_allocator_backend() != "native":
        return StorageMemory()
    return CompactMemory(residency, GpuAllocator(), relocatable_rows(plan))


def can_move(holding: Holding) -> bool:
    """Whether nothing but kernels of the compute stream uses the storage's memory."""
    return (
        holding.can_leave
        and holding.arriving is None
        and not holding.shared_with
        and (holding.leaving is None or holding.leaving.done)
        and (not holding.superseded or all(write.done for write in holding.superseded))
        and _is_as_known(holding)
    )


def _is_as_known(holding: Holding) -> bool:
    """Whether its storage can be resized, and has not been by what nobody has seen."""
    storage = holding.state.reference()
    if storage is None or not storage.resizable():
        return False
    # Not the method of the storage, which asks a run whether it is away.
    nbytes: int = torch._C.StorageBase.nbytes(storage)  # type: ignore[attr-defined]
    return nbytes == holding.state.nbytes
