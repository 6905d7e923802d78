"""Inactive periods as the fluid program sees them: by slot, by version, alike ones added up.

Periods of one version of a storage (from one write to the next) may share a copy, so a version is
the unit; versions whose periods lie in the same slots are one class, with their bytes added.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from teraio.contracts.table import BoolArray, FloatArray, IntArray
from teraio.planner.clean_copies import move_versions
from teraio.planner.fluid.slots import Slots
from teraio.planner.residency import cyclic_sum
from teraio.traces.lifetimes import InactivePeriods, inactive_periods, live_bytes
from teraio.traces.trace import Trace


@dataclass(frozen=True)
class GapClasses:
    """One row per gap of a class of versions, ordered by class, then by time.

    ``release`` and ``due`` (slots, unrolled on the version's own axis) bound the time in which the
    bytes move; ``num_bytes`` float64 is the class's size. ``previous`` is the row of the gap whose
    copy may serve this one, -1 if there is none (the version begins with a write); for a storage
    that no kernel writes, the first gap's previous is the last. ``previous_due`` is the slot of the
    end of that gap, on the axis of ``release``.
    """

    release: IntArray
    due: IntArray
    num_bytes: FloatArray
    previous: IntArray
    previous_due: IntArray

    def __len__(self) -> int:
        return len(self.release)


def movable_periods(trace: Trace) -> tuple[InactivePeriods, BoolArray]:
    """All inactive periods, and which of them belong to storages that can move."""
    periods = inactive_periods(trace)
    return periods, trace.storages.resizable[periods.storage]


def gap_classes(trace: Trace, slots: Slots) -> GapClasses:
    """Classes of all gaps of movable storages (F3: however short), tails apart (F4)."""
    periods, is_movable = movable_periods(trace)
    storages, num_kernels = trace.storages, trace.num_kernels
    is_movable &= ~periods.is_tail & (storages.nbytes[periods.storage] > 0)
    storage, after = periods.storage[is_movable], periods.after_kernel[is_movable]
    length = periods.end_kernel[is_movable] - after
    version, position, is_unwritten = move_versions(
        storage, after, storages, trace.accesses, num_kernels
    )
    order = np.lexsort((position, version, storage))
    storage, version, position = storage[order], version[order], position[order]
    release = slots.unrolled(2 * position + 1)
    due = slots.unrolled(2 * (position + length[order]) - 1)
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = (storage[1:] != storage[:-1]) | (version[1:] != version[:-1])
    return _merge(
        release, due, storages.nbytes[storage], np.flatnonzero(begins), is_unwritten[order], slots
    )


def _merge(
    release: IntArray,
    due: IntArray,
    num_bytes: IntArray,
    first: IntArray,
    is_unwritten: BoolArray,
    slots: Slots,
) -> GapClasses:
    """Add up versions that agree in every slot; ``first`` are the versions' first rows."""
    ends = [*first[1:].tolist(), len(release)]
    members: dict[tuple[bool, bytes], list[int]] = {}
    for start, end in zip(first.tolist(), ends, strict=True):
        lone_in_slot = end == start + 1 and release[start] == due[start]
        if lone_in_slot and not is_unwritten[start]:
            continue  # Away within one slot: its bytes are given away for nothing (F1).
        pair = np.stack((release[start:end], due[start:end]))
        key = (bool(is_unwritten[start]), pair.tobytes())
        entry = members.setdefault(key, [start, end, 0])
        entry[2] += int(num_bytes[start])
    columns: list[list[int]] = [[], [], [], [], []]
    for (unwritten, _), (start, end, total) in members.items():
        base, count = len(columns[0]), end - start
        columns[0] += release[start:end].tolist()
        columns[1] += due[start:end].tolist()
        columns[2] += [total] * count
        columns[3] += [base + count - 1 if unwritten else -1, *range(base, base + count - 1)]
        columns[4] += [int(due[end - 1]) - len(slots), *due[start : end - 1].tolist()]
    arrays = [np.array(column, dtype=np.int64) for column in columns]
    return GapClasses(arrays[0], arrays[1], arrays[2].astype(float), arrays[3], arrays[4])


def needed_bytes(trace: Trace, slots: Slots, capacity_bytes: int) -> IntArray:
    """Bytes that gaps must keep off the GPU while each kernel runs, int64 (K,); may be negative.

    Given away for nothing, so that the program stays a relaxation: storages that no kernel accesses
    and tails (F4), gaps within one slot, and what the allocator rounds up (traffic is in nbytes).
    """
    storages, num_kernels = trace.storages, trace.num_kernels
    used = live_bytes(trace, allocated=True) + trace.kernels.workspace_bytes
    periods, is_movable = movable_periods(trace)
    rows = np.flatnonzero(is_movable)
    storage, after = periods.storage[rows], periods.after_kernel[rows]
    end, is_tail = periods.end_kernel[rows], periods.is_tail[rows]
    allocated = storages.allocated_bytes[storage]
    in_slot = slots.unrolled(2 * after + 1) == slots.unrolled(2 * end - 1)
    padding = np.maximum(allocated - storages.nbytes[storage], 0)
    free = np.where(is_tail | in_slot, allocated, padding)
    relief = cyclic_sum(after + 1, end + is_tail, free, num_kernels)
    relief += _never_accessed_bytes(trace)
    result: IntArray = used - relief - capacity_bytes
    return result


def _never_accessed_bytes(trace: Trace) -> IntArray:
    storages, num_kernels = trace.storages, trace.num_kernels
    is_accessed = np.zeros(len(storages), dtype=bool)
    is_accessed[trace.accesses.storage] = True
    rows = np.flatnonzero(~is_accessed & storages.resizable)
    birth = np.maximum(storages.birth[rows], 0)
    span = (storages.death[rows] - birth) % num_kernels + 1
    span = np.where(storages.birth[rows] < 0, num_kernels, span)
    return cyclic_sum(birth, birth + span, storages.allocated_bytes[rows], num_kernels)
