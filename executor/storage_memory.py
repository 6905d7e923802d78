"""How storages get their memory and give it back: by resizing, which keeps every view valid."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from teraio.executor.holding import NO_STREAMS, Holding
from teraio.profiler.storages import original_resize


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A tensor of all bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def allocator_books() -> tuple[int, int]:
    """Bytes that the GPU's allocator has in use, and has reserved."""
    books = torch.cuda.memory_stats()
    return books["allocated_bytes.all.current"], books["reserved_bytes.all.current"]


class StorageMemory:
    """Memory as the device's allocator gives it."""

    def allocate(self, holding: Holding, storage: torch.UntypedStorage) -> None:
        """Memory for a storage that has none."""
        original_resize(storage, holding.state.nbytes)

    def give_back(self, holding: Holding, storage: torch.UntypedStorage) -> None:
        """The storage's memory goes back to the allocator."""
        if holding.shared_with:
            with torch._C._DisableTorchDispatch():
                for stream in holding.shared_with:
                    bytes_of(storage).record_stream(stream)
            holding.shared_with = NO_STREAMS
        original_resize(storage, 0)

    def note(self, holding: Holding) -> None:
        """A storage lies on the device that was not allocated here."""

    def forget(self, holding: Holding) -> None:
        """A storage has died."""

    def note_uses(self, holdings: Collection[Holding], arguments: Sequence[Any] = ()) -> None:
        """A kernel with these arguments is about to be issued that uses storages."""

    def prepare(self, requests: Sequence[int], may_move: Sequence[bool]) -> None:
        """Blocks of these bytes, each more than 1 MiB, are about to be allocated in this order;
        storages of these rows of the plan may be moved for them.
        """

    def prepare_unplanned(self, sizes: Sequence[int]) -> None:
        """The same for blocks of any size, of a kernel that is not the plan's."""

    def tidy(self, may_move: Sequence[bool]) -> None:
        """An iteration begins; storages of these rows may be moved to lie together."""

    def begin(self) -> None:
        """A run begins, or begins anew."""

    def end_iteration(self) -> tuple[int, int]:
        """An iteration has ended: bytes that the GPU's allocator has in use, and has reserved."""
        return allocator_books()
