"""Further periods leave until everything fits: exact in index space, longest idle first.

A sweep over the kernels. Where one still finds too many bytes, the periods that hold it leave in
order of their length, as Belady's rule has it, small ones last: to a device that has a copy, else
to the one that would have moved it first after all that it has to move. It ends with a choice that
fits, or with the kernel at which nothing is left to leave.
"""

from __future__ import annotations

import heapq

import numba
import numpy as np

from teraio.contracts.table import BoolArray, FloatArray, IntArray
from teraio.planner.optimal.occupancy import overfull_devices
from teraio.planner.optimal.periods import STAYS, Problem

_SMALL_SHARE = 1e-4
"""Of the GPU's memory: what hardly relieves anything, and costs a transfer all the same."""


def repair(problem: Problem, device: IntArray) -> IntArray | None:
    """The choice with further rows until the longest absences fit; None if they cannot.

    A device that what is added would overfill gets none of it, unless there is no other.
    """
    rows = np.flatnonzero(device != STAYS)
    over = problem.resident_with(rows, problem.away_first[rows], problem.away_end[rows])
    over -= problem.capacity_bytes
    if over.max() <= 0:
        return device
    closed = _closed_devices(problem, rows)
    while True:
        result = _with_further(problem, device, rows, over, closed)
        if result is None:
            return None
        overfull = overfull_devices(problem, result) & ~closed
        if not overfull.any() or (closed | overfull).all():
            return result
        closed |= overfull


def _with_further(
    problem: Problem, device: IntArray, rows: IntArray, over: IntArray, closed: BoolArray
) -> IntArray | None:
    """One sweep; ``over`` int64 (K,) is what ``rows``, the chosen ones, leave above capacity."""
    rates = problem.machine.solo_rate
    seconds_per_byte = 1 / rates[0::2] + 1 / rates[1::2]
    busy_seconds = seconds_per_byte * np.bincount(
        device[rows], weights=problem.num_bytes[rows], minlength=len(seconds_per_byte)
    )
    busy_seconds[closed] = np.inf
    result = device.copy()
    stays = device == STAYS
    is_small = problem.relief_bytes < _SMALL_SHARE * problem.capacity_bytes
    order = np.lexsort((-problem.seconds[stays], is_small[stays]))
    candidates = np.flatnonzero(stays)[order]
    lap = problem.away_first // problem.num_kernels * problem.num_kernels
    fits = _sweep(
        candidates,
        problem.away_first - lap,
        problem.away_end - lap,
        problem.relief_bytes,
        problem.num_bytes,
        over,
        seconds_per_byte,
        busy_seconds,
        _devices_with_copies(problem, device),
        result,
    )
    return result if fits else None


def _closed_devices(problem: Problem, rows: IntArray) -> BoolArray:
    """Devices for no further copies, bool (devices,): without room, or once ``rows`` are chosen,
    those that can be full if there are others; what is added may well stay for long.
    """
    capacity_bytes = problem.machine.capacity_bytes
    closed: BoolArray = capacity_bytes <= 0
    can_be_full = capacity_bytes < problem.trace.peak_live_bytes
    if len(rows) and not can_be_full.all():
        closed |= can_be_full
    return closed


def _devices_with_copies(problem: Problem, device: IntArray) -> IntArray:
    """A device to which the row's version goes already, int64 (rows,); STAYS if there is none."""
    version = problem.version
    chosen = np.flatnonzero(device != STAYS)
    of_version = np.full(int(version.max(initial=-1)) + 1, STAYS)
    of_version[version[chosen]] = device[chosen]
    result: IntArray = of_version[version]
    return result


@numba.njit(cache=True)
def _sweep(
    candidates: IntArray,
    first: IntArray,
    end: IntArray,
    relief: IntArray,
    num_bytes: IntArray,
    over: IntArray,
    seconds_per_byte: FloatArray,
    busy_seconds: FloatArray,
    device_with_copy: IntArray,
    device: IntArray,
) -> bool:
    """Rank in ``candidates`` is the order in which they leave; False if some kernel cannot fit."""
    num_kernels = len(over)
    origin = int(np.argmin(over))
    head = np.full(num_kernels, -1, dtype=np.int64)
    following = np.full(len(candidates), -1, dtype=np.int64)
    ending = np.zeros(2 * num_kernels + 1, dtype=np.int64)
    heap = [(0, 0) for _ in range(0)]
    for rank in range(len(candidates) - 1, -1, -1):
        row = candidates[rank]
        start = (first[row] - origin) % num_kernels
        expiry = start + end[row] - first[row] - num_kernels
        if expiry > 0:
            heapq.heappush(heap, (rank, expiry))
        following[rank] = head[start]
        head[start] = rank
    relieved = 0
    for step in range(num_kernels):
        kernel = (origin + step) % num_kernels
        relieved -= ending[step]
        rank = head[step]
        while rank >= 0:
            row = candidates[rank]
            heapq.heappush(heap, (rank, step + end[row] - first[row]))
            rank = following[rank]
        while over[kernel] > relieved:
            if len(heap) == 0:
                return False
            rank, expiry = heapq.heappop(heap)
            row = candidates[rank]
            if expiry <= step or device[row] >= 0:
                continue
            best = device_with_copy[row]
            if best < 0:
                best = int(np.argmin(busy_seconds + num_bytes[row] * seconds_per_byte))
            device[row] = best
            busy_seconds[best] += num_bytes[row] * seconds_per_byte[best]
            relieved += relief[row]
            ending[expiry] += relief[row]
            start = (first[row] - origin) % num_kernels
            if start > step:
                # It was away from before the origin, and will be again.
                ending[start] -= relief[row]
    return True
