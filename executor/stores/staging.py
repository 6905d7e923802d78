"""Bounce buffers: while one piece travels between memory and buffer, another is on the disk."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Protocol

import torch

from teraio.executor.stores.arena import Arena
from teraio.executor.stores.base import round_up
from teraio.executor.stores.block_file import BlockFile
from teraio.executor.stores.queues import ThreadTransfer

_BUFFERS = 2


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
        self._copy(bounce, transfer.buffer[begin:end], transfer)

    def drain(self, buffer_offset: int, transfer: ThreadTransfer, begin: int, end: int) -> None:
        """See :class:`Copier`."""
        bounce = self._bytes[buffer_offset : buffer_offset + end - begin]
        self._copy(transfer.buffer[begin:end], bounce, transfer)

    def _copy(self, to: torch.Tensor, source: torch.Tensor, transfer: ThreadTransfer) -> None:
        if transfer.after is not None:
            self._stream.wait_event(transfer.after)
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
        self._stream.synchronize()


class Staging:
    """One direction of a file device: two bounce buffers and the thread that keeps the disk busy.

    Pieces are of ``piece_bytes``; the last one is padded to whole blocks.
    """

    def __init__(self, file: BlockFile, piece_bytes: int, device_type: str, label: str) -> None:
        is_cuda = device_type == "cuda"
        self._file = file
        self._piece_bytes = piece_bytes
        self._arena = Arena(_BUFFERS * piece_bytes, pinned=is_cuda)
        self._view = self._arena.view
        self._copier: Copier = CudaCopier(self._arena) if is_cuda else MemoryCopier(self._arena)
        self._disk = ThreadPoolExecutor(1, thread_name_prefix=f"teraio-{label}-disk")

    @property
    def pinned_bytes(self) -> int:
        """Host memory of the bounce buffers."""
        return self._arena.mapped_bytes

    def write(self, transfer: ThreadTransfer, begin: int, end: int) -> None:
        """Bring bytes ``begin`` .. ``end`` to the file. Raises StoreError."""
        pieces = self._pieces(begin, end)
        if len(pieces) == 1:
            self._copier.fill(0, transfer, begin, end)
            self._file.write(self._blocks(0, begin, end), transfer.offset_bytes + begin)
            return
        with self._disk_jobs() as jobs:
            for index, (first, last) in enumerate(pieces):
                if index >= _BUFFERS:
                    jobs[index - _BUFFERS].result()
                self._copier.fill(self._place(index), transfer, first, last)
                blocks, offset_bytes = self._blocks(index, first, last), transfer.offset_bytes
                jobs.append(self._disk.submit(self._file.write, blocks, offset_bytes + first))
            for job in jobs[-_BUFFERS:]:
                job.result()

    def read(self, transfer: ThreadTransfer, begin: int, end: int) -> None:
        """Bring bytes ``begin`` .. ``end`` from the file. Raises StoreError."""
        pieces = self._pieces(begin, end)
        if len(pieces) == 1:
            self._file.read(self._blocks(0, begin, end), transfer.offset_bytes + begin)
            self._copier.drain(0, transfer, begin, end)
            return
        with self._disk_jobs() as jobs:
            for index in range(len(pieces) + _BUFFERS):
                if index >= _BUFFERS:
                    arrived = index - _BUFFERS
                    jobs[arrived].result()
                    self._copier.drain(self._place(arrived), transfer, *pieces[arrived])
                if index < len(pieces):
                    first, last = pieces[index]
                    blocks, offset_bytes = self._blocks(index, first, last), transfer.offset_bytes
                    jobs.append(self._disk.submit(self._file.read, blocks, offset_bytes + first))

    def close(self) -> None:
        """End the thread and give the buffers back; the queue has ended before."""
        self._disk.shutdown()
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

    def _pieces(self, begin: int, end: int) -> list[tuple[int, int]]:
        step = self._piece_bytes
        return [(first, min(first + step, end)) for first in range(begin, end, step)]

    def _place(self, index: int) -> int:
        return index % _BUFFERS * self._piece_bytes

    def _blocks(self, index: int, begin: int, end: int) -> memoryview:
        size = round_up(end - begin, self._file.alignment_bytes)
        return self._view[self._place(index) : self._place(index) + size]
