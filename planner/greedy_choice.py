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

from teraio.contracts.table import IntArray
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
from teraio.planner.critical_pressure import Pressure, lower_pressure, relief_byte_seconds
from teraio.planner.slack_tree import add_cyclic, first_below_cyclic, slack_tree

NOT_CHOSEN = -1
_HOST = 0

NO_LIMIT = int(np.iinfo(np.int64).max)
"""Bytes that may be written to a device whose wear nobody limits."""


class Choice(NamedTuple):
    """What has been chosen, filled in place by compiled code.

    ``periods`` holds a record per candidate: its ``device`` (index, host first; NOT_CHOSEN) and the
    bins [away_first_bin, away_end_bin) in which it is away; before it is chosen, ``best_device``,
    window, ``cost_seconds`` and ``ratio`` are those of its last evaluation. ``versions`` holds a
    record per version: the ``device`` of its copy, the ``position`` of the period that writes
    it, and the hull [first_bin, end_bin) in which it is kept. ``room`` int64 (devices, 2, nodes)
    are trees of the slot bytes left in each bin. ``write_left`` int64 (devices,) is what may still
    be written per iteration (NO_LIMIT); if any is limited, a version keeps to one device, so that
    it is written once.
    """

    periods: npt.NDArray[np.void]
    versions: npt.NDArray[np.void]
    room: IntArray
    write_left: IntArray
    is_limited: bool

    def copy(self) -> Choice:
        """An independent copy."""
        return self._replace(
            periods=self.periods.copy(),
            versions=self.versions.copy(),
            room=self.room.copy(),
            write_left=self.write_left.copy(),
        )

    def chosen_rows(self) -> IntArray:
        """Rows of the candidates chosen so far, in order."""
        return np.flatnonzero(self.periods["device"] != NOT_CHOSEN)


_PERIOD = np.dtype(
    [
        ("device", np.int64),
        ("best_device", np.int64),
        ("away_first_bin", np.int64),
        ("away_end_bin", np.int64),
        ("cost_seconds", np.float64),
        ("ratio", np.float64),
    ]
)
_VERSION = np.dtype(
    [
        ("device", np.int64),
        ("position", np.int64),
        ("first_bin", np.int64),
        ("end_bin", np.int64),
    ]
)


def open_choice(
    candidates: Candidates,
    capacity_bytes: IntArray,
    num_bins: int,
    write_bytes: IntArray | None = None,
) -> Choice:
    """Nothing chosen yet; ``capacity_bytes`` int64 (devices,) is what the tiers can hold, and
    ``write_bytes`` int64 (devices,) what may be written to them per iteration (None: no limit).
    """
    periods = np.zeros(len(candidates), dtype=_PERIOD)
    versions = np.zeros(candidates["version"].max(initial=-1) + 1, dtype=_VERSION)
    periods["device"] = versions["device"] = NOT_CHOSEN
    room = [slack_tree(np.full(num_bins, capacity, np.int64)) for capacity in capacity_bytes]
    if write_bytes is None:
        write_bytes = np.full(len(capacity_bytes), NO_LIMIT)
    is_limited = bool((write_bytes < NO_LIMIT).any())
    return Choice(periods, versions, np.stack(room), write_bytes.copy(), is_limited)


@numba.njit(cache=True)
def is_clean(candidates: Candidates, choice: Choice, row: int, device: int) -> bool:
    """Whether a copy that serves this period is kept on the device: nothing is to be written."""
    period = candidates[row]
    if period.is_unwritten:
        return True
    version = choice.versions[period.version]
    return bool(version.device == device and period.position > version.position)


@numba.njit(cache=True)
def _slot_ranges(
    candidates: Candidates, choice: Choice, row: int, device: int, num_bins: int
) -> tuple[int, int, int, int]:
    """Bins [a, b) and [c, d), unrolled, in which choosing the period would take its slot anew."""
    period = candidates[row]
    version = choice.versions[period.version]
    first, last = period.slot_first, period.slot_last + 1
    if version.device != device:
        if period.is_unwritten:
            return 0, num_bins, 0, 0
        return first, min(last, first + num_bins), 0, 0
    if period.is_unwritten:
        return 0, 0, 0, 0
    before = min(first, version.first_bin)
    after = min(max(last, version.end_bin), before + num_bins)
    return before, version.first_bin, version.end_bin, after


