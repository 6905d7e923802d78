"""Stand-in kernels on a GPU: a spinning kernel of calibrated length, between two events.

The spin counts clock cycles, and a GPU's clock changes: the length is calibrated when the replay
begins and again after its warm-up, from the events of all kernels; ``error`` says what it came to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from teraio.executor.holding import Wait
from teraio.executor.replaying.memory_traffic import MemoryTraffic

_NOT_YET = float("nan"), float("nan")
_CALIBRATION_CYCLES = (20_000, 200_000)
_CALIBRATION_KERNELS = 100
_HEAD_START_CYCLES = 50_000_000
"""A first kernel long enough that the host has issued all others before it ends."""

_MOST_AHEAD = 256
"""Kernels that the host may issue ahead. A full launch queue would block it, and with it the
interpreter, which the threads that serve files need too."""

_KEPT_ITERATIONS = 9
"""As many as the log keeps in detail, and the one under way."""


class PlayedKernel(NamedTuple):
    """A kernel, the events around it, and the seconds that it was to take."""

    kernel: int
    start: torch.cuda.Event
    end: torch.cuda.Event
    seconds: float


class DeviceKernels:
    """Plays kernels on the current stream; the host only issues them.

    What is shorter than a launch is carried on to the kernels that follow, so that the total is
    right. ``iterations``: the kernels of the newest iterations, oldest first.
    """

    def __init__(self, traffic: MemoryTraffic | None) -> None:
        self._traffic = traffic
        self._owed_seconds = 0.0
        self._newest: deque[torch.cuda.Event] = deque(maxlen=_MOST_AHEAD)
        self.iterations: deque[list[PlayedKernel]] = deque(maxlen=_KEPT_ITERATIONS)
        self._launch_seconds, self._cycles_per_second = _calibrate()

    def begin_iteration(self) -> None:
        self.iterations.append([])

    def idle(self, seconds: float) -> None:
        self._spin(seconds)

    def run(
        self,
        kernel: int,
        seconds: float,
        num_bytes: float,
        waits: Sequence[Wait],
        work: Callable[[], None],
    ) -> tuple[float, float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        left = seconds
        if self._traffic is not None:
            left -= self._traffic.move(num_bytes, seconds)
        self._spin(left)
        end.record()
        self.iterations[-1].append(PlayedKernel(kernel, start, end, seconds))
        if len(self._newest) == _MOST_AHEAD:
            self._newest[0].synchronize()
        self._newest.append(end)
        return _NOT_YET

    def error(self, iteration: int = -1) -> float:
        """Measured time of an iteration's kernels over the wanted one, minus 1; waits for it."""
        played = self.iterations[iteration]
        if not played:
            return 0.0
        played[-1].end.synchronize()
        wanted = sum(one.seconds for one in played)
        measured = sum(one.start.elapsed_time(one.end) for one in played) / 1e3
        return measured / wanted - 1 if wanted > 0 else 0.0

    def recalibrate(self) -> None:
        """Go by the clock of the newest iteration; its kernels must have done nothing but spin."""
        self._cycles_per_second /= 1 + self.error()

    def _spin(self, seconds: float) -> None:
        self._owed_seconds += seconds
        spun = self._owed_seconds - self._launch_seconds
        if spun > 0:
            torch.cuda._sleep(int(spun * self._cycles_per_second))
            self._owed_seconds = 0.0


def _calibrate() -> tuple[float, float]:
    """(seconds of a launch with its events, cycles per second)."""
    few, many = (_seconds_per_kernel(cycles) for cycles in _CALIBRATION_CYCLES)
    cycles_per_second = (_CALIBRATION_CYCLES[1] - _CALIBRATION_CYCLES[0]) / (many - few)
    return max(few - _CALIBRATION_CYCLES[0] / cycles_per_second, 0.0), cycles_per_second


def _seconds_per_kernel(cycles: int) -> float:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_CALIBRATION_KERNELS + 1)]
    torch.cuda._sleep(_HEAD_START_CYCLES)
    for event in events:
        event.record()
        torch.cuda._sleep(cycles)
    torch.cuda.current_stream().synchronize()
    return float(events[0].elapsed_time(events[-1])) / 1e3 / _CALIBRATION_KERNELS
