"""The host tier: pinned memory beside a GPU, plain memory where a CPU plays the GPU."""

from __future__ import annotations

import ctypes

import torch

from teraio.contracts.hardware import HOST, HOST_ALIGNMENT_BYTES
from teraio.executor.stores.arena import Arena
from teraio.executor.stores.base import MAX_CHUNK_BYTES
from teraio.executor.stores.queued_store import QueuedStore, Queues
from teraio.executor.stores.queues import ThreadQueues, ThreadTransfer
from teraio.executor.stores.streams import StreamQueues


class HostStore(QueuedStore):
    """One arena of ``capacity_bytes``, taken whole when the store is made.

    With ``device="cuda"`` the arena is pinned once, at exact size, and copies are stream-ordered;
    with ``device="cpu"`` two threads copy. Raises StoreError if the memory cannot be had.
    """

    def __init__(
        self, capacity_bytes: int, *, device: str = "cpu", chunk_bytes: int = MAX_CHUNK_BYTES
    ) -> None:
        device_type = torch.device(device).type
        arena = Arena(capacity_bytes, pinned=device_type == "cuda")
        queues: Queues
        if device_type == "cuda":
            queues = StreamQueues(HOST, arena.tensor)
        else:
            queues = ThreadQueues(HOST, _Copy(arena.address), chunk_bytes)
        super().__init__(
            HOST,
            capacity_bytes=capacity_bytes,
            reserved_bytes=capacity_bytes,
            alignment_bytes=HOST_ALIGNMENT_BYTES,
            pinned_bytes=arena.mapped_bytes,
            device_type=device_type,
            queues=queues,
            resources=(arena,),
        )


class _Copy:
    """Copies between CPU memory and the arena at ``address``."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __call__(self, transfer: ThreadTransfer, begin: int, end: int) -> None:
        inside = self._address + transfer.offset_bytes + begin
        outside = transfer.buffer.data_ptr() + begin
        if transfer.is_write:
            ctypes.memmove(inside, outside, end - begin)
        else:
            ctypes.memmove(outside, inside, end - begin)
