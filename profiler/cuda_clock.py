"""Kernel times on a GPU: an event before and after each kernel, read after the recording.

Nothing synchronises inside an iteration. Three effects of watching are taken out again. An event
takes time of its own on the stream: measured once. Where the device had caught up with the host,
the first event passes long before its kernel is launched: the launch is no kernel time. And the
recorder slows the host down, so that the device waits where it would not have waited: the gaps are
those of a host that launches at its own pace, followed through the iteration.

Events cost the device more than anything else that the recorder does, and a model has few distinct
kernels. So only the first few of a kind get events in each segment; the rest are given the median
of their kind.

Where the device sets the pace, the sum was within 1 % of an unwatched iteration in fp32 (H200,
Llamas of 0.7 and 3.4 billion parameters), and 5 % below it in bf16, where training draws all the
power that there is. Where the host sets it, the sum is up to twice as long: a Python dispatch mode
also slows down what lies between operators. :mod:`teraio.profiler.pace` sets both right.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Sequence
from functools import cache
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from teraio.contracts.table import BoolArray, FloatArray
from teraio.profiler.clocks import HostClock, HostTimes

_WAITING_SECONDS = 8e-6
"""Time between two kernels from which the device must have run out of work."""

TIMED_PER_KIND = 6
"""Kernels of one kind that get events in each segment."""

SYNCHRONISING = {"aten._local_scalar_dense.default", "aten.nonzero.default"}
"""Operators after which the host has waited for the device."""


class CudaTimes:
    """Pairs of events of the kernels that got some, read on demand.

    ``kinds`` and ``is_timed`` speak of all kernels; ``event_before`` is the end of the kernel
    before the first, if that had one.
    """

    def __init__(
        self,
        events: list[Any],
        kinds: list[Hashable],
        is_timed: list[bool],
        host: HostTimes,
        event_before: Any,
        pool: list[Any],
    ) -> None:
        self._events, self._kinds, self._is_timed = events, kinds, is_timed
        self._host, self._event_before, self._pool = host, event_before, pool

    def durations_and_gaps_seconds(self, operators: Sequence[str]) -> tuple[FloatArray, FloatArray]:
        """See :class:`teraio.profiler.clocks.SegmentTimes`. Waits for the device."""
        if not self._events:
            return np.zeros(0), np.zeros(0)
        self._events[-1].synchronize()
        launch, host_gaps = self._host.durations_and_gaps_seconds(operators)
        synchronises = np.array([operator in SYNCHRONISING for operator in operators])
        timed = np.flatnonzero(self._is_timed)
        starts, ends = self._events[::2], self._events[1::2]
        durations = np.zeros(len(operators))
        durations[timed] = _elapsed_seconds(starts, ends) - event_overhead_seconds()
        launched_late = np.zeros(len(operators), dtype=bool)
        launched_late[timed] = self._was_waiting(timed, starts, ends)
        launched_late &= ~synchronises
        durations[launched_late] -= launch[launched_late]
        durations = fill_by_kind(np.maximum(durations, 0.0), self._kinds, self._is_timed)
        return durations, follow_host(durations, launch, host_gaps, synchronises)

    def _was_waiting(
        self, timed: NDArray[np.int64], starts: Sequence[Any], ends: Sequence[Any]
    ) -> BoolArray:
        """Whether the device idled before each timed kernel; unknown after an untimed one: no."""
        before: list[Any] = [self._event_before, *ends[:-1]]
        follows = np.r_[timed[0] == 0 and self._event_before is not None, np.diff(timed) == 1]
        pairs = [b if is_next else s for b, s, is_next in zip(before, starts, follows, strict=True)]
        result: BoolArray = _elapsed_seconds(pairs, starts) > _WAITING_SECONDS
        return result

    def release(self) -> None:
        """Give the events back, except the last, which the next segment's first gap needs."""
        self._pool.extend(self._events[:-1])
        self._events = []


