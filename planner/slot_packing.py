"""Packing of slots: where on a tier's device each copy lies, so that none overlaps another in time.

Dynamic storage allocation on a cycle. Slots that are taken at the cut are stacked first, the ones
that stay longest at the bottom; the others are placed by first fit in order of time.
"""

from __future__ import annotations

import numba
import numpy as np

from teraio.contracts.table import IntArray


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
    _first_fit(start, start + length, held_until, slot_bytes, stack, rest, offsets)
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
    held_until: IntArray,
    slot_bytes: IntArray,
    stack: IntArray,
    rest: IntArray,
    offsets: IntArray,
) -> None:
    """Sweep over time with the slots now taken, in order of offset; fill in ``offsets``."""
    active = np.empty(len(start), dtype=np.int64)
    active_end = np.empty(len(start), dtype=np.int64)
    count = 0
    for slot in stack:
        active[count] = slot
        active_end[count] = held_until[slot]
        count += 1
    for slot in rest:
        size = slot_bytes[slot]
        kept = 0
        for i in range(count):
            if active_end[i] > start[slot]:
                active[kept] = active[i]
                active_end[kept] = active_end[i]
                kept += 1
        count = kept
        offset = 0
        place = 0
        upcoming = 0
        while True:
            # Next neighbour in order of offset: a slot taken now, or one of the stack that is
            # taken again before this one is given back.
            while upcoming < len(stack) and start[stack[upcoming]] >= end[slot]:
                upcoming += 1
            neighbour = -1
            is_active = False
            if place < count:
                neighbour = active[place]
                is_active = True
            if upcoming < len(stack) and (
                neighbour < 0 or offsets[stack[upcoming]] < offsets[neighbour]
            ):
                neighbour = stack[upcoming]
                is_active = False
            if neighbour < 0 or offsets[neighbour] - offset >= size:
                break
            offset = max(offset, offsets[neighbour] + slot_bytes[neighbour])
            if is_active:
                place += 1
            else:
                upcoming += 1
        offsets[slot] = offset
        position = count
        while position > 0 and offsets[active[position - 1]] > offset:
            active[position] = active[position - 1]
            active_end[position] = active_end[position - 1]
            position -= 1
        active[position] = slot
        active_end[position] = end[slot]
        count += 1
