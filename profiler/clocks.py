"""How long kernels run and how long the device waits between them, without the recorder's own time.

On a CPU an operator's time is the call's. On a GPU see :mod:`teraio.profiler.cuda_clock`.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Protocol

import numpy as np

from teraio.contracts.table import FloatArray


class SegmentTimes(Protocol):
    """Times of one segment's kernels."""

    def durations_and_gaps_seconds(self, operators: Sequence[str]) -> tuple[FloatArray, FloatArray]:
        """Duration of each kernel and idle time before it, float64 (kernels,) each."""

    def release(self) -> None:
        """These times will not be read (again)."""


class Clock(Protocol):
    """Times kernels one after another."""

    def exclude(self, seconds: float) -> None:
        """The recorder spent this time on itself since the last kernel: it is no gap."""

    def start(self) -> None:
        """A kernel starts now."""

    def stop(self) -> float:
        """It has ended, or was launched; returns the time now in seconds."""

    def cancel(self) -> None:
        """The kernel that was started has failed and counts as none."""

    def take(self) -> SegmentTimes:
        """The times since the last call."""


class HostTimes:
    """Start, end and bookkeeping seconds of each kernel; ``end_before`` of the one before."""

    def __init__(
        self, starts: list[float], ends: list[float], own: list[float], end_before: float
    ) -> None:
        self._starts, self._ends, self._own = starts, ends, own
        self._end_before = end_before

    def durations_and_gaps_seconds(self, operators: Sequence[str]) -> tuple[FloatArray, FloatArray]:
        """See :class:`SegmentTimes`."""
        starts, ends = np.array(self._starts), np.array(self._ends)
        before = np.r_[self._end_before, ends[:-1]]
        gaps: FloatArray = np.maximum(starts - before - np.array(self._own), 0.0)
        return ends - starts, gaps

    def release(self) -> None:
        """Nothing is held."""


class HostClock:
    """Wall time around operator calls: the kernels' own time where they run when called."""

    def __init__(self) -> None:
        self._last_end = perf_counter()
        self._bookkeeping_seconds = 0.0
        self._reset()

    def _reset(self) -> None:
        self._end_before = self._last_end
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._own: list[float] = []

    def exclude(self, seconds: float) -> None:
        """See :class:`Clock`."""
        self._bookkeeping_seconds += seconds

    def start(self) -> None:
        """See :class:`Clock`."""
        self._own.append(self._bookkeeping_seconds)
        self._bookkeeping_seconds = 0.0
        self._starts.append(perf_counter())

    def stop(self) -> float:
        """See :class:`Clock`."""
        self._last_end = perf_counter()
        self._ends.append(self._last_end)
        return self._last_end

    def cancel(self) -> None:
        """See :class:`Clock`."""
        del self._starts[-1], self._own[-1]

    def take(self) -> HostTimes:
        """See :class:`Clock`."""
        times = HostTimes(self._starts, self._ends, self._own, self._end_before)
        self._reset()
        return times


def make_clock(device_type: str) -> Clock:
    """The clock for a device type."""
    if device_type != "cuda":
        return HostClock()
    from teraio.profiler.cuda_clock import CudaClock

    return CudaClock()