@numba.njit(cache=True)
def has_room(candidates: Candidates, choice: Choice, row: int, device: int, num_bins: int) -> bool:
    """Whether the device can hold the slot at all times needed, may still be written as much, and
    the rule of one device holds.

    A storage that is never written keeps its one permanent slot, so it never changes device.
    """
    period = candidates[row]
    of_version = choice.versions[period.version].device
    if of_version == NOT_CHOSEN:
        if not period.is_unwritten and period.num_bytes > choice.write_left[device]:
            return False
    elif of_version != device and (period.is_unwritten or choice.is_limited):
        return False
    room = choice.room[device]
    a, b, c, d = _slot_ranges(candidates, choice, row, device, num_bins)
    if first_below_cyclic(room, a, b, period.slot_bytes, num_bins) < b:
        return False
    return bool(first_below_cyclic(room, c, d, period.slot_bytes, num_bins) >= d)


@numba.njit(cache=True)
def commit(candidates: Candidates, choice: Choice, row: int, device: int, num_bins: int) -> int:
    """Record a choice and take its slot.

    Returns the position before which later periods of its version have become clean: those after
    it were clean already.
    """
    period = candidates[row]
    version = choice.versions[period.version]
    room = choice.room[device]
    a, b, c, d = _slot_ranges(candidates, choice, row, device, num_bins)
    add_cyclic(room, a, b, -period.slot_bytes, num_bins)
    if c < d:
        add_cyclic(room, c, d, -period.slot_bytes, num_bins)
    choice.periods[row].device = device
    if version.device == NOT_CHOSEN:
        version.device = device
        version.position = period.position
        version.first_bin = a
        version.end_bin = b
        if choice.is_limited and not period.is_unwritten:
            choice.write_left[device] -= period.num_bytes
        return np.iinfo(np.int64).max
    if version.device != device:
        return int(period.position)
    if not period.is_unwritten:
        version.first_bin = a
        version.end_bin = max(d, version.end_bin)
    clean_until = version.position
    version.position = min(period.position, clean_until)
    return int(clean_until)


@numba.njit(cache=True)
def _window(
    candidates: Candidates, choice: Choice, channels: Reservations, row: int, device: int
) -> tuple[int, int]:
    """(4) Bins [first, end) from the earliest end of the offload to the latest safe prefetch."""
    last = candidates[row].last_bin
    if is_clean(candidates, choice, row, device):
        first = candidates[row].clean_bin
    else:
        end = find_offload_end(
            channels, device, candidates[row].first_bin, last, candidates[row].num_bytes
        )
        if end == NOT_FOUND:
            return 0, 0
        first = end + 1
    if candidates[row].is_tail:
        return first, last
    start = find_prefetch_start(channels, device, first, last, candidates[row].num_bytes)
    return first, (first if start == NOT_FOUND else start)


@numba.njit(cache=True)
def _cost(
    candidates: Candidates, choice: Choice, channels: Reservations, row: int, device: int
) -> float:
    """(2) Seconds of transfer: both ways, or only what a clean copy or a tail still needs."""
    num_bytes = candidates[row].num_bytes
    cost = 1e-12
    if not is_clean(candidates, choice, row, device):
        cost += (num_bytes + channels.latency[device, WRITE]) / channels.rate[device, WRITE]
    if not candidates[row].is_tail:
        cost += (num_bytes + channels.latency[device, READ]) / channels.rate[device, READ]
    return cost


@numba.njit(cache=True)
def _evaluate(
    candidates: Candidates,
    choice: Choice,
    channels: Reservations,
    pressure: Pressure,
    row: int,
    patience: float,
) -> float:
    """(3, 5) Benefit per cost, with the device and window for it left in ``choice.periods``.

    SSDs come first; the host takes their place if its benefit is higher by 1 / ``patience``.
    """
    offer = choice.periods[row]
    offer.best_device = NOT_CHOSEN
    offer.ratio = 0.0
    best_benefit = 0.0
    for index in range(1, choice.room.shape[0] + 1):
        # SSDs in order, then the host, which is device 0.
        device = index % choice.room.shape[0]
        wanted = best_benefit
        if device == _HOST and offer.best_device != NOT_CHOSEN:
            if patience <= 0.0:
                break
            wanted = best_benefit / patience
        if not has_room(candidates, choice, row, device, len(channels.seconds)):
            continue
        first, end = _window(candidates, choice, channels, row, device)
        benefit = relief_byte_seconds(pressure, first, end, candidates[row].relief_bytes)
        if benefit > wanted:
            best_benefit = benefit
            offer.best_device = device
            offer.away_first_bin = first
            offer.away_end_bin = end
            offer.cost_seconds = _cost(candidates, choice, channels, row, device)
            offer.ratio = benefit / offer.cost_seconds
    return float(offer.ratio)


