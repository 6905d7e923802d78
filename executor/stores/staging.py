"""Bounce buffers: while one piece travels between memory and buffer, another is on the disk."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Protocol

import torch

from teraio.executor.stores.arena import Arena
from teraio.executor.stores.base import round_up
from teraio.executor.stores.block_file import BlockFile
from teraio.executor.stores.queues import ThreadTransfer
from teraio.executor.stores.striping import Piece, Stripes

BUFFERS_PER_FILE = 2
"""Of each direction: one is on the disk while the other travels."""


class Copier(Protocol):
    """Copies between device memory and a bounce buffer; both methods return when it has ended."""

    def fill(self, buffer_offset: int, transfer: ThreadTransfer, begin: int, end: int) -> None:
        """Bring bytes ``begin`` .. ``end`` of the source into the buffer at ``buffer_offset``."""
        ...

    def drain(self, buffer_offset: int, transfer: ThreadTransfer, begin: int, end: int) -> None:
        """Bring them from the buffer into the destination."""
        ...


class MemoryCopier:
    """CPU memory: a plain copy, which releases the interpreter."""

    def __init__(self, arena: Arena) -> None:
        self._address = arena.address

    def fill(self, buffer_offset: int, transfer: ThreadTransfer, begin: int, end: int) -> None:
        """See :class:`Copier`."""
        source = transfer.buffer.data_ptr() + begin
        ctypes.memmove(self._address + buffer_offset, source, end - begin)

    def drain(self, buffer_offset: int, transfer: ThreadTransfer, begin: int, end: int) -> None:
        """See :class:`Copier`."""
        destination = transfer.buffer.data_ptr() + begin
        ctypes.memmove(destination, self._address + buffer_offset, end - begin)


class CudaCopier:
    """GPU memory: a copy on this direction's own stream, awaited by the queue's thread."""

    def __init__(self, arena: Arena) -> None:
        self._bytes = arena.tensor
        self._stream = torch.cuda.Stream()

    def fill(self, buffer_offset: int, transfer: ThreadTransfer, begin: int, end: int) -> None:
        """See :class:`Copier`."""
        bounce = self._bytes[buffer_offset : buffer_offset + end - begin]
        self._copy(bounce, transfer.buffer[begin:end])

    def drain(self, buffer_offset: int, transfer: ThreadTransfer, begin: int, end: int) -> None:
        """See :class:`Copier`."""
        bounce = self._bytes[buffer_offset : buffer_offset + end - begin]
        self._copy(transfer.buffer[begin:end], bounce)

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        # The queue has waited for the compute that the transfer follows.
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
        self._stream.synchronize()


class Staging:
    """One direction of a file device: bounce buffers, and a thread for each of its files.

    Pieces are at most one stripe unit; the last one of a transfer is padded to whole blocks.
    """

    def __init__(
        self, files: Sequence[BlockFile], stripes: Stripes, device_type: str, label: str
    ) -> None:
        is_cuda = device_type == "cuda"
        self._files = files
        self._stripes = stripes
        self._num_buffers = BUFFERS_PER_FILE * len(files)
        self._alignment_bytes = files[0].alignment_bytes
        self._arena = Arena(self._num_buffers * stripes.unit_bytes, pinned=is_cuda)
        self._view = self._arena.view
        self._copier: Copier = CudaCopier(self._arena) if is_cuda else MemoryCopier(self._arena)
        self._disks = [
            ThreadPoolExecutor(1, thread_name_prefix=f"teraio-{label}-disk{member}")
            for member in range(len(files))
        ]

    @property
    def pinned_bytes(self) -> int:
        """Host memory of the bounce buffers."""
        return self._arena.mapped_bytes

    def write(self, transfer: ThreadTransfer, begin: int, end: int) -> None:
        """Bring bytes ``begin`` .. ``end`` to the files. Raises StoreError."""
        pieces = self._stripes.pieces(transfer.offset_bytes, begin, end)
        if len(pieces) == 1:
            self._copier.fill(0, transfer, begin, end)
            self._write_blocks(0, pieces[0])
            return
        with self._disk_jobs() as jobs:
            for index, piece in enumerate(pieces):
                if index >= self._num_buffers:
                    jobs[index - self._num_buffers].result()
                self._copier.fill(self._place(index), transfer, piece.begin, piece.end)
                jobs.append(self._disks[piece.member].submit(self._write_blocks, index, piece))
            for job in jobs[-self._num_buffers :]:
                job.result()

    def read(self, transfer: ThreadTransfer, begin: int, end: int) -> None:
        """Bring bytes ``begin`` .. ``end`` from the files. Raises StoreError."""
        pieces = self._stripes.pieces(transfer.offset_bytes, begin, end)
        if len(pieces) == 1:
            self._read_blocks(0, pieces[0])
            self._copier.drain(0, transfer, begin, end)
            return
        with self._disk_jobs() as jobs:
            for index in range(len(pieces) + self._num_buffers):
                arrived = index - self._num_buffers
                if 0 <= arrived < len(pieces):
                    jobs[arrived].result()
                    piece = pieces[arrived]
                    self._copier.drain(self._place(arrived), transfer, piece.begin, piece.end)
                if index < len(pieces):
                    disk = self._disks[pieces[index].member]
                    jobs.append(disk.submit(self._read_blocks, index, pieces[index]))

    def close(self) -> None:
        """End the threads and give the buffers back; the queue has ended before."""
        for disk in self._disks:
            disk.shutdown()
        self._view.release()
        del self._copier
        self._arena.close()

    @contextmanager
    def _disk_jobs(self) -> Iterator[list[Future[None]]]:
        jobs: list[Future[None]] = []
        try:
            yield jobs
        finally:
            # Also after an error: nothing may still use a buffer when the next transfer fills it.
            wait(jobs)

    def _place(self, index: int) -> int:
        return index % self._num_buffers * self._stripes.unit_bytes

    def _write_blocks(self, index: int, piece: Piece) -> None:
        self._files[piece.member].write(self._blocks(index, piece), piece.member_offset)

    def _read_blocks(self, index: int, piece: Piece) -> None:
        self._files[piece.member].read(self._blocks(index, piece), piece.member_offset)

    def _blocks(self, index: int, piece: Piece) -> memoryview:
        size = round_up(piece.end - piece.begin, self._alignment_bytes)
        return self._view[self._place(index) : self._place(index) + size]
