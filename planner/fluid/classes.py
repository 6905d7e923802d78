"""Inactive periods as the fluid program sees them: by slot, by version, alike ones added up.

Periods of one version of a storage (from one write to the next) may share a copy, so a version is
the unit; versions whose periods lie in the same slots are one class, with their bytes added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from teraio.contracts.table import BoolArray, FloatArray, IntArray
from teraio.planner.clean_copies import move_versions
from teraio.planner.fluid.sequences import labels_of_runs, ranges
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
    end of that gap, on the axis of ``release``. ``is_tail`` bool: bytes that are never read again;
    ``due`` is then the slot after which they are dead. ``row_of_period`` int64 (inactive periods):
    the row that each of the trace's inactive periods is part of; -1 where it is in none (a storage
    that cannot move, a period within one slot, a tail if tails are left out).
    """

    release: IntArray
    due: IntArray
    num_bytes: FloatArray
    previous: IntArray
    previous_due: IntArray
    is_tail: BoolArray
    row_of_period: IntArray

    def __len__(self) -> int:
        return len(self.release)


def movable_periods(trace: Trace) -> tuple[InactivePeriods, BoolArray]:
    """All inactive periods, and which of them belong to storages that can move."""
    periods = inactive_periods(trace)
    return periods, trace.storages.resizable[periods.storage]


def gap_classes(
    trace: Trace,
    slots: Slots,
    *,
    with_tails: bool = False,
    only: BoolArray | None = None,
    by_size: bool = False,
) -> GapClasses:
    """Classes of all gaps of movable storages (F3: however short), with or without tails (F4).

    ``only`` bool (inactive periods,) leaves the others out, which no bound may do. ``by_size``:
    storages of one class are alike in size, within a factor of two.
    """
    periods, is_movable = movable_periods(trace)
    storages, num_kernels = trace.storages, trace.num_kernels
    is_movable &= storages.nbytes[periods.storage] > 0
    if not with_tails:
        is_movable &= ~periods.is_tail
    if only is not None:
        is_movable &= only
    rows = np.flatnonzero(is_movable)
    version, position, is_unwritten = move_versions(
        periods.storage[rows], periods.after_kernel[rows], storages, trace.accesses, num_kernels
    )
    order = np.lexsort((position, version, periods.storage[rows]))
    rows, version, position = rows[order], version[order], position[order]
    storage = periods.storage[rows]
    length = periods.end_kernel[rows] - periods.after_kernel[rows]
    begins = np.ones(len(rows), dtype=bool)
    begins[1:] = (storage[1:] != storage[:-1]) | (version[1:] != version[:-1])
    first = np.flatnonzero(begins)
    versions = Versions(
        release=slots.unrolled(2 * position + 1),
        due=slots.unrolled(2 * (position + length) - np.where(periods.is_tail[rows], 0, 1)),
        is_tail=periods.is_tail[rows],
        first=first,
        num_gaps=np.diff(np.r_[first, len(rows)]),
        num_bytes=storages.nbytes[storage[first]],
        size_class=np.zeros(len(first), dtype=np.int64),
        is_unwritten=is_unwritten[order[first]],
    )
    if by_size:
        versions = versions._replace(size_class=np.log2(versions.num_bytes).astype(np.int64))
    row_of_period = np.full(len(periods), -1)
    return _merge(versions, len(slots), rows, row_of_period)


class Versions(NamedTuple):
    """Per gap ``release``, ``due``, ``is_tail``; per version its first gap, number of gaps, bytes,
    class of sizes, kind.
    """

    release: IntArray
    due: IntArray
    is_tail: BoolArray
    first: IntArray
    num_gaps: IntArray
    num_bytes: IntArray
    size_class: IntArray
    is_unwritten: BoolArray

    def of(self, who: IntArray | BoolArray) -> Versions:
        """These versions only; the gaps stay."""
        return self._replace(
            first=self.first[who],
            num_gaps=self.num_gaps[who],
            num_bytes=self.num_bytes[who],
            size_class=self.size_class[who],
            is_unwritten=self.is_unwritten[who],
        )


def _merge(
    versions: Versions, num_slots: int, periods: IntArray, row_of_period: IntArray
) -> GapClasses:
    """Add up versions that agree in every slot; ``periods`` tells which period each gap is."""
    release, due = versions.release, versions.due
    # Away within one slot: bytes that are given away for nothing (F1).
    lone_in_slot = (versions.num_gaps == 1) & (release == due)[versions.first]
    versions = versions.of(~lone_in_slot | versions.is_unwritten)
    label = labels_of_versions(versions)
    classes, example = np.unique(label, return_index=True)
    num_bytes = np.zeros(len(classes), dtype=np.int64)
    np.add.at(num_bytes, label, versions.num_bytes)
    alike = versions.of(example)
    base = np.cumsum(alike.num_gaps) - alike.num_gaps
    gap = ranges(alike.first, alike.num_gaps)
    last = base + alike.num_gaps - 1
    previous = np.arange(len(gap)) - 1
    previous_due = due[gap[previous]]
    previous[base] = np.where(alike.is_unwritten, last, -1)
    previous_due[base] = due[gap[last]] - num_slots
    members = ranges(versions.first, versions.num_gaps)
    row_of_period[periods[members]] = ranges(base[label], versions.num_gaps)
    return GapClasses(
        release=release[gap],
        due=due[gap],
        num_bytes=np.repeat(num_bytes, alike.num_gaps).astype(float),
        previous=previous,
        previous_due=previous_due,
        is_tail=versions.is_tail[gap],
        row_of_period=row_of_period,
    )


def labels_of_versions(versions: Versions) -> IntArray:
    """Equal for versions that agree in every slot; 0, 1, ... in the order in which they appear."""
    code = versions.release * (int(versions.due.max(initial=0)) + 1) + versions.due
    code = 2 * code + versions.is_tail
    own = 2 * versions.size_class + versions.is_unwritten
    return labels_of_runs(versions.first, versions.num_gaps, code, own)


def needed_bytes(
    trace: Trace, slots: Slots, capacity_bytes: int, *, with_tails: bool = False
) -> IntArray:
    """Bytes that gaps must keep off the GPU while each kernel runs, int64 (K,); may be negative.

    Given away for nothing, so that the program stays a relaxation: storages that no kernel accesses
    and tails if they are no gaps (F4), gaps within one slot, and what the allocator rounds up
    (traffic is in nbytes).
    """
    storages, num_kernels = trace.storages, trace.num_kernels
    used = live_bytes(trace, allocated=True) + trace.kernels.workspace_bytes
    periods, is_movable = movable_periods(trace)
    rows = np.flatnonzero(is_movable)
    storage, after = periods.storage[rows], periods.after_kernel[rows]
    end, is_tail = periods.end_kernel[rows], periods.is_tail[rows]
    allocated = storages.allocated_bytes[storage]
    in_slot = slots.unrolled(2 * after + 1) == slots.unrolled(2 * end - np.where(is_tail, 0, 1))
    in_slot |= is_tail & (not with_tails)
    padding = np.maximum(allocated - storages.nbytes[storage], 0)
    free = np.where(in_slot, allocated, padding)
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
