"""The choice of G10's planner, compiled: which periods leave, to which device, in which bins.

Numbers are the steps of :mod:`teraio.planner.policies.g10`.
"""

from __future__ import annotations

import heapq

import numba
import numpy as np

from teraio.contracts.table import BoolArray
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
    free_bytes,
)
from teraio.planner.critical_pressure import Pressure, lower_pressure
from teraio.planner.greedy_choice import Choice, commit, has_room

_HOST, _SSD = 0, 1
_LONG_ENOUGH = 2.5
"""An interval must be 2 + delta times as long as one transfer; delta = 0.5 by default."""

_LOOPED_MARGIN = 1.5
"""A weight is fetched so many transfer times before it is needed in the next iteration."""


@numba.njit(cache=True)
def choose_like_g10(
    candidates: Candidates,
    choice: Choice,
    channels: Reservations,
    pressure: Pressure,
    target_slack: int,
    is_looped: BoolArray,
) -> None:
    """Choose until every bin is below the target, ``target_slack`` bytes below capacity (2).

    ``is_looped`` bool (candidates,) marks those of weights that wrap into the next iteration.
    ``pressure`` is lowered, channels are booked, choices are left in ``choice``.
    """
    heap = [(0.0, 0.0, 0) for _ in range(0)]
    for row in range(len(candidates)):
        benefit = _benefit(candidates, channels, pressure, row, is_looped[row])
        heap.append((-benefit, -_area(candidates, row), row))
    heapq.heapify(heap)
    while len(heap) > 0 and pressure.highest.max() > -target_slack:
        _, area, row = heapq.heappop(heap)
        benefit = _benefit(candidates, channels, pressure, row, is_looped[row])
        if len(heap) > 0 and (-benefit, area, row) > heap[0]:
            # Benefits only fall: it comes up again where it belongs now.
            heapq.heappush(heap, (-benefit, area, row))
            continue
        if _relieves(candidates, pressure, row, target_slack):
            _place(candidates, choice, channels, pressure, row, is_looped[row])


@numba.njit(cache=True)
def _area(candidates: Candidates, row: int) -> float:
    """Bytes times seconds, the order among equal benefits (2)."""
    return float(candidates[row].num_bytes * candidates[row].seconds)


@numba.njit(cache=True)
def _benefit(
    candidates: Candidates, channels: Reservations, pressure: Pressure, row: int, is_looped: bool
) -> float:
    """(2) Bytes times the time above capacity, while half of them is away."""
    period = candidates[row]
    first, end = period.first_bin, period.last_bin + 1
    if not is_looped and channels.rate.shape[0] > 2:
        half = period.num_bytes / 2
        drained = find_offload_end(channels, _SSD, first, period.last_bin, half)
        if drained == NOT_FOUND:
            return 0.0
        returning = find_prefetch_start(channels, _SSD, first, period.last_bin, half)
        if returning == NOT_FOUND:
            return 0.0
        first, end = drained, returning
    return float(period.num_bytes * _seconds_above(pressure, first, end))


