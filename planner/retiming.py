"""Exact times of chosen moves: offloads at once, memory back as late and taken as early as it fits.

For a given set of moves, writing in order of release and reading in order of need is best; what is
left to decide is when memory changes hands. All moves begin with the longest possible absence. The
slack that this leaves is given out again, kernel by kernel in index space: first so that reads and
writes keep the times that the channels allow on the ideal timeline, then all the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from teraio.contracts.table import BoolArray, IntArray
from teraio.planner.candidates import Candidates
from teraio.planner.channel_reservations import (
    NOT_FOUND,
    Reservations,
    book_offload,
    book_prefetch,
    find_offload_end,
    find_prefetch_start,
)
from teraio.planner.slack_tree import (
    add_cyclic,
    first_below_cyclic,
    last_below_cyclic,
    slack_tree,
)


class Windows(NamedTuple):
    """Unrolled kernels [free_by, prefetch_start) of each chosen row, int64 (chosen,).

    For a tail the end is the kernel after its death, and stays.
    """

    free_by: IntArray
    prefetch_start: IntArray


def longest_windows(candidates: Candidates, rows: IntArray) -> Windows:
    """Away in every kernel between the accesses."""
    return Windows(candidates["away_first"][rows].copy(), candidates["away_end"][rows].copy())


def kernel_of_bin(bin_index: IntArray, first_kernel: IntArray) -> IntArray:
    """First kernel, unrolled, of unrolled bins; ``first_kernel`` int64 (bins + 1,)."""
    cycle, within = np.divmod(bin_index, len(first_kernel) - 1)
    result: IntArray = first_kernel[within] + cycle * first_kernel[-1]
    return result


def planned_windows(
    candidates: Candidates,
    rows: IntArray,
    device: IntArray,
    writes: BoolArray,
    channels: Reservations,
    first_kernel: IntArray,
) -> Windows:
    """When each offload ends and each prefetch must start, on the ideal timeline.

    ``channels`` are open reservations, ``first_kernel`` the bins' first kernels int64 (bins + 1,).
    Offloads are booked in order of release, prefetches in reverse order of need. Windows are cut
    back so that at least one kernel of absence remains.
    """
    end_bin = _offload_ends(candidates, rows, device, writes, channels)
    order = np.argsort(-candidates["away_end"][rows], kind="stable")
    start_bin = _prefetch_starts(candidates, rows, device, channels, order)
    earliest, latest = candidates["away_first"][rows], candidates["away_end"][rows]

    free_by = np.clip(kernel_of_bin(end_bin + 1, first_kernel), earliest, latest - 1)
    free_by = np.where(writes, free_by, earliest)
    prefetch_start = np.clip(kernel_of_bin(start_bin, first_kernel), free_by + 1, latest)
    is_tail = candidates["is_tail"][rows]
    return Windows(free_by, np.where(is_tail, latest, prefetch_start))


@numba.njit(cache=True)
def _offload_ends(
    candidates: Candidates,
    rows: IntArray,
    device: IntArray,
    writes: BoolArray,
    channels: Reservations,
) -> IntArray:
    """Bin in which each offload ends; ``rows`` are in order of release."""
    num_bins = len(channels.seconds)
    ends = np.empty(len(rows), dtype=np.int64)
    for i in range(len(rows)):
        first = candidates[rows[i]].first_bin
        ends[i] = first
        if writes[i]:
            num_bytes = candidates[rows[i]].num_bytes
            last = first + num_bins - 1
            end = find_offload_end(channels, device[i], first, last, num_bytes)
            ends[i] = last if end == NOT_FOUND else end
            book_offload(channels, device[i], first, ends[i], num_bytes)
    return ends


@numba.njit(cache=True)
def _prefetch_starts(
    candidates: Candidates,
    rows: IntArray,
    device: IntArray,
    channels: Reservations,
    order: IntArray,
) -> IntArray:
    """Bin in which each prefetch must start, booked in ``order``."""
    num_bins = len(channels.seconds)
    starts = np.zeros(len(rows), dtype=np.int64)
    for i in order:
        if candidates[rows[i]].is_tail:
            continue
        num_bytes = candidates[rows[i]].num_bytes
        last = candidates[rows[i]].last_bin
        first = last - num_bins + 1
        start = find_prefetch_start(channels, device[i], first, last, num_bytes)
        starts[i] = first if start == NOT_FOUND else start
        book_prefetch(channels, device[i], starts[i], last, num_bytes)
    return starts


def spend_slack(
    candidates: Candidates,
    rows: IntArray,
    slack_bytes: IntArray,
    planned: Windows,
    *,
    prefetch_early: bool,
) -> tuple[Windows, BoolArray]:
    """Shorten absences as far as memory allows; also says which moves are needed at all.

    ``slack_bytes`` int64 (K,) is capacity minus resident bytes with the longest absences, nowhere
    negative. In this order: prefetches up to their planned start, soonest need first; offloads up
    to their planned end, latest release first; a move whose absence could be filled is dropped;
    then free_by as late, and if ``prefetch_early`` prefetch_start as early, as fits.
    """
    windows = longest_windows(candidates, rows)
    tree = slack_tree(slack_bytes)
    num_kernels = len(slack_bytes)
    size = candidates["relief_bytes"][rows]
    by_need = np.argsort(candidates["away_end"][rows], kind="stable")
    by_need = by_need[~candidates["is_tail"][rows][by_need]]
    by_release = np.arange(len(rows))[::-1].copy()
    needed = np.ones(len(rows), dtype=bool)
    grow_prefetches(tree, num_kernels, windows, size, by_need, planned.prefetch_start)
    grow_offloads(tree, num_kernels, windows, size, by_release, planned.free_by)
    by_length = np.argsort(candidates["seconds"][rows], kind="stable")
    drop_unneeded(tree, num_kernels, windows, size, by_length, needed)
    by_need, by_release = by_need[needed[by_need]], by_release[needed[by_release]]
    grow_offloads(tree, num_kernels, windows, size, by_release, candidates["away_end"][rows])
    if prefetch_early:
        grow_prefetches(tree, num_kernels, windows, size, by_need, candidates["away_first"][rows])
    return windows, needed


@numba.njit(cache=True)
def grow_prefetches(
    tree: IntArray,
    num_kernels: int,
    windows: Windows,
    size: IntArray,
    order: IntArray,
    target: IntArray,
) -> None:
    """Take memory for each prefetch from ``target`` on, or from where it fits."""
    free_by, start = windows
    for i in order:
        first = max(target[i], free_by[i] + 1)
        if first < start[i]:
            blocked = last_below_cyclic(tree, first, start[i], size[i], num_kernels)
            add_cyclic(tree, blocked + 1, start[i], -size[i], num_kernels)
            start[i] = blocked + 1


@numba.njit(cache=True)
def grow_offloads(
    tree: IntArray,
    num_kernels: int,
    windows: Windows,
    size: IntArray,
    order: IntArray,
    target: IntArray,
) -> None:
    """Keep the memory of each offload until ``target``, or as long as it fits."""
    free_by, start = windows
    for i in order:
        last = min(target[i], start[i] - 1)
        if free_by[i] < last:
            blocked = first_below_cyclic(tree, free_by[i], last, size[i], num_kernels)
            add_cyclic(tree, free_by[i], blocked, -size[i], num_kernels)
            free_by[i] = blocked


@numba.njit(cache=True)
def drop_unneeded(
    tree: IntArray,
    num_kernels: int,
    windows: Windows,
    size: IntArray,
    order: IntArray,
    needed: BoolArray,
) -> None:
    """Let a storage stay where the rest of its absence fits into the slack."""
    free_by, start = windows
    for i in order:
        blocked = first_below_cyclic(tree, free_by[i], start[i], size[i], num_kernels)
        if blocked == start[i]:
            add_cyclic(tree, free_by[i], start[i], -size[i], num_kernels)
            needed[i] = False
