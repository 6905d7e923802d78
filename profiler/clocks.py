"""How long kernels run and how long the device waits between them, without the recorder's own time.

On a CPU an operator's time is the call's. On a GPU see :mod:`teraio.profiler.cuda_clock`.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Sequence
from functools import cache
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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

    def pass_view(self) -> None:
        """An operator that is no kernel has been dispatched since the last one."""

    def start(self, kind: Hashable) -> None:
        """A kernel starts now; kernels of one kind take the same time."""

    def stop(self) -> float:
        """It has ended, or was launched; returns the time now in seconds."""

    def cancel(self) -> None:
        """The kernel that was started has failed and counts as none."""

    def take(self) -> SegmentTimes:
        """The times since the last call."""

    @property
    def stream(self) -> int:
        """Which stream the last kernel was started on."""


class HostTimes:
    """Start, end and bookkeeping seconds of each kernel, dispatches since the one before.

    ``end_before``: the end of the kernel before the first.
    """

    def __init__(
        self,
        starts: list[float],
        ends: list[float],
        own: list[float],
        dispatches: list[int],
        end_before: float,
    ) -> None:
        self._starts, self._ends, self._own = starts, ends, own
        self._dispatches = dispatches
        self._end_before = end_before

    def durations_and_gaps_seconds(self, operators: Sequence[str]) -> tuple[FloatArray, FloatArray]:
        """See :class:`SegmentTimes`."""
        starts, ends = np.array(self._starts), np.array(self._ends)
        before = np.r_[self._end_before, ends[:-1]]
        own = np.array(self._own) + np.array(self._dispatches) * dispatch_overhead_seconds()
        gaps: FloatArray = np.maximum(starts - before - own, 0.0)
        return ends - starts, gaps

    def release(self) -> None:
        """Nothing is held."""


class HostClock:
    """Wall time around operator calls: the kernels' own time where they run when called."""

    def __init__(self) -> None:
        self._last_end = perf_counter()
        self._bookkeeping_seconds = 0.0
        self._views = 0
        self._reset()

    def _reset(self) -> None:
        self._end_before = self._last_end
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._own: list[float] = []
        self._dispatches: list[int] = []

    @property
    def stream(self) -> int:
        """See :class:`Clock`."""
        return 0

    def pass_view(self) -> None:
        """See :class:`Clock`."""
        self._views += 1

    def exclude(self, seconds: float) -> None:
        """See :class:`Clock`."""
        self._bookkeeping_seconds += seconds

    def start(self, kind: Hashable) -> None:
        """See :class:`Clock`; every kernel is timed."""
        self._own.append(self._bookkeeping_seconds)
        self._bookkeeping_seconds = 0.0
        self._dispatches.append(self._views + 1)
        self._views = 0
        self._starts.append(perf_counter())

    def stop(self) -> float:
        """See :class:`Clock`."""
        self._last_end = perf_counter()
        self._ends.append(self._last_end)
        return self._last_end

    def cancel(self) -> None:
        """See :class:`Clock`."""
        del self._starts[-1], self._own[-1], self._dispatches[-1]

    def take(self) -> HostTimes:
        """See :class:`Clock`."""
        times = HostTimes(self._starts, self._ends, self._own, self._dispatches, self._end_before)
        self._reset()
        return times


class NoTimes:
    """Times of kernels that never ran: 0 throughout."""

    def durations_and_gaps_seconds(self, operators: Sequence[str]) -> tuple[FloatArray, FloatArray]:
        """See :class:`SegmentTimes`."""
        return np.zeros(len(operators)), np.zeros(len(operators))

    def release(self) -> None:
        """Nothing is held."""


class NoClock:
    """For operators that compute nothing: how long they take says nothing of a kernel."""

    stream = 0

    def exclude(self, seconds: float) -> None:
        """See :class:`Clock`."""

    def pass_view(self) -> None:
        """See :class:`Clock`."""

    def start(self, kind: Hashable) -> None:
        """See :class:`Clock`."""

    def stop(self) -> float:
        """See :class:`Clock`."""
        return perf_counter()

    def cancel(self) -> None:
        """See :class:`Clock`."""

    def take(self) -> NoTimes:
        """See :class:`Clock`."""
        return NoTimes()


class _PassingMode(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@cache
def dispatch_overhead_seconds() -> float:
    """What the way through a dispatch mode costs an operator, whatever the mode does."""
    x = torch.zeros(1)
    pairs = []
    for _ in range(5):
        plain = _seconds_per_operator(x)
        with _PassingMode():  # type: ignore[no-untyped-call]
            _seconds_per_operator(x)
            pairs.append(_seconds_per_operator(x) - plain)
    return max(0.0, statistics.median(pairs))


def _seconds_per_operator(x: torch.Tensor) -> float:
    count = 200
    began = perf_counter()
    for _ in range(count):
        x.neg()
    return (perf_counter() - began) / count


def make_clock(device_type: str) -> Clock:
    """The clock for a device type."""
    if device_type != "cuda":
        return HostClock()
    from teraio.profiler.cuda_clock import CudaClock

    return CudaClock()