@numba.njit(cache=True)
def _seconds_above(pressure: Pressure, first: int, end: int) -> float:
    """Time above capacity in bins [first, end), unrolled."""
    num_bins, block = len(pressure.excess), 64
    total = 0.0
    index = first
    while index < end:
        bin_index = index % num_bins
        if bin_index % block == 0 and pressure.highest[bin_index // block] <= 0:
            index += min(block, num_bins - bin_index)
            continue
        if pressure.excess[bin_index] > 0:
            total += pressure.seconds[bin_index]
        index += 1
    return total


@numba.njit(cache=True)
def _relieves(candidates: Candidates, pressure: Pressure, row: int, target_slack: int) -> bool:
    """Whether some bin inside is above the target."""
    num_bins = len(pressure.excess)
    for index in range(candidates[row].first_bin, candidates[row].last_bin + 1):
        if pressure.excess[index % num_bins] > -target_slack:
            return True
    return False


@numba.njit(cache=True)
def _place(
    candidates: Candidates,
    choice: Choice,
    channels: Reservations,
    pressure: Pressure,
    row: int,
    is_looped: bool,
) -> None:
    """(3) SSD, host, or nowhere."""
    period, num_bins = candidates[row], len(channels.seconds)
    has_ssd = channels.rate.shape[0] > 2
    host_fits = has_room(candidates, choice, row, _HOST, num_bins)
    ssd_fits = has_ssd and has_room(candidates, choice, row, _SSD, num_bins)
    ssd_seconds = _transfer_seconds(channels, _SSD, period.num_bytes) if has_ssd else np.inf
    if period.seconds > _LONG_ENOUGH * ssd_seconds:
        if is_looped:
            if ssd_fits:
                _leave_looped(candidates, choice, channels, pressure, row, ssd_seconds)
            return
        is_full = _is_write_full(channels, period.first_bin, ssd_seconds)
        if is_full and host_fits:
            _leave(candidates, choice, channels, pressure, row, _HOST)
        elif ssd_fits:
            _leave(candidates, choice, channels, pressure, row, _SSD)
    elif host_fits:
        host_seconds = _transfer_seconds(channels, _HOST, period.num_bytes)
        if period.seconds > _LONG_ENOUGH * host_seconds:
            _leave(candidates, choice, channels, pressure, row, _HOST)


@numba.njit(cache=True)
def _transfer_seconds(channels: Reservations, device: int, num_bytes: float) -> float:
    """One transfer alone."""
    latency = channels.latency[device, WRITE]
    rate = min(channels.rate[device, WRITE], channels.rate[device, READ])
    return float((num_bytes + latency) / rate)


@numba.njit(cache=True)
def _is_write_full(channels: Reservations, first: int, seconds: float) -> bool:
    """Whether the SSD can take nothing while the offload would run at full speed."""
    num_bins = len(channels.seconds)
    passed, index = 0.0, first
    while passed < seconds and index < first + num_bins:
        if free_bytes(channels, _SSD, WRITE, index % num_bins) >= 1.0:
            return False
        passed += channels.seconds[index % num_bins]
        index += 1
    return True


@numba.njit(cache=True)
def _leave(
    candidates: Candidates,
    choice: Choice,
    channels: Reservations,
    pressure: Pressure,
    row: int,
    device: int,
) -> None:
    """Book both transfers if they leave a bin between them; else the period stays."""
    period = candidates[row]
    end = find_offload_end(channels, device, period.first_bin, period.last_bin, period.num_bytes)
    if end == NOT_FOUND:
        return
    start = find_prefetch_start(channels, device, end + 1, period.last_bin, period.num_bytes)
    if start == NOT_FOUND or start <= end + 1:
        return
    book_offload(channels, device, period.first_bin, end, period.num_bytes)
    book_prefetch(channels, device, start, period.last_bin, period.num_bytes)
    _take(candidates, choice, pressure, row, device, end + 1, start)


@numba.njit(cache=True)
def _leave_looped(
    candidates: Candidates,
    choice: Choice,
    channels: Reservations,
    pressure: Pressure,
    row: int,
    seconds: float,
) -> None:
    """A weight over the cut: out at once, back 1.5 transfer times before; no bandwidth booked."""
    period, num_bins = candidates[row], len(channels.seconds)
    first, end = period.first_bin + 1, period.last_bin
    wait = _LOOPED_MARGIN * seconds
    while end > first and wait > 0.0:
        end -= 1
        wait -= channels.seconds[end % num_bins]
    if end > first:
        _take(candidates, choice, pressure, row, _SSD, first, end)


@numba.njit(cache=True)
def _take(
    candidates: Candidates,
    choice: Choice,
    pressure: Pressure,
    row: int,
    device: int,
    first: int,
    end: int,
) -> None:
    choice.periods[row].away_first_bin = first
    choice.periods[row].away_end_bin = end
    lower_pressure(pressure, first, end, candidates[row].relief_bytes)
    commit(candidates, choice, row, device, len(pressure.excess))
