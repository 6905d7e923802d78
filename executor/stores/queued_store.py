"""What host and file stores have in common: checks, two queues, and an orderly end."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol

import torch

from teraio.errors import CapacityError, StoreError
from teraio.executor.stores.base import Buffer, Transfer, as_bytes


class Queues(Protocol):
    """One queue per direction; threads or streams serve them."""

    def issue(
        self,
        buffer: torch.Tensor,
        offset_bytes: int,
        *,
        is_write: bool,
        is_urgent: bool,
        after: torch.cuda.Event | None,
    ) -> Transfer:
        """Append a transfer to its direction's queue. Raises StoreError if closed."""
        ...

    def close(self) -> None:
        """Serve what is queued, then end."""
        ...

    def owns_current_thread(self) -> bool:
        """Whether the caller is a thread that serves a queue."""
        ...


class Resource(Protocol):
    """What queues copy from and to, and what therefore outlives them."""

    def close(self) -> None:
        """Give it back."""
        ...


class QueuedStore:
    """A store whose queues are threads or streams; see :class:`teraio.executor.stores.base.Store`.

    The queues never refer to the store, so a store that is dropped, or that an exception leaves
    behind, closes itself, at the latest when the interpreter ends.
    """

    def __init__(
        self,
        name: str,
        *,
        capacity_bytes: int,
        reserved_bytes: int,
        alignment_bytes: int,
        pinned_bytes: int,
        device_type: str,
        queues: Queues,
        resources: tuple[Resource, ...],
    ) -> None:
        self.name = name
        self.capacity_bytes = capacity_bytes
        self.reserved_bytes = reserved_bytes
        self.alignment_bytes = alignment_bytes
        self.pinned_bytes = pinned_bytes
        self.device_type = device_type
        self._queues = queues
        self._finalizer = weakref.finalize(self, _release, os.getpid(), queues, resources)

    def write(
        self,
        source: Buffer,
        offset_bytes: int,
        nbytes: int,
        *,
        after: torch.cuda.Event | None = None,
        urgent: bool = False,
    ) -> Transfer:
        """Start copying the beginning of ``source`` to the store. Raises StoreError, InputError."""
        return self._issue(source, offset_bytes, nbytes, True, urgent, after)

    def read(
        self,
        destination: Buffer,
        offset_bytes: int,
        nbytes: int,
        *,
        after: torch.cuda.Event | None = None,
        urgent: bool = False,
    ) -> Transfer:
        """Start copying to the beginning of ``destination``. Raises StoreError, InputError."""
        return self._issue(destination, offset_bytes, nbytes, False, urgent, after)

    def grow(self, nbytes: int) -> None:
        """Raise CapacityError; stores that can grow say so themselves."""
        raise CapacityError(
            f"{self.name}: all of its {self.capacity_bytes} bytes are reserved "
            f"and {nbytes} more were asked for"
        )

    def close(self) -> None:
        """Wait for all transfers, give back memory and files. Calling it again does nothing."""
        self._finalizer()

    def _issue(
        self,
        buffer: Buffer,
        offset_bytes: int,
        nbytes: int,
        is_write: bool,
        is_urgent: bool,
        after: torch.cuda.Event | None,
    ) -> Transfer:
        self._check_range(offset_bytes, nbytes)
        flat = as_bytes(buffer, nbytes, self.device_type)
        if after is None and flat.is_cuda:
            after = torch.cuda.current_stream(flat.device).record_event()
        return self._queues.issue(
            flat, offset_bytes, is_write=is_write, is_urgent=is_urgent, after=after
        )

    def _check_range(self, offset_bytes: int, nbytes: int) -> None:
        if offset_bytes < 0 or nbytes < 0 or offset_bytes + nbytes > self.reserved_bytes:
            raise StoreError(
                f"{self.name}: bytes {offset_bytes} to {offset_bytes + nbytes} lie outside "
                f"the {self.reserved_bytes} reserved"
            )
        if offset_bytes % self.alignment_bytes:
            raise StoreError(
                f"{self.name}: offset {offset_bytes} is not a multiple of {self.alignment_bytes}"
            )


def _release(process: int, queues: Queues, resources: tuple[Resource, ...]) -> None:
    if os.getpid() != process:
        return  # A forked child has neither the threads nor the memory.

    def close_all() -> None:
        queues.close()
        for resource in resources:
            resource.close()

    if queues.owns_current_thread():
        # The garbage collector may run in a queue's own thread, which cannot wait for itself.
        threading.Thread(target=close_all, daemon=True).start()
    else:
        close_all()
