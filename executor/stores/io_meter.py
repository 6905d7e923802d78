"""What a file has been asked to do, and how fast it was."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class FileUse:
    """One file of an SSD device over a run.

    ``path`` is the folder it lies in (the file has no name), ``backend`` what served it: ``gds``,
    ``gds-compat`` (kvikio without GPUDirect), ``file`` or ``file buffered`` (O_DIRECT was refused).
    Seconds are those in which at least one request of the direction was under way.
    """

    device: str
    path: str
    backend: str
    read_bytes: int
    read_seconds: float
    write_bytes: int
    write_seconds: float

    @property
    def read_rate(self) -> float | None:
        """Bytes per second while it was read, None if it never was."""
        return self.read_bytes / self.read_seconds if self.read_seconds > 0 else None

    @property
    def write_rate(self) -> float | None:
        """Bytes per second while it was written, None if it never was."""
        return self.write_bytes / self.write_seconds if self.write_seconds > 0 else None


class IoMeter:
    """Bytes and busy time of one direction of a file; any thread may count.

    Requests overlap, so time is counted while any is under way, not per request.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.seconds = 0.0
        self._lock = threading.Lock()
        self._under_way = 0
        self._since = 0.0

    def begin(self) -> None:
        """A request starts."""
        with self._lock:
            if self._under_way == 0:
                self._since = time.perf_counter()
            self._under_way += 1

    def end(self, nbytes: int) -> None:
        """A request has ended; ``nbytes``: what it moved, 0 if it failed."""
        with self._lock:
            self._under_way -= 1
            self.nbytes += nbytes
            if self._under_way == 0:
                self.seconds += time.perf_counter() - self._since

    @contextmanager
    def counting(self, nbytes: int) -> Iterator[None]:
        """A request of ``nbytes`` for the time of the block; nothing was moved if that raises."""
        self.begin()
        moved = 0
        try:
            yield
            moved = nbytes
        finally:
            self.end(moved)


class FileMeter:
    """Both directions of one file."""

    def __init__(self) -> None:
        self.read = IoMeter()
        self.write = IoMeter()

    def of(self, *, is_write: bool) -> IoMeter:
        """The meter of a direction."""
        return self.write if is_write else self.read

    def use(self, device: str, path: str, backend: str) -> FileUse:
        """What has been counted so far."""
        return FileUse(
            device=device,
            path=path,
            backend=backend,
            read_bytes=self.read.nbytes,
            read_seconds=self.read.seconds,
            write_bytes=self.write.nbytes,
            write_seconds=self.write.seconds,
        )
