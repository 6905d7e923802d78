"""GPU bytes in index space: what each kernel finds allocated, whatever the speed of transfers."""

from __future__ import annotations

import numpy as np

from teraio.contracts.plan import Moves
from teraio.contracts.table import MISSING, IntArray
from teraio.planner.clean_copies import StorageColumns


def cyclic_sum(start: IntArray, end: IntArray, weight: IntArray, num_kernels: int) -> IntArray:
    """Sum of the weights of the intervals [start, end) that hold each kernel, int64 (K,).

    Intervals are unrolled: 0 <= start < K, start <= end <= start + K, or both a cycle later.
    """
    delta = np.zeros(3 * num_kernels + 1, dtype=np.int64)
    np.add.at(delta, start, weight)
    np.add.at(delta, end, -weight)
    result: IntArray = np.cumsum(delta[:-1]).reshape(3, num_kernels).sum(axis=0)
    return result


def resident_bytes(
    storages: StorageColumns, workspace_bytes: IntArray, moves: Moves, num_kernels: int
) -> IntArray:
    """Allocated bytes and workspace while each kernel runs, int64 (K,) (DESIGN: Semantics, 1).

    A storage counts from its birth or prefetch_start until before free_by, or through its death.
    """
    persistent = storages.birth < 0
    birth = np.maximum(storages.birth, 0)
    span = np.where(persistent, num_kernels, (storages.death - birth) % num_kernels + 1)
    live = cyclic_sum(birth, birth + span, storages.allocated_bytes, num_kernels)
    start, end = away_intervals(moves, storages, num_kernels)
    away = cyclic_sum(start, end, storages.allocated_bytes[moves.storage], num_kernels)
    return live - away + workspace_bytes


def away_intervals(
    moves: Moves, storages: StorageColumns, num_kernels: int
) -> tuple[IntArray, IntArray]:
    """Kernels [start, end), unrolled, in which each move has its storage off the GPU."""
    unrolled = moves.unrolled(num_kernels)
    first = moves.after_kernel + 1
    death = first + (storages.death[moves.storage] - first) % num_kernels
    end = np.where(unrolled.prefetch_start == MISSING, death + 1, unrolled.prefetch_start)
    return unrolled.free_by, end
