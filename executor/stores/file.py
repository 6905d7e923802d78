"""The SSD tier through ordinary system calls: unnamed files, bounced through host memory."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from teraio.contracts.hardware import Ssd
from teraio.errors import CapacityError
from teraio.executor.stores.base import MAX_CHUNK_BYTES, round_up
from teraio.executor.stores.block_file import BlockFile
from teraio.executor.stores.io_meter import FileUse
from teraio.executor.stores.queued_store import QueuedStore
from teraio.executor.stores.queues import Await, ThreadQueues, ThreadTransfer
from teraio.executor.stores.staging import LEAST_BUFFERS_PER_FILE, Staging
from teraio.executor.stores.striped_space import (
    Directories,
    as_directories,
    grow_members,
    whole_blocks,
)
from teraio.executor.stores.striping import Stripes

_DIRECTIONS = 2


class FileStore(QueuedStore):
    """``reserved_bytes`` of a disk, which may grow to ``capacity_bytes``, in ``directory``.

    Several directories: the device is striped over one file in each, all served at once.
    ``direct``: None uses O_DIRECT where it works and warns where it does not, True insists, False
    goes through the page cache. ``is_direct`` is what it came to. Raises InputError for a directory
    that is not there, StoreError if the disk lacks space ("needs X, has Y").
    """

    def __init__(
        self,
        name: str,
        directory: Directories,
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
        folders = as_directories(directory)
        bytes_per_file = bounce_bytes // (_DIRECTIONS * len(folders))
        unit_bytes = min(preferred_io_bytes, bytes_per_file // LEAST_BUFFERS_PER_FILE)
        stripes = Stripes(len(folders), whole_blocks(unit_bytes, alignment_bytes))
        reserved_bytes = round_up(reserved_bytes, alignment_bytes)
        with ExitStack() as undo:
            self._files: list[BlockFile] = []
            self._stripes = stripes
            for member, folder in enumerate(folders):
                share_bytes = stripes.member_bytes(reserved_bytes, member)
                file = BlockFile(
                    name, folder, share_bytes, alignment_bytes=alignment_bytes, direct=direct
                )
                undo.callback(file.close)
                self._files.append(file)
            buffers_per_file = max(LEAST_BUFFERS_PER_FILE, bytes_per_file // stripes.unit_bytes)
            staging = {
                is_write: Staging(self._files, stripes, device_type, name, buffers_per_file)
                for is_write in (False, True)
            }
            undo.pop_all()
        super().__init__(
            name,
            capacity_bytes=reserved_bytes if capacity_bytes is None else capacity_bytes,
            reserved_bytes=reserved_bytes,
            alignment_bytes=alignment_bytes,
            pinned_bytes=sum(x.pinned_bytes for x in staging.values()),
            device_type=device_type,
            queues=_queues(name, staging, chunk_bytes, stripes),
            resources=(*staging.values(), *self._files),
        )

    @classmethod
    def of_ssd(
        cls, ssd: Ssd, directory: Directories, reserved_bytes: int, *, device: str = "cpu"
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
        """Whether transfers bypass the page cache, on every disk."""
        return all(file.is_direct for file in self._files)

    @property
    def file_uses(self) -> list[FileUse]:
        """What each file has done so far; also of a closed store."""
        return [
            file.meter.use(
                self.name, str(file.directory), "file" if file.is_direct else "file buffered"
            )
            for file in self._files
        ]

    def grow(self, nbytes: int) -> None:
        """Reserve ``nbytes`` more of the disk. Raises CapacityError (budget), StoreError (disk)."""
        self.reserved_bytes = grow_members(self, nbytes, self._stripes, self._files)


def _queues(
    name: str, staging: dict[bool, Staging], chunk_bytes: int, stripes: Stripes
) -> ThreadQueues:
    """Nothing is awaited between chunks, so small ones, which let urgent transfers in soon, cost
    nothing.
    """
    round_bytes = stripes.unit_bytes * stripes.num_members
    chunk_bytes = whole_blocks(min(chunk_bytes, round_bytes), stripes.unit_bytes)
    return ThreadQueues(name, _Move(staging), chunk_bytes)


class _Move:
    """Sends each direction's chunks through its own bounce buffers; does not wait for the end."""

    def __init__(self, staging: dict[bool, Staging]) -> None:
        self._staging = staging

    def __call__(self, transfer: ThreadTransfer, begin: int, end: int) -> Await:
        staging = self._staging[transfer.is_write]
        move = staging.write if transfer.is_write else staging.read
        return move(transfer, begin, end)
