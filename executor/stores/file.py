"""The SSD tier through ordinary system calls: one unnamed file per device, bounced through host."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch

from teraio.contracts.hardware import Ssd
from teraio.errors import CapacityError
from teraio.executor.stores.base import MAX_CHUNK_BYTES, round_up
from teraio.executor.stores.block_file import BlockFile
from teraio.executor.stores.queued_store import QueuedStore
from teraio.executor.stores.queues import ThreadQueues, ThreadTransfer
from teraio.executor.stores.staging import Staging

_BOUNCE_BUFFERS = 4
"""Two directions with two buffers each."""


class FileStore(QueuedStore):
    """``reserved_bytes`` of a disk, which may grow to ``capacity_bytes``, in ``directory``.

    ``direct``: None uses O_DIRECT where it works and warns where it does not, True insists, False
    goes through the page cache. ``is_direct`` is what it came to. Raises InputError for a directory
    that is not there, StoreError if the disk lacks space ("needs X, has Y").
    """

    def __init__(
        self,
        name: str,
        directory: str | Path,
        reserved_bytes: int,
        *,
        capacity_bytes: int | None = None,
        alignment_bytes: int = 4096,
        preferred_io_bytes: int = 16 * 2**20,
        bounce_bytes: int = 64 * 2**20,
        device: str = "cpu",
        direct: bool | None = None,
        chunk_bytes: int = MAX_CHUNK_BYTES,
    ) -> None:
        if capacity_bytes is not None and reserved_bytes > capacity_bytes:
            raise CapacityError(
                f"{name}: {reserved_bytes} bytes to reserve exceed its capacity {capacity_bytes}"
            )
        device_type = torch.device(device).type
        piece_bytes = _whole_blocks(
            min(preferred_io_bytes, bounce_bytes // _BOUNCE_BUFFERS), alignment_bytes
        )
        with ExitStack() as undo:
            self._file = BlockFile(
                name,
                Path(directory),
                reserved_bytes,
                alignment_bytes=alignment_bytes,
                direct=direct,
            )
            undo.callback(self._file.close)
            staging = {
                is_write: Staging(self._file, piece_bytes, device_type, name)
                for is_write in (False, True)
            }
            undo.pop_all()
        reserved_bytes = self._file.reserved_bytes
        super().__init__(
            name,
            capacity_bytes=reserved_bytes if capacity_bytes is None else capacity_bytes,
            reserved_bytes=reserved_bytes,
            alignment_bytes=alignment_bytes,
            pinned_bytes=sum(x.pinned_bytes for x in staging.values()),
            device_type=device_type,
            queues=ThreadQueues(name, _Move(staging), _whole_blocks(chunk_bytes, piece_bytes)),
            resources=(*staging.values(), self._file),
        )

    @classmethod
    def of_ssd(
        cls, ssd: Ssd, directory: str | Path, reserved_bytes: int, *, device: str = "cpu"
    ) -> FileStore:
        """The store of a Hardware's SSD, with its alignment, I/O size and capacity."""
        return cls(
            ssd.name,
            directory,
            reserved_bytes,
            capacity_bytes=ssd.capacity_bytes,
            alignment_bytes=ssd.alignment_bytes,
            preferred_io_bytes=ssd.preferred_io_bytes,
            bounce_bytes=ssd.bounce_bytes,
            device=device,
        )

    @property
    def is_direct(self) -> bool:
        """Whether transfers bypass the page cache."""
        return self._file.is_direct

    def grow(self, nbytes: int) -> None:
        """Reserve ``nbytes`` more of the disk. Raises CapacityError (budget), StoreError (disk)."""
        reserved_bytes = round_up(self.reserved_bytes + nbytes, self.alignment_bytes)
        if reserved_bytes > self.capacity_bytes:
            raise CapacityError(
                f"{self.name}: {nbytes} bytes more than the {self.reserved_bytes} reserved exceed "
                f"its capacity of {self.capacity_bytes}"
            )
        self._file.reserve(reserved_bytes)
        self.reserved_bytes = self._file.reserved_bytes


class _Move:
    """Sends each direction's chunks through its own bounce buffers."""

    def __init__(self, staging: dict[bool, Staging]) -> None:
        self._staging = staging

    def __call__(self, transfer: ThreadTransfer, begin: int, end: int) -> None:
        staging = self._staging[transfer.is_write]
        if transfer.is_write:
            staging.write(transfer, begin, end)
        else:
            staging.read(transfer, begin, end)


def _whole_blocks(nbytes: int, block_bytes: int) -> int:
    return max(nbytes - nbytes % block_bytes, block_bytes)
