"""What the paper leaves open: pressure that no transfer in time can remove is removed all the same.

A sweep over the kernels, exact in index space. Where a kernel still has too many bytes, further
periods that hold it leave, longest first, each to the tier with the smaller backlog; the iteration
then waits for them. It ends with a plan that fits, or with the kernel at which nothing is left.
"""

from __future__ import annotations

import heapq

import numba
import numpy as np

from teraio.contracts.table import IntArray
from teraio.planner.candidates import Candidates
from teraio.planner.channel_reservations import (
    NOT_FOUND,
    Reservations,
    book_offload,
    book_prefetch,
    find_offload_end,
    find_prefetch_start,
)
from teraio.planner.greedy_choice import NOT_CHOSEN, Choice, commit, has_room, is_clean

FITS = -1


@numba.njit(cache=True)
def relieve_remaining(
    candidates: Candidates, choice: Choice, channels: Reservations, pressure: IntArray
) -> int:
    """Choose until ``pressure`` int64 (K,), bytes above capacity per kernel, is nowhere positive.

    Chosen periods are away for all of their inactive kernels. Returns FITS, or the kernel at which
    every period that a tier has room for is away already. Ties go to the earlier row.
    """
    num_kernels = len(pressure)
    origin = int(np.argmin(pressure))
    first_row, next_row = _rows_by_start(candidates, num_kernels)
    ending = np.zeros(2 * num_kernels + 1, dtype=np.int64)
    heap = [(0.0, 0, 0) for _ in range(0)]
    for row in range(len(candidates)):
        start = (candidates[row].away_first - origin) % num_kernels
        expiry = start + candidates[row].away_end - candidates[row].away_first - num_kernels
        if expiry > 0:
            heapq.heappush(heap, (-candidates[row].seconds, row, expiry))
    relieved = 0
    for step in range(num_kernels):
        kernel = (origin + step) % num_kernels
        relieved -= ending[step]
        row = first_row[kernel]
        while row >= 0:
            expiry = step + candidates[row].away_end - candidates[row].away_first
            heapq.heappush(heap, (-candidates[row].seconds, row, expiry))
            row = next_row[row]
        while pressure[kernel] > relieved:
            if len(heap) == 0:
                return kernel
            _, row, expiry = heapq.heappop(heap)
            if expiry <= step or choice.periods[row].device != NOT_CHOSEN:
                continue
            if not _leave(candidates, choice, channels, row):
                continue
            relief = candidates[row].relief_bytes
            relieved += relief
            ending[expiry] += relief
            start = (candidates[row].away_first - origin) % num_kernels
            if start > step:
                # It was away from before the origin, and will be again.
                ending[start] -= relief
    return FITS


@numba.njit(cache=True)
def _rows_by_start(candidates: Candidates, num_kernels: int) -> tuple[IntArray, IntArray]:
    """Linked lists of the candidates that can be away from each kernel on."""
    first_row = np.full(num_kernels, -1, dtype=np.int64)
    next_row = np.full(len(candidates), -1, dtype=np.int64)
    for row in range(len(candidates) - 1, -1, -1):
        kernel = candidates[row].away_first % num_kernels
        next_row[row] = first_row[kernel]
        first_row[kernel] = row
    return first_row, next_row


@numba.njit(cache=True)
def _leave(candidates: Candidates, choice: Choice, channels: Reservations, row: int) -> bool:
    """Choose the tier with the smaller backlog, book it; False if no tier has room."""
    best_device, best_seconds = NOT_CHOSEN, np.inf
    for device in range(choice.room.shape[0]):
        if has_room(candidates, choice, row, device, len(channels.seconds)):
            seconds = _backlog_seconds(candidates, choice, channels, row, device)
            if seconds < best_seconds:
                best_device, best_seconds = device, seconds
    if best_device == NOT_CHOSEN:
        return False
    num_bins = len(channels.seconds)
    num_bytes = candidates[row].num_bytes
    first, last = candidates[row].first_bin, candidates[row].last_bin
    if not is_clean(candidates, choice, row, best_device):
        book_offload(channels, best_device, first, first + num_bins - 1, num_bytes)
    if not candidates[row].is_tail:
        book_prefetch(channels, best_device, last - num_bins + 1, last, num_bytes)
    commit(candidates, choice, row, best_device, num_bins)
    return True


@numba.njit(cache=True)
def _backlog_seconds(
    candidates: Candidates, choice: Choice, channels: Reservations, row: int, device: int
) -> float:
    """Ideal time that both transfers would take, with the queueing behind what is booked."""
    num_bins = len(channels.seconds)
    num_bytes = candidates[row].num_bytes
    first, last = candidates[row].first_bin, candidates[row].last_bin
    total = 0.0
    if not is_clean(candidates, choice, row, device):
        end = find_offload_end(channels, device, first, first + num_bins - 1, num_bytes)
        total += _span_seconds(channels, first, first + num_bins if end == NOT_FOUND else end)
        total += num_bytes / channels.rate[device, 1]
    if not candidates[row].is_tail:
        start = find_prefetch_start(channels, device, last - num_bins + 1, last, num_bytes)
        begin = last - num_bins if start == NOT_FOUND else start
        total += _span_seconds(channels, begin, last)
        total += num_bytes / channels.rate[device, 0]
    return total


@numba.njit(cache=True)
def _span_seconds(channels: Reservations, first: int, last: int) -> float:
    """Ideal time from the start of one unrolled bin to that of another."""
    num_bins = len(channels.seconds)
    cycles = last // num_bins - first // num_bins
    starts = channels.starts
    return float(cycles * starts[num_bins] + starts[last % num_bins] - starts[first % num_bins])
