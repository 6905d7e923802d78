"""Packing of slots: where on a tier's device each copy lies, so that none overlaps another in time.

Dynamic storage allocation on a cycle, by first fit in two orders, of which the tighter one is kept.
In order of time: slots that are taken at the cut are stacked first, the ones that stay longest at
the bottom. That is quick, but small slots come to lie where large ones would go later. In order of
size: each takes the lowest bytes that are free as long as it needs them. A model has few sizes, of
which large ones then pack without holes and small ones fill what is left.
"""

from __future__ import annotations

import numba
import numpy as np

from teraio.contracts.table import IntArray

_ENDLESS = 2**62

_MAX_SLOTS_BY_SIZE = 2000
"""Packing by size compares each slot with all others: with so many in a twentieth of a second."""


def align_up(num_bytes: IntArray, alignment_bytes: int) -> IntArray:
    """Bytes rounded up to a multiple of ``alignment_bytes``."""
    result: IntArray = -(-num_bytes // alignment_bytes) * alignment_bytes
    return result


def pack_slots(
    first_kernel: IntArray, end_kernel: IntArray, slot_bytes: IntArray, num_kernels: int
) -> IntArray:
    """Offset in bytes of each slot, int64 (slots,).

    A slot is taken in [first_kernel, end_kernel), unrolled on the cycle of ``num_kernels``; two
    slots that meet in time get disjoint bytes. Offsets are sums of ``slot_bytes``, so they are
    aligned if those are. Deterministic: ties go to the larger slot, then to the lower row.
    """
    length = np.minimum(end_kernel - first_kernel, num_kernels)
    by_time = pack_by_time(first_kernel, length, slot_bytes, num_kernels)
    if not 0 < len(length) <= _MAX_SLOTS_BY_SIZE:
        return by_time
    by_size = pack_by_size(first_kernel, length, slot_bytes, num_kernels)
    is_tighter = (by_size + slot_bytes).max() < (by_time + slot_bytes).max()
    return by_size if is_tighter else by_time


def pack_by_size(
    first_kernel: IntArray, length: IntArray, slot_bytes: IntArray, num_kernels: int
) -> IntArray:
    """Large slots first, of one size those that are taken longest."""
    order = np.lexsort((np.arange(len(length)), -length, -slot_bytes))
    offsets = np.zeros(len(length), dtype=np.int64)
    _first_fit_around(first_kernel % num_kernels, length, slot_bytes, num_kernels, order, offsets)
    return offsets


@numba.njit(cache=True)
def _first_fit_around(
    start: IntArray,
    length: IntArray,
    slot_bytes: IntArray,
    num_kernels: int,
    order: IntArray,
    offsets: IntArray,
) -> None:
    """Each slot in ``order`` to the lowest bytes that none before it takes at the same time."""
    low = np.empty(len(order), dtype=np.int64)
    high = np.empty(len(order), dtype=np.int64)
    for place in range(len(order)):
        slot, count = order[place], 0
        for other in order[:place]:
            meets = (start[other] - start[slot]) % num_kernels < length[slot]
            meets |= (start[slot] - start[other]) % num_kernels < length[other]
            if meets and slot_bytes[other] > 0:
                low[count], high[count] = offsets[other], offsets[other] + slot_bytes[other]
                count += 1
        for i in np.argsort(low[:count]):
            if low[i] - offsets[slot] >= slot_bytes[slot]:
                break
            offsets[slot] = max(offsets[slot], high[i])


def pack_by_time(
    first_kernel: IntArray, length: IntArray, slot_bytes: IntArray, num_kernels: int
) -> IntArray:
    """In order of time, those that are taken at the cut first."""
    cut = _least_taken_kernel(first_kernel % num_kernels, length, slot_bytes, num_kernels)
    start = (first_kernel - cut) % num_kernels
    wraps = start + length > num_kernels
    # A slot that ends exactly at the cut does not wrap; one that fills the cycle does.
    wraps |= length == num_kernels
    held_until = np.where(wraps, (start + length) % num_kernels, 0)
    held_until[length == num_kernels] = num_kernels
    offsets = np.zeros(len(start), dtype=np.int64)
    stack = np.flatnonzero(wraps)
    stack = stack[np.lexsort((stack, -slot_bytes[stack], -held_until[stack]))]
    offsets[stack] = np.cumsum(slot_bytes[stack]) - slot_bytes[stack]
    rest = np.flatnonzero(~wraps)
    rest = rest[np.lexsort((rest, -slot_bytes[rest], start[rest]))]
    end = start + length
    taken_until = np.where(wraps, held_until, end)
    by_end = np.argsort(taken_until, kind="stable")
    _first_fit(start, end, taken_until, by_end, slot_bytes, stack, rest, offsets)
    return offsets


def _least_taken_kernel(
    first: IntArray, length: IntArray, slot_bytes: IntArray, num_kernels: int
) -> int:
    """The kernel before which the fewest bytes are taken: the best place to cut the cycle."""
    if not len(first):
        return 0
    delta = np.zeros(2 * num_kernels + 1, dtype=np.int64)
    # A slot that begins at the cut itself is not cut in two.
    np.add.at(delta, first + 1, slot_bytes)
    np.add.at(delta, first + length, -slot_bytes)
    taken = np.cumsum(delta)
    folded = taken[:num_kernels] + taken[num_kernels : 2 * num_kernels]
    return int(np.argmin(folded))


@numba.njit(cache=True)
def _first_fit(
    start: IntArray,
    end: IntArray,
    taken_until: IntArray,
    by_end: IntArray,
    slot_bytes: IntArray,
    stack: IntArray,
    rest: IntArray,
    offsets: IntArray,
) -> None:
    """Sweep over time with the gaps between the slots now taken; fill in ``offsets``.

    ``by_end`` int64 (slots,): slots in the order in which they are given back.
    """
    gaps = np.empty((len(start) + 1, 2), dtype=np.int64)
    gaps[0, 0], gaps[0, 1] = slot_bytes[stack].sum(), _ENDLESS
    count, given_back = 1, 0
    first_return = start[stack].min() if len(stack) else _ENDLESS
    for slot in rest:
        while taken_until[by_end[given_back]] <= start[slot]:
            other = by_end[given_back]
            if slot_bytes[other] > 0:
                count = _give_back(gaps, count, offsets[other], offsets[other] + slot_bytes[other])
            given_back += 1
        # Slots of the stack that are taken again before this one is given back are in its way too.
        returning = stack[:0]
        if end[slot] > first_return:
            returning = stack[start[stack] < end[slot]]
        if slot_bytes[slot] > 0:
            gap, offset = _lowest_place(gaps, returning, slot_bytes, offsets, slot_bytes[slot])
            offsets[slot] = offset
            count = _take(gaps, count, gap, offset, offset + slot_bytes[slot])


@numba.njit(cache=True)
def _give_back(gaps: IntArray, count: int, low: int, high: int) -> int:
    """Make [low, high) a gap, joined to the gaps that it touches; the new number of gaps."""
    place = np.searchsorted(gaps[:count, 0], low)
    joins_below = place > 0 and gaps[place - 1, 1] == low
    joins_above = gaps[place, 0] == high
    if joins_below and joins_above:
        gaps[place - 1, 1] = gaps[place, 1]
        for i in range(place, count - 1):
            gaps[i, 0], gaps[i, 1] = gaps[i + 1, 0], gaps[i + 1, 1]
        return count - 1
    if joins_below:
        gaps[place - 1, 1] = high
        return count
    if joins_above:
        gaps[place, 0] = low
        return count
    for i in range(count, place, -1):
        gaps[i, 0], gaps[i, 1] = gaps[i - 1, 0], gaps[i - 1, 1]
    gaps[place, 0], gaps[place, 1] = low, high
    return count + 1


@numba.njit(cache=True)
def _take(gaps: IntArray, count: int, gap: int, low: int, high: int) -> int:
    """Take [low, high) out of a gap that holds it; the new number of gaps."""
    begin, end = gaps[gap, 0], gaps[gap, 1]
    if low > begin and high < end:
        for i in range(count, gap, -1):
            gaps[i, 0], gaps[i, 1] = gaps[i - 1, 0], gaps[i - 1, 1]
        gaps[gap, 1], gaps[gap + 1, 0] = low, high
        return count + 1
    if low > begin:
        gaps[gap, 1] = low
        return count
    if high < end:
        gaps[gap, 0] = high
        return count
    for i in range(gap, count - 1):
        gaps[i, 0], gaps[i, 1] = gaps[i + 1, 0], gaps[i + 1, 1]
    return count - 1


@numba.njit(cache=True)
def _lowest_place(
    gaps: IntArray, returning: IntArray, slot_bytes: IntArray, offsets: IntArray, num_bytes: int
) -> tuple[int, int]:
    """The lowest gap with ``num_bytes`` free, and the lowest offset there that is out of the way
    of the slots ``returning``, which come in order of offset. The last gap has no end.
    """
    gap = first = offset = 0
    while True:
        offset = max(offset, gaps[gap, 0])
        for other in returning[first:]:
            if offsets[other] - offset >= num_bytes:
                break
            offset = max(offset, offsets[other] + slot_bytes[other])
            first += 1
        if gaps[gap, 1] - offset >= num_bytes:
            return gap, offset
        gap += 1
