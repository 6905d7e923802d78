"""Bounce buffers: while some pieces travel between memory and buffer, others are on the disk.

On a GPU the copy of a piece takes a third of a millisecond, but may have to wait for its turn
beside copies of other streams. So nothing is awaited before its buffer is needed again: the disk
works on, also for the transfers that come next, and all copies that wait are made together.

    write: queue's thread asks for the copy -> disk's thread awaits it and writes
    read:  queue's thread orders the read -> disk's thread reads -> a third one asks for the copy
"""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Protocol

import torch

from teraio.executor.stores.arena import Arena
from teraio.executor.stores.base import round_up
from teraio.executor.stores.block_file import BlockFile
from teraio.executor.stores.queues import Await, ThreadTransfer, thread_prefix
from teraio.executor.stores.striping import Piece, Stripes
from teraio.executor.stores.worker import Worker

LEAST_BUFFERS_PER_FILE = 2
"""Of each direction: one is on the disk while the other travels."""

Start = Callable[[int, ThreadTransfer, Piece], "Future[Await]"]
"""Starts what one piece needs, with a buffer at a place."""


class Copier(Protocol):
    """Copies between device memory and a bounce buffer; each is awaited, also after an error."""

    def fill(self, buffer_offset: int, transfer: ThreadTransfer, begin: int, end: int) -> Await:
        """Bring bytes ``begin`` .. ``end`` of the source into the buffer at ``buffer_offset``."""
        ...

    def drain(self, buffer_offset: int, transfer: ThreadTransfer, begin: int, end: int) -> Await:
        """Bring them from the buffer into the destination."""
        ...


class MemoryCopier:
    """CPU memory: a plain copy, which releases the interpreter and has ended on return."""

    def __init__(self, arena: Arena) -> None:
        self._address = arena.address

    def fill(self, buffer_offset: int, transfer: ThreadTransfer, begin: int, end: int) -> Await:
        """See :class:`Copier`."""
        source = transfer.buffer.data_ptr() + begin
        ctypes.memmove(self._address + buffer_offset, source, end - begin)
        return already_ended

    def drain(self, buffer_offset: int, transfer: ThreadTransfer, begin: int, end: int) -> Await:
        """See :class:`Copier`."""
        destination = transfer.buffer.data_ptr() + begin
        ctypes.memmove(destination, self._address + buffer_offset, end - begin)
        return already_ended


def already_ended() -> None:
    """The copy ended when it was made."""


class CudaCopier:
    """GPU memory: copies on this direction's own stream, in order."""

    def __init__(self, arena: Arena) -> None:
        self._bytes = arena.tensor
        self._stream = torch.cuda.Stream()

    def fill(self, buffer_offset: int, transfer: ThreadTransfer, begin: int, end: int) -> Await:
        """See :class:`Copier`."""
        bounce = self._bytes[buffer_offset : buffer_offset + end - begin]
        return self._copy(bounce, transfer.buffer[begin:end])

    def drain(self, buffer_offset: int, transfer: ThreadTransfer, begin: int, end: int) -> Await:
        """See :class:`Copier`."""
        bounce = self._bytes[buffer_offset : buffer_offset + end - begin]
        return self._copy(transfer.buffer[begin:end], bounce)

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> Await:
        # The queue has waited for the compute that the transfer follows.
        ended = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
            ended.record()
        return ended.synchronize


