"""What every store promises: a tier's device as one preallocated arena of bytes.

Each store has one queue per direction. A queue serves its transfers in the order of issue, and an
urgent one (a demand fetch, an eviction) before the next chunk of the transfer under way. Transfers
that touch the same bytes take effect in the order of issue, whatever their queues, so a slot can be
written again as soon as the read of its old content has been issued. Every wait points to something
issued earlier: no order of calls can deadlock.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias, runtime_checkable

import torch

from teraio.errors import InputError

Buffer: TypeAlias = torch.Tensor | torch.UntypedStorage
"""Device memory of one transfer: a whole storage, or a contiguous uint8 tensor of one dimension."""

MAX_CHUNK_BYTES = 256 * 10**6
"""An urgent transfer waits for at most this many bytes of the transfer under way; where files
bounce in host memory, for what is in the buffers of its direction.
"""


class Transfer(Protocol):
    """One copy between device memory and a store; it owns its buffer until it is done.

    ``start_seconds`` and ``end_seconds`` are on the clock of ``time.perf_counter``: when the queue
    began to serve it and when its last byte had arrived; NaN until it is done.
    """

    @property
    def is_write(self) -> bool: ...
    @property
    def offset_bytes(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def start_seconds(self) -> float: ...
    @property
    def end_seconds(self) -> float: ...

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not, without blocking; ``wait`` tells which."""
        ...

    def wait(self) -> None:
        """Block the host until it has ended. Raises StoreError if the bytes did not arrive."""
        ...

    def make_stream_wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Let work issued later to ``stream`` (None: the current one) see this transfer's effect.

        Between pinned host memory and a GPU the stream waits and the host goes on. Elsewhere (CPU,
        files) there is nothing to put into a stream, and the host waits. Raises StoreError.
        """
        ...


@runtime_checkable
class Store(Protocol):
    """A device of a tier: ``name`` as in Hardware, bytes addressed from 0.

    ``capacity_bytes`` is the most that it may hold, ``reserved_bytes`` what it holds now; offsets
    are multiples of ``alignment_bytes``. ``pinned_bytes`` is the host memory that it takes.
    """

    @property
    def name(self) -> str: ...
    @property
    def capacity_bytes(self) -> int: ...
    @property
    def reserved_bytes(self) -> int: ...
    @property
    def alignment_bytes(self) -> int: ...
    @property
    def pinned_bytes(self) -> int: ...

    def write(
        self,
        source: Buffer,
        offset_bytes: int,
        nbytes: int,
        *,
        after: torch.cuda.Event | None = None,
        urgent: bool = False,
    ) -> Transfer:
        """Start copying ``nbytes`` from the beginning of ``source`` to the store.

        On a GPU the copy begins after ``after``, or after all work issued so far to the current
        stream if None. Raises StoreError if the range lies outside or the store is closed.
        """
        ...

    def read(
        self,
        destination: Buffer,
        offset_bytes: int,
        nbytes: int,
        *,
        after: torch.cuda.Event | None = None,
        urgent: bool = False,
    ) -> Transfer:
        """Start copying ``nbytes`` from the store to the beginning of ``destination``.

        ``after`` as in ``write``: memory just allocated on the current stream may still be used by
        earlier work there.
        """
        ...

    def grow(self, nbytes: int) -> None:
        """Reserve ``nbytes`` more behind ``reserved_bytes``. Raises CapacityError, StoreError."""
        ...

    def close(self) -> None:
        """Wait for all transfers, give back memory and files. Calling it again does nothing."""
        ...


def as_bytes(buffer: Buffer, nbytes: int, device_type: str) -> torch.Tensor:
    """The first ``nbytes`` of a buffer as uint8; raises InputError for one that does not fit."""
    # Stores may be called under a dispatch mode, which must not see the executor's own work.
    with torch._C._DisableTorchDispatch():
        if isinstance(buffer, torch.UntypedStorage):
            flat = torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(buffer)
        else:
            flat = buffer
        if flat.dtype != torch.uint8 or flat.dim() != 1 or not flat.is_contiguous():
            raise InputError("buffer: must be a storage or a contiguous uint8 tensor of one dim")
        if flat.device.type != device_type:
            raise InputError(f"buffer: is on {flat.device.type}, the store serves {device_type}")
        if flat.numel() < nbytes:
            raise InputError(f"buffer: holds {flat.numel()} bytes, the transfer has {nbytes}")
        result: torch.Tensor = flat[:nbytes]
    return result


def round_up(nbytes: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is not below ``nbytes``."""
    return -(-nbytes // multiple) * multiple
