"""A plan as flat arrays for the engine: queues in static order, and what each kernel requires.

Kernel indices of moves are unrolled, so a transfer of the move of iteration i may be triggered in
iteration i + 1. Queues list, for one iteration, the transfers triggered in it; an entry's *shift*
is 1 if it belongs to the move of the iteration before.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from teraio.contracts.table import IntArray
from teraio.simulator.plan_checks import PlannedMoves
from teraio.simulator.state import ENTRY, NEVER, READ, WRITE, RecordArray, records
from teraio.simulator.trace_arrays import group_by


class Queues(NamedTuple):
    """``entries`` (see ``state.ENTRY``) in the order of channels, channel c's from ``first[c]``;
    ``required[k, c]``: how many channel c must have served before kernel k may start.
    """

    first: IntArray
    entries: RecordArray
    required: IntArray


class MoveLists(NamedTuple):
    """Moves by kernel, for a run off plan. ``*_first`` are offsets of kernels into the lists.

    offload: by offload_start, prefetch: by prefetch_start, both in queue order; free: by free_by.
    ``copy`` numbers each move's slot; ``copy_first`` are offsets of storages into
    ``copy_device`` and ``copy_offset``.
    """

    offload_first: IntArray
    offload_move: IntArray
    free_first: IntArray
    free_move: IntArray
    prefetch_first: IntArray
    prefetch_move: IntArray
    copy: IntArray
    copy_first: IntArray
    copy_device: IntArray
    copy_offset: IntArray


def planned_gpu_bytes(
    moves: PlannedMoves, allocated_bytes: IntArray, live_bytes: IntArray
) -> IntArray:
    """Bytes of storages on the GPU in index space while each kernel runs, int64 (K,)."""
    num_kernels = len(live_bytes)
    back = np.where(moves.is_tail, moves.end + 1, moves.prefetch_start)
    delta = np.zeros(2 * num_kernels + 1, dtype=np.int64)
    np.add.at(delta, moves.free_by, allocated_bytes[moves.storage])
    np.add.at(delta, back, -allocated_bytes[moves.storage])
    away = np.cumsum(delta[:-1])
    result: IntArray = live_bytes - away[:num_kernels] - away[num_kernels:]
    return result


def build_queues(moves: PlannedMoves, num_kernels: int, num_channels: int) -> Queues:
    """Static order: offloads by (offload_start, after_kernel, row), prefetches by
    (prefetch_start, before_kernel, row), on unrolled indices (DESIGN: Static order).
    """
    offloads = np.flatnonzero(moves.writes)
    prefetches = np.flatnonzero(~moves.is_tail)
    move = np.concatenate([offloads, prefetches])
    is_read = np.arange(len(move)) >= len(offloads)
    channel = 2 * moves.device[move] + np.where(is_read, READ, WRITE)
    trigger = np.where(is_read, moves.prefetch_start[move], moves.offload_start[move])
    other_end = np.where(is_read, moves.end[move], moves.after_kernel[move])
    needed_by = np.where(is_read, moves.end[move], moves.free_by[move])
    shift = trigger // num_kernels
    order = np.lexsort((move, other_end - shift * num_kernels, trigger % num_kernels, channel))
    move, channel, shift = move[order], channel[order], shift[order]
    needed_by = needed_by[order]
    first = np.searchsorted(channel, np.arange(num_channels + 1))
    entries = records(
        ENTRY,
        len(move),
        move=move,
        storage=moves.storage[move],
        nbytes=moves.nbytes[move],
        trigger=trigger[order] % num_kernels,
        for_kernel=needed_by % num_kernels,
    )
    required = _required(channel, first, needed_by - shift * num_kernels, num_kernels)
    return Queues(first=first, entries=entries, required=required)


def _required(
    channel: IntArray, first: IntArray, needed_by: IntArray, num_kernels: int
) -> IntArray:
    """Entries that each channel must have served before each kernel, int64 (K, channels).

    ``needed_by`` counts kernels from the iteration in which an entry is triggered; if that is the
    next iteration, its kernels require the entries of the iteration before.
    """
    required = np.full((num_kernels, len(first) - 1), -NEVER)
    rank = np.arange(len(channel)) - first[channel]
    length = np.diff(first)[channel]
    count = rank + 1 - needed_by // num_kernels * length
    np.maximum.at(required, (needed_by % num_kernels, channel), count)
    return required


def returned_at_cut(queues: Queues) -> IntArray:
    """Prefetches per channel that a cold start need not issue: they come back at kernel 0 itself,
    and a storage placed on the GPU while kernel 0 runs is there from the start.
    """
    num_channels = len(queues.first) - 1
    served = np.zeros(num_channels, dtype=np.int64)
    for channel in range(READ, num_channels, 2):
        rows = slice(queues.first[channel], queues.first[channel + 1])
        served[channel] = np.count_nonzero(queues.entries["trigger"][rows] == 0)
    return served


def build_move_lists(moves: PlannedMoves, num_kernels: int, num_storages: int) -> MoveLists:
    """Moves by the kernels at which a run off plan has to look at them."""
    rows = np.arange(len(moves.storage))
    copy, copy_storage, copy_device, copy_offset = _copies(moves)
    shift = moves.offload_start // num_kernels
    offloads = np.lexsort((rows, moves.after_kernel - shift * num_kernels))
    shift = moves.prefetch_start // num_kernels
    prefetches = np.lexsort((rows, moves.end - shift * num_kernels))
    prefetches = prefetches[~moves.is_tail[prefetches]]
    offload = _by_kernel(offloads, moves.offload_start, num_kernels)
    free = _by_kernel(rows, moves.free_by, num_kernels)
    prefetch = _by_kernel(prefetches, moves.prefetch_start, num_kernels)
    return MoveLists(
        *offload,
        *free,
        *prefetch,
        copy=copy,
        copy_first=np.searchsorted(copy_storage, np.arange(num_storages + 1)),
        copy_device=copy_device,
        copy_offset=copy_offset,
    )


def _by_kernel(rows: IntArray, kernel: IntArray, num_kernels: int) -> tuple[IntArray, IntArray]:
    order, first = group_by(kernel[rows] % num_kernels, num_kernels)
    return first, rows[order]


def _copies(moves: PlannedMoves) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Each move's slot number, and of each slot: storage, device and offset, by storage."""
    keys = np.stack([moves.storage, moves.device, moves.tier_offset_bytes], axis=1)
    unique, copy = np.unique(keys, axis=0, return_inverse=True)
    storage, device, offset = (np.ascontiguousarray(column) for column in unique.T)
    return copy.reshape(-1), storage, device, offset
