"""Bounce buffers: while some pieces travel between memory and buffer, others are on the disk.

On a GPU the copy of a piece takes a third of a millisecond, but may have to wait for its turn:
while copies of the host tier follow each other without a gap, an H200 was seen to serve another
stream's copies every 67 ms only. So nothing is awaited before its buffer is needed again: the disk
works on, also for the transfers that come next, and all copies that wait are made together.

    write: queue's thread asks for the copy -> disk's thread awaits it and writes
    read:  queue's thread orders the read -> disk's thread reads -> a third one asks for the copy
"""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Protocol

import torch

from teraio.executor.stores.arena import Arena
from teraio.executor.stores.base import round_up
from teraio.executor.stores.block_file import BlockFile
from teraio.executor.stores.queues import ThreadTransfer, Wait, thread_prefix
from teraio.executor.stores.striping import Piece, Stripes

LEAST_BUFFERS_PER_FILE = 2
"""Of each direction: one is on the disk while the other travels."""


class Copier(Protocol):
    """Copies between device memory and a bounce buffer; each is awaited, also after an error."""

    def fill(self, buffer_offset: int, transfer: ThreadTransfer, begin: int, end: int) -> Wait:
        """Bring bytes ``begin`` .. ``end`` of the source into the buffer at ``buffer_offset``."""
        ...

    def drain(self, buffer_offset: int, transfer: ThreadTransfer, begin: int, end: int) -> Wait:
        """Bring them from the buffer into the destination."""
        ...


class MemoryCopier:
    """CPU memory: a plain copy, which releases the interpreter and has ended on return."""

    def __init__(self, arena: Arena) -> None:
        self._address = arena.address

    def fill(self, buffer_offset: int, transfer: ThreadTransfer, begin: int, end: int) -> Wait:
        """See :class:`Copier`."""
        source = transfer.buffer.data_ptr() + begin
        ctypes.memmove(self._address + buffer_offset, source, end - begin)
        return nothing_left

    def drain(self, buffer_offset: int, transfer: ThreadTransfer, begin: int, end: int) -> Wait:
        """See :class:`Copier`."""
        destination = transfer.buffer.data_ptr() + begin
        ctypes.memmove(destination, self._address + buffer_offset, end - begin)
        return nothing_left


def nothing_left() -> None:
    """The copy ended when it was made."""


class CudaCopier:
    """GPU memory: copies on this direction's own stream, in order."""

    def __init__(self, arena: Arena) -> None:
        self._bytes = arena.tensor
        self._stream = torch.cuda.Stream()

    def fill(self, buffer_offset: int, transfer: ThreadTransfer, begin: int, end: int) -> Wait:
        """See :class:`Copier`."""
        bounce = self._bytes[buffer_offset : buffer_offset + end - begin]
        return self._copy(bounce, transfer.buffer[begin:end])

    def drain(self, buffer_offset: int, transfer: ThreadTransfer, begin: int, end: int) -> Wait:
        """See :class:`Copier`."""
        bounce = self._bytes[buffer_offset : buffer_offset + end - begin]
        return self._copy(transfer.buffer[begin:end], bounce)

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> Wait:
        # The queue has waited for the compute that the transfer follows.
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
            ended = torch.cuda.Event()
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
        *,
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
        self._disks = [
            ThreadPoolExecutor(1, thread_name_prefix=f"{thread_prefix(label)}disk{member}")
            for member in range(len(files))
        ]
        self._copies = ThreadPoolExecutor(1, thread_name_prefix=f"{thread_prefix(label)}copies")
        self._users: list[Future[Wait] | None] = [None] * num_buffers
        self._turn = 0

    @property
    def pinned_bytes(self) -> int:
        """Host memory of the bounce buffers."""
        return self._arena.mapped_bytes

    def write(self, transfer: ThreadTransfer, begin: int, end: int) -> Wait:
        """Begin to bring bytes ``begin`` .. ``end`` to the files. Raises StoreError."""

        def start(place: int, piece: Piece) -> Future[Wait]:
            filled = self._copier.fill(place, transfer, piece.begin, piece.end)
            return self._disks[piece.member].submit(self._write_blocks, place, piece, filled)

        return self._begin(self._stripes.pieces(transfer.offset_bytes, begin, end), start)

    def read(self, transfer: ThreadTransfer, begin: int, end: int) -> Wait:
        """Begin to bring bytes ``begin`` .. ``end`` from the files. Raises StoreError."""

        def start(place: int, piece: Piece) -> Future[Wait]:
            there = self._disks[piece.member].submit(self._read_blocks, place, piece)
            return self._copies.submit(self._drain, there, place, transfer, piece)

        return self._begin(self._stripes.pieces(transfer.offset_bytes, begin, end), start)

    def close(self) -> None:
        """End the threads and give the buffers back; the queue has ended before."""
        for threads in (*self._disks, self._copies):
            threads.shutdown()
        self._users.clear()
        self._view.release()
        del self._copier
        self._arena.close()

    def _begin(self, pieces: Sequence[Piece], start: Callable[[int, Piece], Future[Wait]]) -> Wait:
        """Start each piece as soon as a buffer is free for it, unless one before it has failed."""
        jobs: list[Future[Wait]] = []
        try:
            for piece in pieces:
                place = self._free_place()
                if _has_failed(jobs):
                    break
                job = self._users[self._turn] = start(place, piece)
                self._turn = (self._turn + 1) % len(self._users)
                jobs.append(job)
        except BaseException:
            with suppress(Exception):
                _await_all(jobs)
            raise
        return partial(_await_all, jobs)

    def _free_place(self) -> int:
        """Where the next buffer begins, once nothing uses it any more."""
        user = self._users[self._turn]
        if user is not None:
            with suppress(Exception):  # Whoever awaits its transfer gets the error.
                user.result()()
        return self._turn * self._stripes.unit_bytes

    def _write_blocks(self, place: int, piece: Piece, filled: Wait) -> Wait:
        filled()
        self._files[piece.member].write(self._blocks(place, piece), piece.member_offset)
        return nothing_left

    def _read_blocks(self, place: int, piece: Piece) -> None:
        self._files[piece.member].read(self._blocks(place, piece), piece.member_offset)

    def _drain(
        self, there: Future[None], place: int, transfer: ThreadTransfer, piece: Piece
    ) -> Wait:
        there.result()
        return self._copier.drain(place, transfer, piece.begin, piece.end)

    def _blocks(self, place: int, piece: Piece) -> memoryview:
        size = round_up(piece.end - piece.begin, self._alignment_bytes)
        return self._view[place : place + size]


def _has_failed(jobs: Sequence[Future[Wait]]) -> bool:
    """Whether one has ended with an error: then the rest of the transfer is of no use."""
    return any(job.done() and job.exception() is not None for job in jobs)


def _await_all(jobs: Sequence[Future[Wait]]) -> None:
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
