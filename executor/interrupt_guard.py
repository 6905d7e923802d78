"""Ctrl-C between kernels, not inside the executor's own steps.

An interrupt in the middle of issuing a transfer would leave a copy under way that nobody knows of.
So SIGINT waits for the end of the kernel under way; a second one does not wait, because the first
may be waiting for a device that has died.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from teraio.executor.mode import ExecutorMode
from teraio.profiler.storages import StorageRegistry


class InterruptGuard:
    """Replaces Python's handler of SIGINT for the time of a run in the main thread."""

    def __init__(self, host: ExecutorMode) -> None:
        self._host = host
        self._original: Any = None

    def start(self) -> None:
        """Take over the signal; nothing in other threads, which never see it."""
        original = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(original):
            self._original = original
            signal.signal(signal.SIGINT, self._handle)

    def stop(self) -> None:
        """Give it back; an interrupt that still waits takes effect now."""
        if self._original is None:
            return
        original, self._original = self._original, None
        signal.signal(signal.SIGINT, original)
        self._host.deliver_interrupt()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        host, original = self._host, self._original
        must_wait = host.lock_is_mine() or _is_in_notice_of_death(frame)
        if must_wait and host.interrupt is None:
            host.interrupt = lambda: original(number, None)
        else:
            host.interrupt = None
            original(number, frame)


def _is_in_notice_of_death(frame: FrameType | None) -> bool:
    """Whether a storage is just dying, of which Python swallows what is raised."""
    while frame is not None:
        if frame.f_code is StorageRegistry._reference_died.__code__:
            return True
        frame = frame.f_back
    return False
