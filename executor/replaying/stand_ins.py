"""Stand-ins for kernels: work that takes the time of the trace, on a CPU or on a GPU."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from teraio.executor.holding import Wait
from teraio.executor.replaying.memory_traffic import MemoryTraffic

_COARSEST_SLEEP_SECONDS = 300e-6
"""A sleep may end so much too late; what is left is waited for actively."""

_BLOCKING_SECONDS = 100e-6
"""A wait this long was for a transfer; a shorter one found it done."""

_SWITCH_SECONDS = 200e-6
"""Threads that move bytes get their turn this often while the main thread waits actively."""


class StandIns(Protocol):
    """Plays kernels and the gaps between them, in the order of the calls."""

    def begin_iteration(self) -> None:
        """Kernel 0 comes next."""
        ...

    def idle(self, seconds: float) -> None:
        """The gap before a kernel."""
        ...

    def run(
        self,
        kernel: int,
        seconds: float,
        num_bytes: float,
        waits: Sequence[Wait],
        work: Callable[[], None],
    ) -> tuple[float, float]:
        """One kernel that accesses ``num_bytes``, after ``waits`` for its storages; ``work`` is
        done in its time.

        Start and end on the clock of ``time.perf_counter``; NaN where they are known later.
        """
        ...


class HostKernels:
    """On a CPU a kernel is time that passes on the main thread.

    The host's own work between kernels is made up for: what comes late is cut off the kernels and
    gaps that follow, up to the next wait for a transfer. Beyond that an iteration takes longer,
    which is its host stall.
    """

    def __init__(self, traffic: MemoryTraffic | None) -> None:
        self._traffic = traffic
        self._due = time.perf_counter()

    def begin_iteration(self) -> None:
        self._due = time.perf_counter()

    def idle(self, seconds: float) -> None:
        self._due += seconds
        _wait_until(self._due)

    def run(
        self,
        kernel: int,
        seconds: float,
        num_bytes: float,
        waits: Sequence[Wait],
        work: Callable[[], None],
    ) -> tuple[float, float]:
        self._due = max(self._due, _blocked_until(waits))
        start = time.perf_counter()
        work()
        self._due += seconds
        if self._traffic is not None:
            self._traffic.move(num_bytes, seconds)
            self._due = max(self._due, time.perf_counter())
        _wait_until(self._due)
        return start, time.perf_counter()


def _blocked_until(waits: Iterable[Wait]) -> float:
    return max(
        (w.end_seconds for w in waits if w.end_seconds - w.start_seconds > _BLOCKING_SECONDS),
        default=0.0,
    )


def _wait_until(due: float) -> None:
    left = due - time.perf_counter()
    if left > _COARSEST_SLEEP_SECONDS:
        time.sleep(left - _COARSEST_SLEEP_SECONDS)
    while time.perf_counter() < due:
        pass


@contextmanager
def quick_switching() -> Iterator[None]:
    """Inside, a thread that waits actively keeps others waiting for less than a millisecond."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(min(interval, _SWITCH_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
