"""PyTorch's CUDA allocator: how it has laid out its memory, and blocks and moves by address."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch.cuda import memory_snapshot

from teraio.executor.storage_memory import allocator_books
from teraio.profiler.storages import original_resize

_WITHOUT_TRACES: dict[str, Any] = (
    {"include_traces": False} if "include_traces" in signature(memory_snapshot).parameters else {}
)
"""Where somebody records the allocator's history (torch 2.11 or later) it is not copied."""

ENDLESS = 2**62
"""Bytes of address space behind the last page."""


class Layout(NamedTuple):
    """How an allocator has laid out its pool for large requests, (address, bytes) each.

    ``growth``: bytes that are not mapped behind an address at which pages end.
    """

    holes: list[tuple[int, int]]
    blocks: list[tuple[int, int]]
    reserved_bytes: int
    growth: dict[int, int]


class Relocation:
    """A copy within the GPU: what is issued to a stream later may need its effect."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._end = stream.record_event()

    def make_stream_wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Let ``stream`` (None: the current one) wait for the copy."""
        (stream or torch.cuda.current_stream()).wait_event(self._end)


class GpuAllocator:
    """PyTorch's CUDA allocator on the current device and stream."""

    def __init__(self) -> None:
        self._device = torch.cuda.current_device()
        self._stream = torch.cuda.current_stream()
        self._handle = self._stream.cuda_stream

    def is_on_stream(self) -> bool:
        """Whether kernels go to the run's stream now; asked for each of them."""
        return bool(torch._C._cuda_getCurrentRawStream(self._device) == self._handle)

    def is_usable(self) -> bool:
        """Whether storages can be moved now: not on another stream, nor into a CUDA graph."""
        return self.is_on_stream() and not self.is_capturing()

    @staticmethod
    def is_capturing() -> bool:
        """Whether kernels go into a CUDA graph now."""
        return bool(torch.cuda.is_current_stream_capturing())

    def current_stream(self) -> torch.Stream:
        """Where kernels go now."""
        return torch.cuda.current_stream()

    def look(self) -> Layout | None:
        """Its present layout; None without expandable segments, where blocks lie in many ranges,
        and where PyTorch cannot tell.
        """
        holes: list[tuple[int, int]] = []
        blocks: list[tuple[int, int]] = []
        ranges: list[tuple[int, int]] = []
        reserved_bytes = 0
        try:
            segments = torch.cuda.memory_snapshot(**_WITHOUT_TRACES)
        except RuntimeError:
            # Some builds cannot tell (PyTorch issue 174044); the run goes on as without looking.
            return None
        for segment in segments:
            if segment["device"] != self._device:
                continue
            reserved_bytes += segment["total_size"]
            if not self._is_pool(segment):
                continue
            if not segment["is_expandable"]:
                return None
            ranges.append((segment["address"], segment["address"] + segment["total_size"]))
            for block in segment["blocks"]:
                kind = holes if block["state"] == "inactive" else blocks
                kind.append((block["address"], block["size"]))
        return Layout(holes, blocks, reserved_bytes, _gaps_behind(ranges))

    def _is_pool(self, segment: dict[str, Any]) -> bool:
        return (
            segment["segment_type"] == "large"
            and segment["stream"] == self._handle
            and tuple(segment["segment_pool_id"]) == (0, 0)
        )

    @staticmethod
    def address(storage: torch.UntypedStorage) -> int:
        """Where a storage lies."""
        # Not the method of the storage: a pointer that is asked for there is given away.
        address: int = torch._C.StorageBase.data_ptr(storage)  # type: ignore[attr-defined]
        return address

    def move(self, storage: torch.UntypedStorage, nbytes: int) -> Relocation:
        """New memory for a storage, a copy in the order of the stream, the old memory back."""
        original_resize(storage, nbytes)
        return Relocation(self._stream)

    def allocate(self, nbytes: int) -> int:
        """A block of no storage: its address."""
        address: int = torch.cuda.caching_allocator_alloc(nbytes)
        return address

    def free(self, address: int) -> None:
        """Give such a block back."""
        torch.cuda.caching_allocator_delete(address)

    def books(self) -> tuple[int, int]:
        """Bytes in use, and reserved."""
        return allocator_books()

    def trim(self) -> None:
        """Give back to the driver what is not in use."""
        torch.cuda.empty_cache()


def _gaps_behind(ranges: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Of mapped ranges (begin, end): bytes from each end to the next begin, by end."""
    gaps: dict[int, int] = {}
    next_begin = None
    for begin, end in sorted(ranges, reverse=True):
        gaps[end] = ENDLESS if next_begin is None else next_begin - end
        next_begin = begin
    return gaps
