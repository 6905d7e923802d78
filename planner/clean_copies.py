"""Which copies on a tier serve several moves: a copy stays valid until its storage is next written.

The paper rewrites a tensor each time it leaves; reusing the copy is an addition (DESIGN: Clean
copies). A *version* of a storage reaches from one write to the next, cyclically; birth begins one.
Moves of one version to one device form a *chain*: the first writes, the others reuse its copy, and
all share one slot. The copy of a storage that no kernel writes is
permanent: none of its moves writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from teraio.contracts.plan import Accesses, Moves
from teraio.contracts.table import MISSING, BoolArray, IntArray, TextArray


class StorageColumns(Protocol):
    """What planning needs of a trace's storages or a plan's, which both have."""

    @property
    def birth(self) -> IntArray: ...

    @property
    def death(self) -> IntArray: ...

    @property
    def nbytes(self) -> IntArray: ...

    @property
    def allocated_bytes(self) -> IntArray: ...


@dataclass(frozen=True)
class Chains:
    """Chains of moves, and for each the time in which its slot is taken.

    ``chain`` is each move's chain, int64 (moves,); ``writes`` whether the move writes its copy.
    Per chain: ``storage``, ``device``, ``first_kernel`` and ``end_kernel`` (the slot is taken from
    the end of kernel first_kernel until before end_kernel, unrolled), ``last_free_by`` on the same
    axis, and ``is_permanent``: a storage that no kernel writes keeps its slot for good.
    """

    chain: IntArray
    writes: BoolArray
    storage: IntArray
    device: TextArray
    first_kernel: IntArray
    end_kernel: IntArray
    last_free_by: IntArray
    is_permanent: BoolArray


def chain_moves(
    moves: Moves, storages: StorageColumns, accesses: Accesses, num_kernels: int
) -> Chains:
    """Group moves into chains; ``writes`` and ``tier_offset_bytes`` of ``moves`` are not read."""
    version, position, is_unwritten = move_versions(
        moves.storage, moves.after_kernel, storages, accesses, num_kernels
    )
    order = np.lexsort((position, _device_numbers(moves.device), version, moves.storage))
    storage, device = moves.storage[order], moves.device[order]
    unwritten = is_unwritten[order]
    begins = np.ones(len(order), dtype=bool)
    for key in (storage, version[order], device):
        begins[1:] &= key[1:] == key[:-1]
    begins[1:] = ~begins[1:]
    writes = begins & ~unwritten
    chain = np.cumsum(begins) - 1 if len(order) else np.empty(0, dtype=np.int64)
    first = np.flatnonzero(begins)
    last = np.r_[first[1:], len(order)] - 1 if len(order) else first
    unrolled = moves.unrolled(num_kernels)
    shift = (position - moves.after_kernel)[order]
    end = end_kernels(moves, storages, num_kernels)[order] + shift
    result = np.empty(len(order), dtype=np.int64)
    result[order] = chain
    writes_by_row = np.empty(len(order), dtype=bool)
    writes_by_row[order] = writes
    return Chains(
        chain=result,
        writes=writes_by_row,
        storage=storage[first],
        device=device[first],
        first_kernel=(unrolled.offload_start[order] + shift)[first],
        end_kernel=end[last],
        last_free_by=(unrolled.free_by[order] + shift)[last],
        is_permanent=unwritten[first],
    )


def _device_numbers(device: TextArray) -> IntArray:
    """Devices numbered in the order of their names, int64 (moves,)."""
    numbers = np.zeros(len(device), dtype=np.int64)
    for number, name in enumerate(sorted(set(device.tolist()))):
        numbers[(device == name).astype(bool)] = number
    return numbers


def end_kernels(moves: Moves, storages: StorageColumns, num_kernels: int) -> IntArray:
    """Unrolled kernel at which a period ends: the next access, or for a tail the death."""
    first = moves.after_kernel + 1
    is_tail = moves.before_kernel == MISSING
    end = np.where(is_tail, storages.death[moves.storage], moves.before_kernel)
    result: IntArray = first + (end - first) % num_kernels
    return result


def move_versions(
    storage: IntArray,
    after_kernel: IntArray,
    storages: StorageColumns,
    accesses: Accesses,
    num_kernels: int,
) -> tuple[IntArray, IntArray, BoolArray]:
    """Version of each period, its position in time, and whether no kernel writes the storage.

    ``position`` is after_kernel on an axis without a cut inside a version: counted from the birth
    of a storage that has one, else moved a cycle on where the version began in the cycle before.
    """
    births = storages.birth
    start = np.maximum(births, 0)
    stride = 2 * num_kernels

    def key_of(of_storage: IntArray, kernel: IntArray) -> IntArray:
        result: IntArray = of_storage * stride + (kernel - start[of_storage]) % num_kernels
        return result

    written = accesses.writes
    write_keys = np.sort(key_of(accesses.storage[written], accesses.kernel[written]))
    first_write = np.searchsorted(write_keys, storage * stride)
    num_writes = np.searchsorted(write_keys, (storage + 1) * stride) - first_write
    before = np.searchsorted(write_keys, key_of(storage, after_kernel), side="right") - first_write
    is_persistent = births[storage] < 0
    is_unwritten = is_persistent & (num_writes == 0)
    began_before_cut = is_persistent & (before == 0) & (num_writes > 0)
    version = np.where(began_before_cut, num_writes, before)
    position = start[storage] + (after_kernel - start[storage]) % num_kernels
    return version, position + num_kernels * began_before_cut, is_unwritten
