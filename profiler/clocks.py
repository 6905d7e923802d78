"""How long kernels run and how long the device waits between them, without the recorder's own time.

On a CPU an operator's time is the call's. On a GPU it is the difference of two events on its
stream; events are read only after the recording, so that nothing synchronises inside an iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch

from teraio.contracts.table import FloatArray


class SegmentTimes(Protocol):
    """Times of one segment's kernels."""

    def durations_and_gaps_seconds(self) -> tuple[FloatArray, FloatArray]:
        """Duration of each kernel and idle time before it, float64 (kernels,) each."""

    def release(self) -> None:
        """These times will not be read (again)."""


class CpuTimes:
    """Start, end and bookkeeping seconds of each kernel; ``end_before`` of the one before."""

    def __init__(
        self, starts: list[float], ends: list[float], own: list[float], end_before: float
    ) -> None:
        self._starts, self._ends, self._own = starts, ends, own
        self._end_before = end_before

    def durations_and_gaps_seconds(self) -> tuple[FloatArray, FloatArray]:
        """See :class:`SegmentTimes`."""
        starts, ends = np.array(self._starts), np.array(self._ends)
        before = np.r_[self._end_before, ends[:-1]]
        gaps: FloatArray = np.maximum(starts - before - np.array(self._own), 0.0)
        return ends - starts, gaps

    def release(self) -> None:
        """Nothing is held."""


class CpuClock:
    """Wall time around operators that run when called."""

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
        """The recorder spent this time on itself since the last kernel: it is no gap."""
        self._bookkeeping_seconds += seconds

    def start(self) -> None:
        """A kernel starts now."""
        self._own.append(self._bookkeeping_seconds)
        self._bookkeeping_seconds = 0.0
        self._starts.append(perf_counter())

    def stop(self) -> float:
        """It has ended; returns the time now in seconds."""
        self._last_end = perf_counter()
        self._ends.append(self._last_end)
        return self._last_end

    def cancel(self) -> None:
        """The kernel that was started has failed and counts as none."""
        del self._starts[-1], self._own[-1]

    def take(self) -> CpuTimes:
        """The times since the last call."""
        times = CpuTimes(self._starts, self._ends, self._own, self._end_before)
        self._reset()
        return times


class CudaTimes:
    """Pairs of events of each kernel, read on demand."""

    def __init__(
        self, events: list[Any], own: list[float], end_before: Any, pool: list[Any]
    ) -> None:
        self._events, self._own, self._end_before, self._pool = events, own, end_before, pool

    def durations_and_gaps_seconds(self) -> tuple[FloatArray, FloatArray]:
        """See :class:`SegmentTimes`. Waits for the device."""
        if not self._events:
            return np.zeros(0), np.zeros(0)
        self._events[-1].synchronize()
        starts, ends = self._events[::2], self._events[1::2]
        before: Sequence[Any] = [self._end_before or starts[0], *ends[:-1]]
        durations = _elapsed_seconds(starts, ends)
        gaps: FloatArray = _elapsed_seconds(before, starts) - np.array(self._own)
        return durations, np.maximum(gaps, 0.0)

    def release(self) -> None:
        """Give the events back, except the last, which the next segment's first gap needs."""
        self._pool.extend(self._events[:-1])
        self._events = []


class CudaClock:
    """Events around operators on the current stream of one device."""

    def __init__(self) -> None:
        self._pool: list[Any] = []
        self._events: list[Any] = []
        self._own: list[float] = []
        self._end_before: Any = None
        self._bookkeeping_seconds = 0.0

    def exclude(self, seconds: float) -> None:
        """Time that the host lost to the recorder: a gap no longer than it is none."""
        self._bookkeeping_seconds += seconds

    def start(self) -> None:
        """A kernel is about to be launched."""
        self._own.append(self._bookkeeping_seconds)
        self._bookkeeping_seconds = 0.0
        self._record()

    def stop(self) -> float:
        """It has been launched; returns the host's time in seconds."""
        self._record()
        return perf_counter()

    def cancel(self) -> None:
        """The kernel that was started has failed and counts as none."""
        self._pool.append(self._events.pop())
        del self._own[-1]

    def _record(self) -> None:
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def take(self) -> CudaTimes:
        """The times since the last call; the pool is filled for as many kernels again."""
        events, own, before = self._events, self._own, self._end_before
        self._end_before = events[-1] if events else before
        self._events, self._own = [], []
        missing = len(events) - len(self._pool)
        self._pool.extend(torch.cuda.Event(enable_timing=True) for _ in range(missing))
        return CudaTimes(events, own, before, self._pool)


Clock = CpuClock | CudaClock


def make_clock(device_type: str) -> Clock:
    """The clock for a device type."""
    return CudaClock() if device_type == "cuda" else CpuClock()


def _elapsed_seconds(starts: Sequence[Any], ends: Sequence[Any]) -> FloatArray:
    pairs = zip(starts, ends, strict=True)
    return np.array([start.elapsed_time(end) * 1e-3 for start, end in pairs])
