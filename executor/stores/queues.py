"""Queues served by threads: transfers between CPU memory or files and a store.

One thread per direction begins transfers, in order. What is still under way when a move returns, a
second thread awaits, so that the next transfer is on its way meanwhile. All state is guarded by one
condition, on which threads and waiting hosts sleep; copies run outside it and release the
interpreter.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from teraio.errors import StoreError
from teraio.executor.stores.base import MAX_CHUNK_BYTES

Await = Callable[[], None]
"""Returns when what was begun has ended. Raises StoreError if it failed."""

Move = Callable[["ThreadTransfer", int, int], Await | None]
"""Copies bytes ``begin`` .. ``end`` of a transfer. What has not arrived when it returns, the wait
that it returns is for; None where everything has."""


class _Begun(NamedTuple):
    """A transfer of which something is still under way, and what went wrong before that."""

    transfer: ThreadTransfer
    awaits: list[Await]
    error: StoreError | None


class ThreadTransfer:
    """A transfer that a thread carries out; see :class:`teraio.executor.stores.base.Transfer`.

    ``has_failed``: a part of it has, so the rest need not be begun.
    """

    def __init__(
        self,
        condition: threading.Condition,
        buffer: torch.Tensor,
        offset_bytes: int,
        *,
        is_write: bool,
        is_urgent: bool,
        after: torch.cuda.Event | None,
    ) -> None:
        self.is_write = is_write
        self.is_urgent = is_urgent
        self.offset_bytes = offset_bytes
        self.nbytes = buffer.numel()
        self.after = after
        self.start_seconds = float("nan")
        self.end_seconds = float("nan")
        self.predecessors: list[ThreadTransfer] = []
        self.error: StoreError | None = None
        self.has_failed = False
        self._buffer: torch.Tensor | None = buffer
        self._condition = condition
        self._done = False

    @property
    def buffer(self) -> torch.Tensor:
        """Device memory, uint8 (nbytes,), until the transfer is done."""
        if self._buffer is None:
            raise StoreError("transfer: its buffer was given back when it ended")
        return self._buffer

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done

    def wait(self) -> None:
        """Block until it has ended. Raises StoreError if the bytes did not arrive."""
        if not self._done:
            with self._condition:
                self._condition.wait_for(lambda: self._done)
        if self.error is not None:
            raise self.error

    def make_stream_wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Block the host: a thread's work cannot be put into a stream before it has been done."""
        self.wait()

    def finish(self, error: StoreError | None) -> None:
        """Mark the end and let go of the buffer. The caller holds the condition."""
        self.end_seconds = time.perf_counter()
        self.error = error
        self.predecessors = []
        self._buffer = None
        self.after = None
        self._done = True

    def overlaps(self, other: ThreadTransfer) -> bool:
        """Whether both touch a byte."""
        return (
            self.offset_bytes < other.offset_bytes + other.nbytes
            and other.offset_bytes < self.offset_bytes + self.nbytes
        )

    def covers(self, other: ThreadTransfer) -> bool:
        """Whether every byte of ``other`` is one of this transfer's."""
        return (
            self.offset_bytes <= other.offset_bytes
            and other.offset_bytes + other.nbytes <= self.offset_bytes + self.nbytes
        )

    def inherited_error(self) -> StoreError | None:
        """The error of a write that this read's bytes come from; None if they were all written."""
        error = None
        if not self.is_write:
            for write in self.predecessors:
                if write.error is not None or write.covers(self):
                    error = write.error
        return error


