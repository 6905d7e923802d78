"""What PyTorch's allocator reserves while a plan runs: more than is allocated, by fragmentation.

Index space alone decides it (DESIGN: Semantics, rule 1): which storages come, leave, are born and
die at which kernel does not depend on how long anything takes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from teraio.contracts.plan import Plan
from teraio.contracts.table import MISSING
from teraio.simulator.blocks import Blocks
from teraio.simulator.caching_allocator import LARGE_PAGE_BYTES, MIB, Block, CachingAllocator
from teraio.simulator.compaction import (
    RESERVED_SHARE,
    prepare,
    relocatable_rows,
    tidy,
)
from teraio.simulator.holes import Holes

_QUIET_ITERATIONS = 5
_MOST_ITERATIONS = 24
"""Each iteration finds the holes that the one before has left. Under most plans nothing grows after
the first, under some now and then for twenty: until it has not for so many, or after so many.
"""


@dataclass(frozen=True)
class ReservedMemory:
    """Peaks of one iteration, in bytes: in use, and held by the allocator for it.

    ``moved_bytes``: copied within the GPU in it to keep storages together.
    """

    allocated_bytes: int
    reserved_bytes: int
    moved_bytes: int = 0

    @property
    def fragmentation(self) -> float:
        """Share of what is allocated that is reserved besides."""
        return self.reserved_bytes / max(self.allocated_bytes, 1) - 1


def predict_reserved_memory(
    plan: Plan,
    iterations: int | None = None,
    *,
    keeps_together: bool | None = None,
    budget_bytes: int | None = None,
) -> ReservedMemory:
    """Peaks of the last of ``iterations`` under a plan, as PyTorch's CUDA allocator would have them
    with expandable segments; for a plan of any device. Takes about 30 us for each kernel of each
    iteration; there are as many as it takes until no more is reserved, at most 24.

    ``keeps_together``: whether storages are moved within the GPU where more would be reserved than
    :data:`RESERVED_SHARE` of the budget; by default where the executor does, under a plan that
    moves anything. ``budget_bytes``: of the run, by default the plan's.
    """
    if keeps_together is None:
        keeps_together = len(plan.moves) > 0
    if budget_bytes is None:
        budget_bytes = plan.metadata.gpu_memory_bytes
    played = _Played(plan, budget_bytes, budget_bytes * RESERVED_SHARE if keeps_together else None)
    allocator, num_quiet = played.allocator, 0
    for _ in range(_MOST_ITERATIONS if iterations is None else iterations):
        before_bytes = allocator.reserved_bytes
        played.iteration()
        num_quiet = num_quiet + 1 if allocator.reserved_bytes == before_bytes else 0
        if iterations is None and num_quiet == _QUIET_ITERATIONS:
            break
    return ReservedMemory(
        allocator.allocated_peak_bytes, allocator.reserved_peak_bytes, played.moved_bytes
    )


class _Played:
    """The memory of a plan's GPU (:class:`teraio.simulator.compaction.Memory`), kernel by kernel.

    A storage with a transfer under way stays where it is, for as long as the plan allows for it.
    """

    def __init__(self, plan: Plan, budget_bytes: int, limit_bytes: float | None) -> None:
        self.allocator = CachingAllocator()
        self.moved_bytes = 0
        self._events = _Events(plan)
        self._may_move = relocatable_rows(plan)
        self._budget_bytes = budget_bytes
        self._limit_bytes = limit_bytes
        self._blocks: dict[int, Block] = {}
        self._row_at: dict[int, int] = {}
        self.blocks = Blocks()
        self._plugs: dict[int, Block] = {}
        self._in_transfer: Counter[int] = Counter()
        for row in self._events.on_gpu_at_start:
            self._allocate(row)

    def iteration(self) -> None:
        """All kernels once."""
        self.allocator.reset_peaks()
        self.moved_bytes = 0
        if self._limit_bytes is not None and self.would_exceed(LARGE_PAGE_BYTES):
            self.moved_bytes = tidy(self)
        for kernel in range(self._events.num_kernels):
            self._play(kernel)

    def _play(self, kernel: int) -> None:
        events, in_transfer = self._events, self._in_transfer
        for row in events.frees[kernel]:
            in_transfer[row] = 0
            self._free(row)
        for row in events.prefetches[kernel]:
            if row not in self._blocks:
                self._prepare([events.sizes[row]])
                self._allocate(row)
            in_transfer[row] = 1
        for row in events.arrivals[kernel]:
            in_transfer[row] = 0
        born = [row for row in events.births[kernel] if row not in self._blocks]
        workspace_bytes = events.workspace_bytes[kernel]
        self._prepare([*(events.sizes[row] for row in born), workspace_bytes])
        for row in born:
            self._allocate(row)
        if workspace_bytes > 0:
            self.allocator.free(self.allocator.allocate(workspace_bytes))
        for row in events.deaths[kernel]:
            self._free(row)
        for row in events.offloads[kernel]:
            in_transfer[row] = 1

    def _prepare(self, sizes: list[int]) -> None:
        if self._limit_bytes is not None:
            unit = self.allocator.block_bytes
            requests = [-(-size // unit) * unit for size in sizes if size > MIB]
            if requests:
                self.moved_bytes += prepare(requests, self).moved_bytes

    def _allocate(self, row: int) -> None:
        block = self._blocks[row] = self.allocator.allocate(self._events.sizes[row])
        if not block.is_small:
            self._row_at[block.address] = row
            self.blocks.add(block.address, block.nbytes)

    def _free(self, row: int) -> None:
        if row in self._blocks:
            block = self._blocks.pop(row)
            self.allocator.free(block)
            if not block.is_small:
                del self._row_at[block.address]
                self.blocks.remove(block.address)

    @property
    def holes(self) -> Holes:
        """Of the pool for large requests."""
        return self.allocator.large.holes

    @property
    def spare_bytes(self) -> int:
        """Up to the budget."""
        return self._budget_bytes - self.allocator.allocated_bytes

    def would_exceed(self, nbytes: int) -> bool:
        """Whether new pages for a block would be more than the limit."""
        assert self._limit_bytes is not None
        new_bytes = -(-nbytes // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES
        return self.allocator.reserved_bytes + new_bytes > self._limit_bytes

    def can_move(self, begin: int) -> bool:
        """Nothing copies it to or from elsewhere."""
        row = self._row_at[begin]
        return self._may_move[row] and not self._in_transfer[row]

    def plug(self, nbytes: int) -> int:
        """A block of no storage."""
        block = self.allocator.allocate(nbytes)
        self._plugs[block.address] = block
        return block.address

    def unplug(self, begin: int) -> None:
        """Free it."""
        self.allocator.free(self._plugs.pop(begin))

    def move(self, begin: int) -> bool:
        """To the best fit, which is where the allocator puts it."""
        row = self._row_at.pop(begin)
        old = self._blocks[row]
        self.blocks.remove(begin)
        self._allocate(row)
        self.allocator.free(old)
        return True


class _Events:
    """What takes and gives memory at each kernel, rows of storages in the executor's order.

    ``offloads`` begin after the kernel; ``arrivals`` are over before it, as ``frees`` are.
    """

    def __init__(self, plan: Plan) -> None:
        storages, moves = plan.storages, plan.moves
        self.num_kernels = len(plan.kernels)
        self.sizes: list[int] = storages.allocated_bytes.tolist()
        self.workspace_bytes: list[int] = plan.kernels.workspace_bytes.tolist()
        self.offloads = self._table(moves.offload_start[moves.writes], moves.storage[moves.writes])
        self.frees = self._table(moves.free_by, moves.storage)
        self.prefetches = self._table(moves.prefetch_start, moves.storage)
        self.arrivals = self._table(moves.before_kernel, moves.storage)
        is_used = np.zeros(len(storages), dtype=bool)
        is_used[plan.accesses.storage] = True
        rows = np.flatnonzero(is_used & (storages.birth != MISSING))
        self.births = self._table(storages.birth[rows], rows)
        self.deaths = self._table(storages.death[rows], rows)
        self.on_gpu_at_start: list[int] = np.flatnonzero(
            (storages.birth == MISSING) & (storages.placement == "gpu")
        ).tolist()

    def _table(self, kernels: np.ndarray, rows: np.ndarray) -> list[list[int]]:
        table: list[list[int]] = [[] for _ in range(self.num_kernels)]
        for kernel, row in zip(kernels.tolist(), rows.tolist(), strict=True):
            if kernel != MISSING:
                table[kernel % self.num_kernels].append(row)
        return table
