"""Choice of periods by benefit per cost, on the ideal timeline (paper, section 3.3).

Compiled, because it evaluates each candidate several times. See :mod:`teraio.planner.greedy` for
the steps; the numbers in comments are theirs.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from teraio.contracts.table import FloatArray, IntArray
from teraio.planner.candidates import Candidates
from teraio.planner.channel_reservations import (
    NOT_FOUND,
    READ,
    WRITE,
    Reservations,
    book_offload,
    book_prefetch,
    find_offload_end,
    find_prefetch_start,
)

NOT_CHOSEN = -1
_HOST = 0


class Choice(NamedTuple):
    """What has been chosen, filled in place by compiled code.

    Per candidate: ``device`` (index, host first; NOT_CHOSEN) and the bins [away_first_bin,
    away_end_bin) in which it is away. Per version: the device of its copy and the hull of bins in
    which the copy is kept. ``occupied`` int64 (devices, bins) are slot bytes, ``capacity`` int64
    (devices,) what the devices have; ``num_chosen`` int64 (1,) and ``order`` list the choices.
    """

    device: IntArray
    away_first_bin: IntArray
    away_end_bin: IntArray
    version_device: IntArray
    version_position: IntArray
    version_first: IntArray
    version_last: IntArray
    occupied: IntArray
    capacity: IntArray
    order: IntArray
    num_chosen: IntArray


def open_choice(candidates: Candidates, capacity_bytes: IntArray, num_bins: int) -> Choice:
    """Nothing chosen yet."""
    count, versions = len(candidates.storage), len(candidates.version_begin) - 1

    def filled(length: int) -> IntArray:
        return np.full(length, NOT_CHOSEN, dtype=np.int64)

    return Choice(
        device=filled(count),
        away_first_bin=filled(count),
        away_end_bin=filled(count),
        version_device=filled(versions),
        version_position=filled(versions),
        version_first=filled(versions),
        version_last=filled(versions),
        occupied=np.zeros((len(capacity_bytes), num_bins), dtype=np.int64),
        capacity=capacity_bytes,
        order=filled(count),
        num_chosen=np.zeros(1, dtype=np.int64),
    )


@numba.njit(cache=True)
def is_clean(candidates: Candidates, choice: Choice, row: int, device: int) -> bool:
    """Whether a copy that serves this period is kept on the device: nothing is to be written."""
    version = candidates.version[row]
    if candidates.is_unwritten[row]:
        return True
    if choice.version_device[version] != device:
        return False
    return bool(candidates.position[row] > choice.version_position[version])


@numba.njit(cache=True)
def _slot_ranges(
    candidates: Candidates, choice: Choice, row: int, device: int
) -> tuple[int, int, int, int]:
    """Bins [a, b) and [c, d), unrolled, in which choosing the period would take its slot anew."""
    version = candidates.version[row]
    num_bins = choice.occupied.shape[1]
    first, last = candidates.slot_first[row], candidates.slot_last[row] + 1
    if choice.version_device[version] != device:
        if candidates.is_unwritten[row]:
            return 0, num_bins, 0, 0
        return first, min(last, first + num_bins), 0, 0
    if candidates.is_unwritten[row]:
        return 0, 0, 0, 0
    begin, end = choice.version_first[version], choice.version_last[version]
    before = first if first < begin else begin
    after = last if last > end else end
    after = min(after, before + num_bins)
    return before, begin, end, after


@numba.njit(cache=True)
def has_room(candidates: Candidates, choice: Choice, row: int, device: int) -> bool:
    """Whether the device can hold the slot at all times needed, and the rule of one device holds.

    A storage that is never written keeps its one permanent slot, so it never changes device.
    """
    version = candidates.version[row]
    of_version = choice.version_device[version]
    if candidates.is_unwritten[row] and of_version not in (NOT_CHOSEN, device):
        return False
    limit = choice.capacity[device] - candidates.slot_bytes[row]
    if limit < 0:
        return False
    num_bins = choice.occupied.shape[1]
    a, b, c, d = _slot_ranges(candidates, choice, row, device)
    for first, last in ((a, b), (c, d)):
        for index in range(first, last):
            if choice.occupied[device, index % num_bins] > limit:
                return False
    return True


@numba.njit(cache=True)
def commit(candidates: Candidates, choice: Choice, row: int, device: int) -> bool:
    """Record a choice and take its slot; True if other periods of its version become cheaper."""
    version = candidates.version[row]
    num_bins = choice.occupied.shape[1]
    a, b, c, d = _slot_ranges(candidates, choice, row, device)
    for first, last in ((a, b), (c, d)):
        for index in range(first, last):
            choice.occupied[device, index % num_bins] += candidates.slot_bytes[row]
    choice.device[row] = device
    choice.order[choice.num_chosen[0]] = row
    choice.num_chosen[0] += 1
    position = candidates.position[row]
    if choice.version_device[version] == NOT_CHOSEN:
        choice.version_device[version] = device
        choice.version_position[version] = position
        choice.version_first[version] = a
        choice.version_last[version] = b
        return True
    if choice.version_device[version] != device:
        return False
    if not candidates.is_unwritten[row]:
        choice.version_first[version] = a
        choice.version_last[version] = max(d, choice.version_last[version])
    if position < choice.version_position[version]:
        choice.version_position[version] = position
        return True
    return False


@numba.njit(cache=True)
def _relief(
    pressure: IntArray, seconds: FloatArray, first: int, last: int, num_bytes: int
) -> float:
    """Byte-seconds of critical pressure removed by ``num_bytes`` less in bins [first, last)."""
    num_bins = len(pressure)
    total = 0.0
    while first < last:
        shift = first // num_bins * num_bins
        end = min(last, shift + num_bins)
        for index in range(first - shift, end - shift):
            excess = pressure[index]
            if excess > 0:
                total += seconds[index] * min(excess, num_bytes)
        first = end
    return total


@numba.njit(cache=True)
def _window(
    candidates: Candidates, choice: Choice, channels: Reservations, row: int, device: int
) -> tuple[int, int]:
    """(4) Bins [first, end) from the earliest end of the offload to the latest safe prefetch."""
    last = candidates.last_bin[row]
    if is_clean(candidates, choice, row, device):
        first = candidates.clean_bin[row]
    else:
        end = find_offload_end(
            channels, device, candidates.first_bin[row], last, candidates.num_bytes[row]
        )
        if end == NOT_FOUND:
            return 0, 0
        first = end + 1
    if candidates.is_tail[row]:
        return first, last
    start = find_prefetch_start(channels, device, first, last, candidates.num_bytes[row])
    return first, (first if start == NOT_FOUND else start)


@numba.njit(cache=True)
def _cost(
    candidates: Candidates, choice: Choice, channels: Reservations, row: int, device: int
) -> float:
    """(2) Seconds of transfer: both ways, or only what a clean copy or a tail still needs."""
    num_bytes = candidates.num_bytes[row]
    cost = 1e-12
    if not is_clean(candidates, choice, row, device):
        cost += (num_bytes + channels.latency[device, WRITE]) / channels.rate[device, WRITE]
    if not candidates.is_tail[row]:
        cost += (num_bytes + channels.latency[device, READ]) / channels.rate[device, READ]
    return cost


@numba.njit(cache=True)
def _evaluate(
    candidates: Candidates,
    choice: Choice,
    channels: Reservations,
    pressure: IntArray,
    row: int,
    patience: float,
) -> tuple[float, int, int, int]:
    """(3, 5) Benefit per cost, device and window; SSD first, host where that is much better."""
    best_benefit = best_ratio = 0.0
    best_device, best_first, best_end = NOT_CHOSEN, 0, 0
    for index in range(1, choice.occupied.shape[0] + 1):
        # SSDs in order, then the host, which is device 0.
        device = index % choice.occupied.shape[0]
        if not has_room(candidates, choice, row, device):
            continue
        first, end = _window(candidates, choice, channels, row, device)
        if first >= end:
            continue
        benefit = _relief(pressure, channels.seconds, first, end, candidates.relief_bytes[row])
        wanted = best_benefit
        if device == _HOST and best_device != NOT_CHOSEN:
            if patience <= 0.0:
                continue
            wanted = best_benefit / patience
        if benefit > wanted:
            best_benefit = benefit
            best_ratio = benefit / _cost(candidates, choice, channels, row, device)
            best_device, best_first, best_end = device, first, end
    return best_ratio, best_device, best_first, best_end


@numba.njit(cache=True)
def _take(
    candidates: Candidates,
    choice: Choice,
    channels: Reservations,
    pressure: IntArray,
    row: int,
    device: int,
    first: int,
    end: int,
) -> bool:
    """(6) Book channels, lower the pressure, take the slot; True if siblings become cheaper."""
    num_bins = len(pressure)
    num_bytes = candidates.num_bytes[row]
    if not is_clean(candidates, choice, row, device):
        book_offload(channels, device, candidates.first_bin[row], first - 1, num_bytes)
    if not candidates.is_tail[row]:
        book_prefetch(channels, device, end, candidates.last_bin[row], num_bytes)
    for index in range(first, end):
        pressure[index % num_bins] -= candidates.relief_bytes[row]
    choice.away_first_bin[row] = first
    choice.away_end_bin[row] = end
    return commit(candidates, choice, row, device)


@numba.njit(cache=True)
def choose_by_benefit(
    candidates: Candidates,
    choice: Choice,
    channels: Reservations,
    pressure: IntArray,
    patience: float,
) -> None:
    """Choose until no pressure is left or nothing helps; ``pressure`` int64 (bins,) is lowered.

    ``patience`` is the share of the host's benefit below which an SSD is passed over; 0 is the
    paper's "SSD until saturated". Ratios are compared in single precision, so that rounding does
    not decide between equal ones; ties go to the larger storage, then to the earlier row.
    """
    count = len(candidates.storage)
    current = np.zeros(count, dtype=np.float32)
    heap = [(np.float32(0.0), 0.0, 0) for _ in range(0)]
    if pressure.max() <= 0:
        return
    for row in range(count):
        ratio = _evaluate(candidates, choice, channels, pressure, row, patience)[0]
        current[row] = ratio
        if ratio > 0.0:
            heap.append((-current[row], -candidates.num_bytes[row], row))
    heapq.heapify(heap)
    while len(heap) > 0:
        key, _, row = heapq.heappop(heap)
        if choice.device[row] != NOT_CHOSEN or -key != current[row]:
            continue
        ratio, device, first, end = _evaluate(candidates, choice, channels, pressure, row, patience)
        current[row] = ratio
        if ratio <= 0.0:
            continue
        entry = (-current[row], -candidates.num_bytes[row], row)
        if len(heap) > 0 and entry > heap[0]:
            heapq.heappush(heap, entry)
            continue
        if _take(candidates, choice, channels, pressure, row, device, first, end):
            _renew_siblings(candidates, choice, channels, pressure, row, patience, current, heap)
        if pressure.max() <= 0:
            break


@numba.njit(cache=True)
def _renew_siblings(
    candidates: Candidates,
    choice: Choice,
    channels: Reservations,
    pressure: IntArray,
    row: int,
    patience: float,
    current: npt.NDArray[np.float32],
    heap: list[tuple[np.float32, float, int]],
) -> None:
    """Periods of the same version got cheaper: the only case in which a ratio rises."""
    version = candidates.version[row]
    begin, end = candidates.version_begin[version], candidates.version_begin[version + 1]
    for sibling in candidates.rows_by_version[begin:end]:
        if choice.device[sibling] == NOT_CHOSEN:
            ratio = _evaluate(candidates, choice, channels, pressure, sibling, patience)[0]
            if np.float32(ratio) > current[sibling]:
                current[sibling] = ratio
                heapq.heappush(heap, (-current[sibling], -candidates.num_bytes[sibling], sibling))
