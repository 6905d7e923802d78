"""Host memory of exact size, outside PyTorch's allocators: arenas and bounce buffers."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import torch

from teraio.errors import StoreError
from teraio.executor.stores.base import round_up

_TOUCH_BYTES = 64 * 2**20


class Arena:
    """``nbytes`` of page-aligned host memory, every page touched; registered with CUDA on demand.

    PyTorch's pinned allocator rounds up to powers of two (1.1 GiB takes 2); this one takes what
    was asked for, rounded to pages, and the first step finds no page missing.
    """

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self.nbytes = nbytes
        self.mapped_bytes = round_up(max(nbytes, 1), mmap.PAGESIZE)
        self._map = _map(self.mapped_bytes)
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)
        self._tensor: torch.Tensor | None = None
        self._is_registered = False
        self._is_closed = False
        _touch(self.address, self.mapped_bytes)
        if pinned:
            self._register()

    @property
    def view(self) -> memoryview:
        """The bytes for system calls; whoever takes it releases it before :meth:`close`."""
        return memoryview(self._map)

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes as a uint8 tensor, for copies on CUDA streams."""
        if self._tensor is None:
            self._tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        return self._tensor

    def close(self) -> None:
        """Give the memory back. Whatever used it must have ended."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._is_registered:
            # A failed context fails this call too; the memory goes back to the system anyhow.
            torch.cuda.cudart().cudaHostUnregister(self.address)
        self._tensor = None
        del self._anchor
        # A view in the traceback of an error that somebody keeps: the memory goes when it goes.
        with contextlib.suppress(BufferError):
            self._map.close()

    def _register(self) -> None:
        torch.cuda.init()
        status = int(torch.cuda.cudart().cudaHostRegister(self.address, self.mapped_bytes, 0))
        if status != 0:
            self.close()
            raise StoreError(
                f"host: CUDA could not pin {self.mapped_bytes} bytes (error {status}); "
                "give a smaller --host-memory"
            )
        self._is_registered = True


def _map(nbytes: int) -> mmap.mmap:
    try:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise StoreError(
            f"host: cannot map {nbytes} bytes: {error.strerror}; give a smaller --host-memory"
        ) from None
    # A forked data loader would turn pages under a DMA transfer into copies of themselves.
    mapping.madvise(mmap.MADV_DONTFORK)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # A kernel without huge pages: small ones serve too.
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _touch(address: int, nbytes: int) -> None:
    pieces = range(0, nbytes, _TOUCH_BYTES)
    if len(pieces) == 1:
        ctypes.memset(address, 0, nbytes)
        return
    with ThreadPoolExecutor(min(len(pieces), os.cpu_count() or 1)) as pool:
        for begin in pieces:
            size = min(_TOUCH_BYTES, nbytes - begin)
            pool.submit(ctypes.memset, address + begin, 0, size)
