"""Reservations of channels on the ideal timeline, in bins of time (paper, section 3.3).

Each bin can carry a number of bytes per device and direction. An offload takes what is free from
its release on; a prefetch takes what is free backwards from its deadline. Devices behind one link
share it, both directions of a device share its duplex limits, and without GPUDirect Storage an SSD
transfer uses host memory twice. All limits are linear: with w and r bytes per second each way,
``w / W + r (1 - W' / W) / R' <= 1`` is the line from (W, 0) to (W', R'), duplex rates primed.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from teraio.contracts.hardware import Hardware, Rates
from teraio.contracts.table import FloatArray, IntArray
from teraio.traces.lifetimes import kernel_starts_seconds
from teraio.traces.trace import Trace

READ, WRITE = 0, 1

NOT_FOUND = -1
"""Bin that means: no room for this transfer within the range."""


class TimeBins(NamedTuple):
    """Kernels grouped into bins of time: ``bin_of_kernel`` int64 (K,), ``first_kernel`` int64
    (bins + 1,) and ``seconds`` float64 (bins,) of the ideal timeline.
    """

    bin_of_kernel: IntArray
    first_kernel: IntArray
    seconds: FloatArray


class Reservations(NamedTuple):
    """What is booked, in bytes, and the limits; all are arrays so that compiled code takes them.

    Rows of ``booked`` (rows, 2, bins) and ``skip`` (devices, 2, bins + 1) are devices, host first;
    the last row of ``booked``, ``rate`` (rows, 2) and ``disturbance`` (rows, 2) is the link.
    ``starts`` (bins + 1,) are the bins' starts in seconds. ``rate`` is in bytes/s; ``disturbance``
    in seconds of this direction lost per byte of the other. ``skip`` points past bins that are
    full. ``latency`` (devices, 2) is in bytes not sent.
    """

    seconds: FloatArray
    starts: FloatArray
    booked: FloatArray
    skip: IntArray
    rate: FloatArray
    disturbance: FloatArray
    latency: FloatArray
    memory_booked: FloatArray
    memory_rate: FloatArray
    memory_weight: FloatArray

    def copy(self) -> Reservations:
        """An independent copy."""
        return self._replace(
            booked=self.booked.copy(),
            skip=self.skip.copy(),
            memory_booked=self.memory_booked.copy(),
        )


def time_bins(trace: Trace, max_bins: int) -> TimeBins:
    """One bin per kernel if ``max_bins`` allows, else kernels grouped to about equal time."""
    num_kernels = trace.num_kernels
    starts = kernel_starts_seconds(trace)
    bin_of_kernel = np.arange(num_kernels)
    if num_kernels > max_bins and starts[-1] > 0:
        coarse = np.minimum(starts[:-1] / starts[-1] * max_bins, max_bins - 1).astype(np.int64)
        bin_of_kernel = np.unique(coarse, return_inverse=True)[1].reshape(-1)
    first_kernel = np.flatnonzero(np.diff(bin_of_kernel, prepend=-1))
    first_kernel = np.r_[first_kernel, num_kernels]
    return TimeBins(bin_of_kernel, first_kernel, np.diff(starts[first_kernel]))


def open_reservations(
    bins: TimeBins, hardware: Hardware, rank: int, rate_factor: float
) -> Reservations:
    """Nothing booked yet, on the channels of one rank with rates times ``rate_factor``."""
    devices = (hardware.host, *hardware.ssds_of_rank(rank))
    link = hardware.link_of_rank(rank)
    rows = (*devices, link)
    num_bins = len(bins.seconds)
    rate = rate_factor * np.array([[row.read_rate, row.write_rate] for row in rows])
    latency = np.array([[d.latency_seconds + link.latency_seconds] * 2 for d in devices])
    weight = [1.0] + [0.0 if ssd.gds else 2.0 for ssd in hardware.ssds_of_rank(rank)]
    # Finite, because infinity times a bin of no time is no number.
    memory_rate = hardware.host.memory_rate or 1e30
    skip = np.tile(np.arange(num_bins + 1), (len(devices), 2, 1))
    return Reservations(
        seconds=bins.seconds,
        starts=np.r_[0.0, np.cumsum(bins.seconds)],
        booked=np.zeros((len(rows), 2, num_bins)),
        skip=skip,
        rate=rate,
        disturbance=np.array([_disturbance(row) for row in rows]) / rate_factor,
        latency=latency * rate[:-1],
        memory_booked=np.zeros(num_bins),
        memory_rate=np.array([memory_rate * rate_factor]),
        memory_weight=np.array(weight),
    )


def _disturbance(rates: Rates) -> list[float]:
    return [
        (1 - rates.duplex_read_rate / rates.read_rate) / rates.duplex_write_rate,
        (1 - rates.duplex_write_rate / rates.write_rate) / rates.duplex_read_rate,
    ]


@numba.njit(cache=True)
def free_bytes(channels: Reservations, device: int, direction: int, index: int) -> float:
    """Bytes that a direction of a device can still carry in a bin."""
    seconds = channels.seconds[index]
    other = 1 - direction
    free = np.inf
    for row in (device, len(channels.rate) - 1):
        here = channels.booked[row, direction, index]
        there = channels.booked[row, other, index]
        rate = channels.rate[row, direction]
        free = min(free, rate * (seconds - there * channels.disturbance[row, direction]) - here)
        loss = channels.disturbance[row, other]
        if loss > 0:
            free = min(free, (seconds - there / channels.rate[row, other]) / loss - here)
    weight = channels.memory_weight[device]
    if weight > 0:
        limit = channels.memory_rate[0] * seconds
        free = min(free, (limit - channels.memory_booked[index]) / weight)
    return free


@numba.njit(cache=True)
def find_offload_end(
    channels: Reservations, device: int, first: int, last: int, num_bytes: float
) -> int:
    """First bin in [first, last], unrolled, in which an offload released at ``first`` has ended."""
    num_bins = len(channels.seconds)
    skip = channels.skip[device, WRITE]
    remaining = num_bytes + channels.latency[device, WRITE]
    index = first
    while index <= last:
        wrapped = index % num_bins
        step = skip[wrapped] - wrapped
        if step > 0:
            # Halve the way for the next search, as in a union-find structure.
            if skip[wrapped] < num_bins:
                skip[wrapped] = skip[skip[wrapped]]
            index += step
            continue
        free = free_bytes(channels, device, WRITE, wrapped)
        if free < 1.0:
            skip[wrapped] = wrapped + 1
            continue
        remaining -= free
        if remaining <= 0.0:
            return index
        index += 1
    return NOT_FOUND


@numba.njit(cache=True)
def find_prefetch_start(
    channels: Reservations, device: int, first: int, last: int, num_bytes: float
) -> int:
    """Last bin in [first, last], unrolled, from which a prefetch still ends within ``last``."""
    num_bins = len(channels.seconds)
    skip = channels.skip[device, READ]
    remaining = num_bytes + channels.latency[device, READ]
    index = last
    while index >= first:
        # Backwards, ``skip`` is read from the end: full bins are passed in the other direction.
        mirrored = num_bins - 1 - index % num_bins
        step = skip[mirrored] - mirrored
        if step > 0:
            if skip[mirrored] < num_bins:
                skip[mirrored] = skip[skip[mirrored]]
            index -= step
            continue
        free = free_bytes(channels, device, READ, index % num_bins)
        if free < 1.0:
            skip[mirrored] = mirrored + 1
            continue
        remaining -= free
        if remaining <= 0.0:
            return index
        index -= 1
    return NOT_FOUND


@numba.njit(cache=True)
def book_offload(
    channels: Reservations, device: int, first: int, last: int, num_bytes: float
) -> None:
    """Take the bytes that :func:`find_offload_end` found, bin by bin from ``first``."""
    remaining = num_bytes + channels.latency[device, WRITE]
    for index in range(first, last + 1):
        if remaining <= 0.0:
            break
        wrapped = index % len(channels.seconds)
        taken = min(remaining, max(0.0, free_bytes(channels, device, WRITE, wrapped)))
        _book(channels, device, WRITE, wrapped, taken)
        remaining -= taken


@numba.njit(cache=True)
def book_prefetch(
    channels: Reservations, device: int, first: int, last: int, num_bytes: float
) -> None:
    """Take the bytes that :func:`find_prefetch_start` found, bin by bin back from ``last``."""
    remaining = num_bytes + channels.latency[device, READ]
    for index in range(last, first - 1, -1):
        if remaining <= 0.0:
            break
        wrapped = index % len(channels.seconds)
        taken = min(remaining, max(0.0, free_bytes(channels, device, READ, wrapped)))
        _book(channels, device, READ, wrapped, taken)
        remaining -= taken


@numba.njit(cache=True)
def _book(
    channels: Reservations, device: int, direction: int, index: int, num_bytes: float
) -> None:
    channels.booked[device, direction, index] += num_bytes
    channels.booked[len(channels.rate) - 1, direction, index] += num_bytes
    channels.memory_booked[index] += num_bytes * channels.memory_weight[device]