class ThreadQueues:
    """Two queues, ``read`` and ``write``. Of each, one thread begins transfers in the order of
    issue, and another awaits what is not done by then.
    """

    def __init__(self, name: str, move: Move, chunk_bytes: int = MAX_CHUNK_BYTES) -> None:
        self._name = name
        self._move = move
        self._chunk_bytes = chunk_bytes
        self._condition = threading.Condition()
        self._normal: dict[bool, deque[ThreadTransfer]] = {False: deque(), True: deque()}
        self._urgent: dict[bool, deque[ThreadTransfer]] = {False: deque(), True: deque()}
        # In order of issue: unfinished transfers, failed writes whose bytes nothing has replaced as
        # a whole, and the writes that have replaced a part of them.
        self._outstanding: list[ThreadTransfer] = []
        self._is_closing = False
        self._begun: dict[bool, queue.SimpleQueue[_Begun | None]] = {
            False: queue.SimpleQueue(),
            True: queue.SimpleQueue(),
        }
        self._threads = [
            threading.Thread(
                target=target,
                args=(is_write,),
                daemon=True,
                name=f"{thread_prefix(name)}{kind}{end}",
            )
            for target, end in ((self._serve_queue, ""), (self._end_begun, "-end"))
            for kind, is_write in (("read", False), ("write", True))
        ]
        for thread in self._threads:
            thread.start()

    def issue(
        self,
        buffer: torch.Tensor,
        offset_bytes: int,
        *,
        is_write: bool,
        is_urgent: bool,
        after: torch.cuda.Event | None,
    ) -> ThreadTransfer:
        """Append a transfer to its direction's queue. Raises StoreError if closed."""
        transfer = ThreadTransfer(
            self._condition,
            buffer,
            offset_bytes,
            is_write=is_write,
            is_urgent=is_urgent,
            after=after,
        )
        with self._condition:
            if self._is_closing:
                raise StoreError(f"{self._name}: the store is closed")
            self._prune()
            transfer.predecessors = [
                earlier
                for earlier in self._outstanding
                if (earlier.is_write or is_write) and earlier.overlaps(transfer)
            ]
            self._outstanding.append(transfer)
            (self._urgent if is_urgent else self._normal)[is_write].append(transfer)
            self._condition.notify_all()
        return transfer

    def close(self) -> None:
        """Serve what is queued, then end the threads."""
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()

    def owns_current_thread(self) -> bool:
        """Whether one of the threads that serve this device is asking, of its disks too."""
        return threading.current_thread().name.startswith(thread_prefix(self._name))

    def _prune(self) -> None:
        kept: list[ThreadTransfer] = []
        for transfer in self._outstanding:
            if not transfer.done or (transfer.is_write and transfer.error is not None):
                kept.append(transfer)
            elif transfer.is_write:
                kept = [x for x in kept if x.error is None or not transfer.covers(x)]
                # It made good a part of what failed; the rest is bad still.
                if any(x.error is not None and x.overlaps(transfer) for x in kept):
                    kept.append(transfer)
        self._outstanding = kept

    def _serve_queue(self, is_write: bool) -> None:
        for transfer in self._arrivals(is_write):
            self._serve(transfer)
            del transfer
        self._begun[is_write].put(None)

    def _end_begun(self, is_write: bool) -> None:
        """Await what has been begun, in that order."""
        began_before = ended_before = 0.0
        while True:
            begun = self._begun[is_write].get()
            if begun is None:
                return
            began = begun.transfer.start_seconds
            if began >= began_before:
                # What it waited for while the one before was on its way is not its own time.
                begun.transfer.start_seconds = max(began, ended_before)
            self._end(begun)
            began_before, ended_before = began, begun.transfer.end_seconds
            del begun  # While it sleeps, it keeps nobody's memory.

    def _end(self, begun: _Begun) -> None:
        transfer, awaits, error = begun
        first: StoreError | None = None
        if transfer.after is not None:
            torch.cuda.set_device(transfer.buffer.device)
        for await_part in awaits:
            try:
                await_part()
            except Exception as failure:
                first = first or _as_store_error(failure, self._name)
        self._finish(transfer, first or error)

    def _arrivals(self, is_write: bool) -> Iterator[ThreadTransfer]:
        """Urgent transfers first; then the head, once what it must follow has ended."""
        normal = self._normal[is_write]
        while True:
            with self._condition:
                transfer = self._take_urgent(is_write)
                while transfer is None:
                    if normal and _is_ready(normal[0]):
                        transfer = normal.popleft()
                        break
                    if self._is_closing and not normal and not self._urgent[is_write]:
                        return
                    self._condition.wait()
                    transfer = self._take_urgent(is_write)
            yield transfer
            del transfer

    def _take_urgent(self, is_write: bool) -> ThreadTransfer | None:
        urgent = self._urgent[is_write]
        for transfer in urgent:
            if _is_ready(transfer):
                urgent.remove(transfer)
                return transfer
        return None

    def _serve(self, transfer: ThreadTransfer) -> None:
        transfer.start_seconds = time.perf_counter()
        error = transfer.inherited_error()
        awaits: list[Await] = []
        try:
            if transfer.after is not None:
                # A thread's GPU is the first one until it says otherwise.
                torch.cuda.set_device(transfer.buffer.device)
                # Here, not where it was issued: the training thread runs ahead of the GPU.
                transfer.after.synchronize()
                transfer.start_seconds = time.perf_counter()
            if error is None:
                self._move_in_chunks(transfer, awaits)
        except Exception as failure:  # A thread has no caller: whoever waits gets the error.
            error = _as_store_error(failure, self._name)
        if awaits:
            self._begun[transfer.is_write].put(_Begun(transfer, awaits, error))
        else:
            self._finish(transfer, error)

    def _finish(self, transfer: ThreadTransfer, error: StoreError | None) -> None:
        with self._condition:
            transfer.finish(error)
            self._condition.notify_all()

    def _move_in_chunks(self, transfer: ThreadTransfer, awaits: list[Await]) -> None:
        for begin in range(0, transfer.nbytes, self._chunk_bytes):
            if transfer.has_failed:
                return
            if begin > 0 and not transfer.is_urgent:
                self._serve_urgent(transfer.is_write)
            end = min(begin + self._chunk_bytes, transfer.nbytes)
            await_chunk = self._move(transfer, begin, end)
            if await_chunk is not None:
                awaits.append(await_chunk)

    def _serve_urgent(self, is_write: bool) -> None:
        while True:
            with self._condition:
                transfer = self._take_urgent(is_write)
            if transfer is None:
                return
            self._serve(transfer)


def thread_prefix(name: str) -> str:
    """What names of threads that serve the device ``name`` begin with."""
    return f"teraio-{name}-"


def _as_store_error(failure: Exception, name: str) -> StoreError:
    # Its frames hold the buffer, which must not live as long as the error does.
    traceback.clear_frames(failure.__traceback__)
    if isinstance(failure, StoreError):
        return failure
    error = StoreError(f"{name}: transfer failed: {failure}")
    error.__cause__ = failure
    return error


def _is_ready(transfer: ThreadTransfer) -> bool:
    return all(earlier.done for earlier in transfer.predecessors)
