"""Further periods leave until everything fits: exact in index space, longest idle first.

A sweep over the kernels. Where one still finds too many bytes, the periods that hold it leave in
order of their length, as Belady's rule has it, each to the device that has moved the fewest seconds
so far. It ends with a choice that fits, or with the kernel at which nothing is left to leave.
"""

from __future__ import annotations

import heapq

import numba
import numpy as np

from teraio.contracts.table import FloatArray, IntArray
from teraio.planner.optimal.periods import STAYS, Problem


def repair(problem: Problem, device: IntArray) -> IntArray | None:
    """The choice with further rows until the longest absences fit; None if they cannot."""
    rows = np.flatnonzero(device != STAYS)
    over = problem.resident_with(rows, problem.away_first[rows], problem.away_end[rows])
    over -= problem.capacity_bytes
    if over.max() <= 0:
        return device
    rates = problem.machine.solo_rate
    seconds_per_byte = 1 / rates[0::2] + 1 / rates[1::2]
    busy_seconds = seconds_per_byte * np.bincount(
        device[rows], weights=problem.num_bytes[rows], minlength=len(seconds_per_byte)
    )
    busy_seconds[problem.machine.capacity_bytes <= 0] = np.inf
    result = device.copy()
    stays = device == STAYS
    order = np.argsort(-problem.seconds[stays], kind="stable")
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
        result,
    )
    return result if fits else None


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
            best = int(np.argmin(busy_seconds))
            device[row] = best
            busy_seconds[best] += num_bytes[row] * seconds_per_byte[best]
            relieved += relief[row]
            ending[expiry] += relief[row]
            start = (first[row] - origin) % num_kernels
            if start > step:
                # It was away from before the origin, and will be again.
                ending[start] -= relief[row]
    return True