class Staging:
    """One direction of a file device: bounce buffers in turn, and a thread for each of its files.

    Pieces are at most one stripe unit; the last one of a transfer is padded to whole blocks. Only
    one thread calls :meth:`write` or :meth:`read`.
    """

    def __init__(
        self,
        files: Sequence[BlockFile],
        stripes: Stripes,
        device_type: str,
        label: str,
        buffers_per_file: int = LEAST_BUFFERS_PER_FILE,
    ) -> None:
        is_cuda = device_type == "cuda"
        self._files = files
        self._stripes = stripes
        self._alignment_bytes = files[0].alignment_bytes
        num_buffers = buffers_per_file * len(files)
        self._arena = Arena(num_buffers * stripes.unit_bytes, pinned=is_cuda)
        self._view = self._arena.view
        self._copier: Copier = CudaCopier(self._arena) if is_cuda else MemoryCopier(self._arena)
        gpu = torch.cuda.current_device() if is_cuda else None
        prefix = thread_prefix(label)
        self._disks = [Worker(f"{prefix}disk{member}", gpu) for member in range(len(files))]
        self._copies = Worker(f"{prefix}copies", gpu)
        self._user_of_buffer: list[Future[Await] | None] = [None] * num_buffers
        self._next_buffer = 0

    @property
    def pinned_bytes(self) -> int:
        """Host memory of the bounce buffers."""
        return self._arena.mapped_bytes

    def write(self, transfer: ThreadTransfer, begin: int, end: int) -> Await:
        """Begin to bring bytes ``begin`` .. ``end`` to the files. Raises StoreError."""
        return self._begin(self._start_write, transfer, begin, end)

    def read(self, transfer: ThreadTransfer, begin: int, end: int) -> Await:
        """Begin to bring bytes ``begin`` .. ``end`` from the files. Raises StoreError."""
        return self._begin(self._start_read, transfer, begin, end)

    def close(self) -> None:
        """End the threads and give the buffers back; the queue has ended before."""
        for worker in (*self._disks, self._copies):
            worker.close()
        self._user_of_buffer.clear()
        self._view.release()
        del self._copier
        self._arena.close()

    def _begin(self, start: Start, transfer: ThreadTransfer, begin: int, end: int) -> Await:
        """Start each piece as soon as a buffer is free for it, unless one before it has failed."""
        jobs: list[Future[Await]] = []
        try:
            for piece in self._stripes.pieces(transfer.offset_bytes, begin, end):
                place = self._free_place()
                if transfer.has_failed:
                    break
                job = self._user_of_buffer[self._next_buffer] = start(place, transfer, piece)
                self._next_buffer = (self._next_buffer + 1) % len(self._user_of_buffer)
                jobs.append(job)
        except BaseException:
            with suppress(Exception):
                _await_all(jobs)
            raise
        return partial(_await_all, jobs)

    def _free_place(self) -> int:
        """Where the next buffer begins, once nothing uses it any more."""
        user = self._user_of_buffer[self._next_buffer]
        if user is not None:
            with suppress(Exception):  # Whoever awaits its transfer gets the error.
                user.result()()
        return self._next_buffer * self._stripes.unit_bytes

    def _start_write(self, place: int, transfer: ThreadTransfer, piece: Piece) -> Future[Await]:
        filled = self._copier.fill(place, transfer, piece.begin, piece.end)
        return self._disks[piece.member].submit(
            partial(self._write_blocks, place, transfer, piece, filled)
        )

    def _start_read(self, place: int, transfer: ThreadTransfer, piece: Piece) -> Future[Await]:
        there = self._disks[piece.member].submit(partial(self._read_blocks, place, transfer, piece))
        return self._copies.submit(partial(self._drain, there, place, transfer, piece))

    def _write_blocks(
        self, place: int, transfer: ThreadTransfer, piece: Piece, filled: Await
    ) -> Await:
        filled()
        with _noting_failure(transfer):
            self._files[piece.member].write(self._blocks(place, piece), piece.member_offset)
        return already_ended

    def _read_blocks(self, place: int, transfer: ThreadTransfer, piece: Piece) -> Await:
        with _noting_failure(transfer):
            self._files[piece.member].read(self._blocks(place, piece), piece.member_offset)
        return already_ended

    def _drain(
        self, there: Future[Await], place: int, transfer: ThreadTransfer, piece: Piece
    ) -> Await:
        there.result()
        return self._copier.drain(place, transfer, piece.begin, piece.end)

    def _blocks(self, place: int, piece: Piece) -> memoryview:
        size = round_up(piece.end - piece.begin, self._alignment_bytes)
        return self._view[place : place + size]


@contextmanager
def _noting_failure(transfer: ThreadTransfer) -> Iterator[None]:
    try:
        yield
    except BaseException:
        transfer.has_failed = True
        raise


def _await_all(jobs: Sequence[Future[Await]]) -> None:
    """Also after an error, so that nothing is under way any more. Raises the first one."""
    first: Exception | None = None
    for job in jobs:
        try:
            job.result()()
        except Exception as failure:
            # Buffers of jobs are kept until it is their turn again; memory must not be.
            traceback.clear_frames(failure.__traceback__)
            first = first or failure
    if first is not None:
        raise first
