"""A store that proves what it gives back: checksums taken at writes, compared after reads."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from teraio.errors import StoreError
from teraio.executor.slot_owners import SlotOwners
from teraio.executor.stores.base import Buffer, Store, Transfer, as_bytes
from teraio.executor.stores.checksums import crc, place_sums

Describe = Callable[[str, int, int], str]
"""What lies on a device (its name) at an offset, of so many bytes: for error messages."""


def _nothing_known(device: str, offset_bytes: int, nbytes: int) -> str:
    return ""


@dataclass(frozen=True, eq=False)
class _Written:
    """What a write has put into a place."""

    nbytes: int
    checksum: int | torch.Tensor


class VerifiedStore:
    """Any store, with every read checked that returns exactly what one write wrote.

    On a CPU the host computes a CRC-32 at the write and after the read. On a GPU two passes over
    the memory run on the current stream, and the host waits for them after each read: a tool for
    finding fault with a disk or driver, not for every day. See :class:`stores.base.Store`.
    """

    def __init__(
        self, store: Store, describe: Describe = lambda device, offset, nbytes: ""
    ) -> None:
        self.inner = store
        self.num_verified = 0
        self._describe = describe
        self._written: SlotOwners[_Written] = SlotOwners()

    @property
    def name(self) -> str:
        """See :class:`teraio.executor.stores.base.Store`, also for the other properties."""
        return self.inner.name

    @property
    def capacity_bytes(self) -> int:
        """The most that it may hold."""
        return self.inner.capacity_bytes

    @property
    def reserved_bytes(self) -> int:
        """What it holds now."""
        return self.inner.reserved_bytes

    @property
    def alignment_bytes(self) -> int:
        """Offsets are multiples of it."""
        return self.inner.alignment_bytes

    @property
    def pinned_bytes(self) -> int:
        """Host memory that it takes."""
        return self.inner.pinned_bytes

    def write(
        self,
        source: Buffer,
        offset_bytes: int,
        nbytes: int,
        *,
        after: torch.cuda.Event | None = None,
        urgent: bool = False,
    ) -> Transfer:
        """Start a write and note its checksum."""
        memory = as_bytes(source, nbytes, source.device.type)
        if after is not None:
            torch.cuda.current_stream(memory.device).wait_event(after)
        written = _Written(nbytes, _checksum(memory))
        transfer = self.inner.write(source, offset_bytes, nbytes, after=after, urgent=urgent)
        end_bytes = offset_bytes + max(nbytes, 1)
        for begin, other in self._written.overlapping(offset_bytes, end_bytes):
            self._written.remove(begin, other)
        self._written.add(offset_bytes, end_bytes, written)
        return transfer

    def read(
        self,
        destination: Buffer,
        offset_bytes: int,
        nbytes: int,
        *,
        after: torch.cuda.Event | None = None,
        urgent: bool = False,
    ) -> Transfer:
        """Start a read; waiting for it compares. A part of what was written is not compared."""
        transfer = self.inner.read(destination, offset_bytes, nbytes, after=after, urgent=urgent)
        places = self._written.overlapping(offset_bytes, offset_bytes + max(nbytes, 1))
        for begin, written in places:
            if begin == offset_bytes and written.nbytes == nbytes:
                return _VerifiedRead(transfer, weakref.ref(destination), written, self)
        return transfer

    def grow(self, nbytes: int) -> None:
        """Reserve ``nbytes`` more. Raises CapacityError, StoreError."""
        self.inner.grow(nbytes)

    def close(self) -> None:
        """Close the store inside."""
        self.inner.close()

    def compare(self, memory: torch.Tensor, offset_bytes: int, written: _Written) -> None:
        """Raise StoreError if ``memory`` does not hold what was written."""
        found, wanted = _checksum(memory), written.checksum
        is_same = (
            bool(torch.equal(found, wanted))
            if isinstance(found, torch.Tensor) and isinstance(wanted, torch.Tensor)
            else found == wanted
        )
        self.num_verified += 1
        if not is_same:
            what = self._describe(self.name, offset_bytes, written.nbytes)
            raise StoreError(
                f"{self.name}: the {written.nbytes} bytes read at offset {offset_bytes} are not "
                f"those that were written there{f' ({what})' if what else ''}: checksum "
                f"{_shown(found)} instead of {_shown(wanted)}; do not trust this disk or its driver"
            )


class _VerifiedRead:
    """A read that is compared once, by whoever waits for it first.

    It does not keep its memory: if nobody else does, nobody will use what was read.
    """

    def __init__(
        self,
        transfer: Transfer,
        memory: weakref.ref[Buffer],
        written: _Written,
        store: VerifiedStore,
    ) -> None:
        self._transfer = transfer
        self._memory = memory
        self._is_compared = False
        self._written = written
        self._store = store
        self._error: StoreError | None = None

    @property
    def is_write(self) -> bool:
        """False."""
        return self._transfer.is_write

    @property
    def offset_bytes(self) -> int:
        """Where it reads."""
        return self._transfer.offset_bytes

    @property
    def nbytes(self) -> int:
        """How much it reads."""
        return self._transfer.nbytes

    @property
    def start_seconds(self) -> float:
        """See :class:`teraio.executor.stores.base.Transfer`."""
        return self._transfer.start_seconds

    @property
    def end_seconds(self) -> float:
        """See :class:`teraio.executor.stores.base.Transfer`; before it is compared."""
        return self._transfer.end_seconds

    @property
    def done(self) -> bool:
        """Whether the bytes have arrived."""
        return self._transfer.done

    def wait(self) -> None:
        """Block until the bytes have arrived, and compare. Raises StoreError."""
        self._transfer.wait()
        self._compare()

    def make_stream_wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Let ``stream`` wait, and the host until they are compared. Raises StoreError."""
        self._transfer.make_stream_wait(stream)
        if stream is None:
            self._compare()
        else:
            with torch.cuda.stream(stream):
                self._compare()

    def _compare(self) -> None:
        memory = self._memory()
        if not self._is_compared and memory is not None:
            try:
                flat = as_bytes(memory, self.nbytes, memory.device.type)
                self._store.compare(flat, self.offset_bytes, self._written)
            except StoreError as error:
                self._error = error
        self._is_compared = True
        if self._error is not None:
            raise self._error


def _checksum(memory: torch.Tensor) -> int | torch.Tensor:
    return place_sums(memory) if memory.is_cuda else crc(memory)


def _shown(checksum: int | torch.Tensor) -> str:
    if isinstance(checksum, int):
        return f"{checksum:08x}"
    return "-".join(f"{value & (1 << 64) - 1:016x}" for value in checksum.tolist())