class CudaClock:
    """Events around operators on the current stream of one device."""

    def __init__(self) -> None:
        self._pool: list[Any] = []
        self._event_before: Any = None
        self._reset()
        self._host = HostClock()
        self._device = torch.cuda.current_device()
        self._stream: Any = torch.cuda.current_stream()

    def _reset(self) -> None:
        self._events: list[Any] = []
        self._kinds: list[Hashable] = []
        self._is_timed: list[bool] = []
        self._num_timed: dict[Hashable, int] = {}

    @property
    def stream(self) -> int:
        """See :class:`teraio.profiler.clocks.Clock`."""
        return int(self._stream.stream_id)

    def pass_view(self) -> None:
        """See :class:`teraio.profiler.clocks.Clock`."""
        self._host.pass_view()

    def exclude(self, seconds: float) -> None:
        """See :class:`teraio.profiler.clocks.Clock`."""
        self._host.exclude(seconds)

    def start(self, kind: Hashable) -> None:
        """See :class:`teraio.profiler.clocks.Clock`."""
        began = perf_counter()
        if torch._C._cuda_getCurrentStream(self._device)[0] != self._stream.stream_id:
            self._stream = torch.cuda.current_stream()
        num_timed = self._num_timed.get(kind, 0)
        is_timed = num_timed < TIMED_PER_KIND
        self._kinds.append(kind)
        self._is_timed.append(is_timed)
        if is_timed:
            self._num_timed[kind] = num_timed + 1
            self._record()
        self._host.exclude(perf_counter() - began)
        self._host.start(kind)

    def stop(self) -> float:
        """See :class:`teraio.profiler.clocks.Clock`."""
        now = self._host.stop()
        if self._is_timed[-1]:
            self._record()
        return now

    def cancel(self) -> None:
        """See :class:`teraio.profiler.clocks.Clock`."""
        kind = self._kinds.pop()
        if self._is_timed.pop():
            self._num_timed[kind] -= 1
            self._pool.append(self._events.pop())
        self._host.cancel()

    def _record(self) -> None:
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        self._events.append(event)

    def take(self) -> CudaTimes:
        """See :class:`teraio.profiler.clocks.Clock`; refills the pool for as many kernels again."""
        events, before = self._events, self._event_before
        kinds, is_timed = self._kinds, self._is_timed
        self._event_before = events[-1] if is_timed and is_timed[-1] else None
        self._reset()
        missing = len(events) - len(self._pool)
        self._pool.extend(torch.cuda.Event(enable_timing=True) for _ in range(missing))
        return CudaTimes(events, kinds, is_timed, self._host.take(), before, self._pool)


def fill_by_kind(
    durations: FloatArray, kinds: Sequence[Hashable], is_timed: Sequence[bool]
) -> FloatArray:
    """Durations in seconds, float64 (kernels,): those of untimed kernels are their kind's median.

    Every kind has a timed kernel, since the first of each is timed.
    """
    of_kind: dict[Hashable, list[float]] = {}
    for kind, timed, seconds in zip(kinds, is_timed, durations.tolist(), strict=True):
        if timed:
            of_kind.setdefault(kind, []).append(seconds)
    medians = {kind: statistics.median(values) for kind, values in of_kind.items()}
    return np.array(
        [
            seconds if timed else medians[kind]
            for kind, timed, seconds in zip(kinds, is_timed, durations.tolist(), strict=True)
        ]
    )


def follow_host(
    durations: FloatArray, launch: FloatArray, host_gaps: FloatArray, synchronises: BoolArray
) -> FloatArray:
    """Idle time before each kernel on a device that is fed by a host of its own pace.

    All in seconds, float64 (kernels,): the kernels' durations, the host's time to launch each and
    its time between launches. After a kernel that ``synchronises`` the host waits for the device.
    The lag between the two at the end of an iteration is where the next begins.
    """
    columns = (durations, launch, host_gaps, synchronises)
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    gaps: list[float] = []
    host = device = 0.0
    for _ in range(2):
        host, device = 0.0, max(device - host, 0.0)
        gaps.clear()
        for duration, launched, gap, waits in rows:
            host += gap if waits else gap + launched
            start = max(device, host)
            gaps.append(start - device)
            device = start + duration
            if waits:
                host = device
    return np.array(gaps)


@cache
def event_overhead_seconds() -> float:
    """How much longer a kernel seems when it stands between two events."""
    count, repeats = 100, 3
    x = torch.zeros(1, device="cuda")
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * count)]
    x.add_(0)
    overheads = []
    for _ in range(repeats):
        alone = _queued_seconds(lambda: [x.add_(0) for _ in range(count)]) / count
        _queued_seconds(lambda: [(a.record(), x.add_(0), b.record()) for a, b in _pairs(events)])
        between = [a.elapsed_time(b) * 1e-3 for a, b in _pairs(events)]
        overheads.append(float(np.median(between)) - alone)
    return max(0.0, float(np.median(overheads)))


def _pairs(events: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(events[::2], events[1::2], strict=True))


def _queued_seconds(launch: Any) -> float:
    """Time that the device takes for work that was queued up while it was kept busy."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(20_000_000)
    first.record()
    launch()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) * 1e-3


def _elapsed_seconds(starts: Sequence[Any], ends: Sequence[Any]) -> FloatArray:
    pairs = zip(starts, ends, strict=True)
    return np.array([start.elapsed_time(end) * 1e-3 for start, end in pairs])
