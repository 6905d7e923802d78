"""When transfers end if each device serves its queue in order, as early as it may.

One direction of all devices together: they share the link by max-min fairness, as in the simulator.
Reads that are to end as late as possible are the same thing on a clock that runs backwards.
"""

from __future__ import annotations

import numba
import numpy as np

from teraio.contracts.table import BoolArray, FloatArray, IntArray

_LAPS = 2
"""Iterations played, so that what the first leaves over delays the second, as in training."""


def end_seconds(
    release_seconds: FloatArray,
    num_bytes: IntArray,
    device: IntArray,
    *,
    rates: FloatArray,
    link_rate: float,
    latency_seconds: FloatArray,
    iteration_seconds: float,
) -> FloatArray:
    """End of each transfer, float64 (transfers,), on the axis of ``release_seconds``.

    Each device serves its transfers in order of release, cyclically. ``rates`` (bytes per second)
    and ``latency_seconds`` are per device.
    """
    # An iteration that takes no time has no laps.
    lap = np.floor(release_seconds / (iteration_seconds or np.inf))
    within = release_seconds - lap * iteration_seconds
    order = np.lexsort((within, device))
    bounds = np.searchsorted(device[order], np.arange(len(rates) + 1))
    # Latency holds the channel as so many bytes would.
    size = num_bytes[order] + latency_seconds[device[order]] * rates[device[order]]
    ends = np.empty(len(order))
    _serve(within[order], size, bounds, rates, link_rate, iteration_seconds, ends)
    result = np.empty(len(order))
    result[order] = ends
    return result + lap * iteration_seconds


@numba.njit(cache=True)
def _serve(
    release: FloatArray,
    size: FloatArray,
    bounds: IntArray,
    rates: FloatArray,
    link_rate: float,
    iteration_seconds: float,
    ends: FloatArray,
) -> None:
    """Queue d is the entries from bounds[d] to bounds[d + 1]; the last lap's ends are kept."""
    num_devices = len(rates)
    place = bounds[:-1].copy()
    lap = np.zeros(num_devices, dtype=np.int64)
    left = np.zeros(num_devices)
    speed = np.zeros(num_devices)
    is_active = np.zeros(num_devices, dtype=np.bool_)
    now = 0.0
    while True:
        until = np.inf
        for d in range(num_devices):
            if is_active[d] or bounds[d] == bounds[d + 1] or lap[d] == _LAPS:
                continue
            begin = release[place[d]] + lap[d] * iteration_seconds
            if begin <= now:
                is_active[d] = True
                left[d] = size[place[d]]
            else:
                until = min(until, begin)
        _share(rates, link_rate, is_active, speed)
        first = -1
        for d in range(num_devices):
            if is_active[d] and now + left[d] / speed[d] < until:
                until = now + left[d] / speed[d]
                first = d
        if until == np.inf:
            return
        for d in range(num_devices):
            if is_active[d]:
                left[d] -= speed[d] * (until - now)
        now = until
        if first >= 0:
            is_active[first] = False
            ends[place[first]] = now - lap[first] * iteration_seconds
            place[first] += 1
            if place[first] == bounds[first + 1]:
                place[first] = bounds[first]
                lap[first] += 1


@numba.njit(cache=True)
def _share(rates: FloatArray, link_rate: float, is_active: BoolArray, speed: FloatArray) -> None:
    """Max-min fair speeds of the active devices behind one link."""
    num_left = 0
    for d in range(len(rates)):
        speed[d] = 0.0
        num_left += is_active[d]
    rate_left = link_rate
    while num_left > 0:
        share = rate_left / num_left
        slowest = -1
        for d in range(len(rates)):
            if is_active[d] and speed[d] == 0.0 and (slowest < 0 or rates[d] < rates[slowest]):
                slowest = d
        speed[slowest] = min(rates[slowest], share)
        rate_left -= speed[slowest]
        num_left -= 1
