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
    taken = np.empty(len(start), dtype=np.int64)
    taken_until = np.empty(len(start), dtype=np.int64)
    taken[: len(stack)] = stack
    taken_until[: len(stack)] = held_until[stack]
    count = len(stack)
    for slot in rest:
        kept = 0
        for i in range(count):
            if taken_until[i] > start[slot]:
                taken[kept] = taken[i]
                taken_until[kept] = taken_until[i]
                kept += 1
        # Slots of the stack that are taken again before this one is given back are in its way too.
        returning = stack[start[stack] < end[slot]]
        offset = _lowest_gap(taken[:kept], returning, slot_bytes, offsets, slot_bytes[slot])
        offsets[slot] = offset
        place = kept
        while place > 0 and offsets[taken[place - 1]] > offset:
            taken[place] = taken[place - 1]
            taken_until[place] = taken_until[place - 1]
            place -= 1
        taken[place] = slot
        taken_until[place] = end[slot]
        count = kept + 1


@numba.njit(cache=True)
def _lowest_gap(
    taken: IntArray, returning: IntArray, slot_bytes: IntArray, offsets: IntArray, num_bytes: int
) -> int:
    """Lowest offset with ``num_bytes`` free, given two lists of slots in order of offset."""
    offset = i = j = 0
    while i < len(taken) or j < len(returning):
        if j == len(returning) or (i < len(taken) and offsets[taken[i]] <= offsets[returning[j]]):
            neighbour = taken[i]
            i += 1
        else:
            neighbour = returning[j]
            j += 1
        if offsets[neighbour] - offset >= num_bytes:
            break
        offset = max(offset, offsets[neighbour] + slot_bytes[neighbour])
    return offset