@numba.njit(cache=True)
def _highest_ratio(candidates: Candidates, choice: Choice, pressure: Pressure, row: int) -> float:
    """Benefit per cost in the window found before, which can only have become narrower."""
    offer = choice.periods[row]
    benefit = relief_byte_seconds(
        pressure, offer.away_first_bin, offer.away_end_bin, candidates[row].relief_bytes
    )
    return float(benefit / offer.cost_seconds)


@numba.njit(cache=True)
def _take(
    candidates: Candidates,
    choice: Choice,
    channels: Reservations,
    pressure: Pressure,
    row: int,
) -> int:
    """(6) Book channels, lower the pressure, take the slot; returns what ``commit`` does."""
    period, offer = candidates[row], choice.periods[row]
    device, first, end = offer.best_device, offer.away_first_bin, offer.away_end_bin
    if not is_clean(candidates, choice, row, device):
        book_offload(channels, device, period.first_bin, first - 1, period.num_bytes)
    if not period.is_tail:
        book_prefetch(channels, device, end, period.last_bin, period.num_bytes)
    lower_pressure(pressure, first, end, period.relief_bytes)
    return int(commit(candidates, choice, row, device, len(channels.seconds)))


@numba.njit(cache=True)
def choose_by_benefit(
    candidates: Candidates,
    choice: Choice,
    channels: Reservations,
    pressure: Pressure,
    patience: float,
) -> None:
    """Choose until no pressure is left or nothing helps; ``pressure`` is lowered.

    ``patience`` is the share of the host's benefit below which an SSD is passed over; 0 is the
    paper's "SSD until saturated". Equal ratios go to the larger storage, then to the earlier row.
    """
    heap = [(0.0, 0, 0) for _ in range(0)]
    if pressure.highest.max() <= 0:
        return
    for row in range(len(candidates)):
        ratio = _evaluate(candidates, choice, channels, pressure, row, patience)
        if ratio > 0.0:
            heap.append((-ratio, -candidates[row].num_bytes, row))
    heapq.heapify(heap)
    while len(heap) > 0:
        key, size, row = heapq.heappop(heap)
        offer = choice.periods[row]
        if offer.device != NOT_CHOSEN or -key != offer.ratio:
            continue
        rival = (0.0, 0, 0) if len(heap) == 0 else heap[0]
        offer.ratio = _highest_ratio(candidates, choice, pressure, row)
        if (-offer.ratio, size, row) < rival:
            _evaluate(candidates, choice, channels, pressure, row, patience)
        if offer.ratio <= 0.0:
            continue
        if (-offer.ratio, size, row) > rival:
            heapq.heappush(heap, (-offer.ratio, size, row))
            continue
        clean_until = _take(candidates, choice, channels, pressure, row)
        _renew_siblings(candidates, choice, channels, pressure, row, clean_until, patience, heap)
        if pressure.highest.max() <= 0:
            break


@numba.njit(cache=True)
def _renew_siblings(
    candidates: Candidates,
    choice: Choice,
    channels: Reservations,
    pressure: Pressure,
    row: int,
    clean_until: int,
    patience: float,
    heap: list[tuple[float, int, int]],
) -> None:
    """Periods of the same version got cheaper: the only case in which a ratio rises."""
    sibling = candidates[row].next_sibling
    while sibling >= 0 and candidates[sibling].position < clean_until:
        offer = choice.periods[sibling]
        if offer.device == NOT_CHOSEN:
            before = offer.ratio
            ratio = _evaluate(candidates, choice, channels, pressure, sibling, patience)
            if ratio != before and ratio > 0.0:
                heapq.heappush(heap, (-ratio, -candidates[sibling].num_bytes, sibling))
        sibling = candidates[sibling].next_sibling
