"""What PyTorch's allocator reserves while a plan runs: more than is allocated, by fragmentation.

Index space alone decides it (DESIGN: Semantics, rule 1): which storages come, leave, are born and
die at which kernel does not depend on how long anything takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from teraio.contracts.plan import Plan
from teraio.contracts.table import MISSING
from teraio.simulator.caching_allocator import Block, CachingAllocator

_ITERATIONS = 6
"""Each iteration finds the holes that the one before has left; after a few nothing grows."""


@dataclass(frozen=True)
class ReservedMemory:
    """Peaks of one iteration, in bytes: in use, and held by the allocator for it."""

    allocated_bytes: int
    reserved_bytes: int

    @property
    def fragmentation(self) -> float:
        """Share of what is allocated that is reserved besides."""
        return self.reserved_bytes / max(self.allocated_bytes, 1) - 1


def predict_reserved_memory(plan: Plan, iterations: int = _ITERATIONS) -> ReservedMemory:
    """Peaks of the last of ``iterations`` under a plan, as PyTorch's CUDA allocator would have them
    with expandable segments; for a plan of any device. Takes about 50 us for each kernel.
    """
    events = _Events(plan)
    allocator = CachingAllocator()
    blocks: dict[int, Block] = {}
    for row in events.on_gpu_at_start:
        blocks[row] = allocator.allocate(events.sizes[row])
    for _ in range(iterations):
        allocator.reset_peaks()
        for kernel in range(events.num_kernels):
            _play(events, kernel, allocator, blocks)
    return ReservedMemory(allocator.allocated_peak_bytes, allocator.reserved_peak_bytes)


def _play(
    events: _Events, kernel: int, allocator: CachingAllocator, blocks: dict[int, Block]
) -> None:
    for row in events.frees[kernel]:
        if row in blocks:
            allocator.free(blocks.pop(row))
    for row in (*events.prefetches[kernel], *events.births[kernel]):
        if row not in blocks:
            blocks[row] = allocator.allocate(events.sizes[row])
    if events.workspace_bytes[kernel] > 0:
        allocator.free(allocator.allocate(events.workspace_bytes[kernel]))
    for row in events.deaths[kernel]:
        if row in blocks:
            allocator.free(blocks.pop(row))


class _Events:
    """What takes and gives memory at each kernel, rows of storages in the executor's order."""

    def __init__(self, plan: Plan) -> None:
        storages, moves = plan.storages, plan.moves
        self.num_kernels = len(plan.kernels)
        self.sizes: list[int] = storages.allocated_bytes.tolist()
        self.workspace_bytes: list[int] = plan.kernels.workspace_bytes.tolist()
        self.frees = self._table(moves.free_by, moves.storage)
        self.prefetches = self._table(moves.prefetch_start, moves.storage)
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
                table[kernel].append(row)
        return table
