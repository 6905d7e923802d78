"""The SSD tier through kvikio: between GPU memory and disk without a bounce buffer of ours.

Where the driver offers GPUDirect Storage, bytes go from the disk to the GPU by themselves.
Elsewhere kvikio bounces them through its own pinned buffers (its compatibility mode), by copies on
streams that wait for all work on CUDA's default stream, and all later work there for them: correct,
but no transfer then runs beside the kernels of a training loop on that stream.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from teraio.contracts.hardware import Ssd
from teraio.errors import CapacityError, StoreError
from teraio.executor.stores.base import MAX_CHUNK_BYTES, round_up
from teraio.executor.stores.block_file import check_directory
from teraio.executor.stores.io_meter import FileMeter, FileUse
from teraio.executor.stores.kvikio_library import KvikioLibrary, load_kvikio
from teraio.executor.stores.queued_store import QueuedStore
from teraio.executor.stores.queues import ThreadQueues, ThreadTransfer
from teraio.executor.stores.reserved_space import ReservedSpace
from teraio.executor.stores.striped_space import (
    Directories,
    as_directories,
    grow_members,
    whole_blocks,
)
from teraio.executor.stores.striping import Piece, Stripes

_DEPTH = 2
"""Requests under way in each file and direction: one is served while the next is being made."""

_DIRECTIONS = 2


class GdsStore(QueuedStore):
    """``reserved_bytes`` of a disk, which may grow to ``capacity_bytes``, in ``directory``.

    Several directories: the device is striped over one file in each, all served at once. ``is_gds``
    says whether the driver moves the bytes directly. Raises InputError for a directory that is not
    there, StoreError if kvikio does not work here or the disk lacks space ("needs X, has Y").
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
        device: str = "cuda",
        chunk_bytes: int = MAX_CHUNK_BYTES,
    ) -> None:
        if capacity_bytes is not None and reserved_bytes > capacity_bytes:
            raise CapacityError(
                f"{name}: {reserved_bytes} bytes to reserve exceed its capacity {capacity_bytes}"
            )
        device_type = torch.device(device).type
        folders = as_directories(directory)
        stripes = Stripes(len(folders), whole_blocks(preferred_io_bytes, alignment_bytes))
        library = load_kvikio(bounce_buffer_bytes=stripes.unit_bytes)
        reserved_bytes = round_up(reserved_bytes, alignment_bytes)
        self._stripes = stripes
        self._files: list[GdsFile] = []
        with ExitStack() as undo:
            for member, folder in enumerate(folders):
                file = GdsFile(name, folder, library, alignment_bytes=alignment_bytes)
                undo.callback(file.close)
                self._files.append(file)
                file.reserve(stripes.member_bytes(reserved_bytes, member))
            undo.pop_all()
        is_bounced = device_type == "cuda" and not self.is_gds
        requests = _DIRECTIONS * _DEPTH * len(folders)
        super().__init__(
            name,
            capacity_bytes=reserved_bytes if capacity_bytes is None else capacity_bytes,
            reserved_bytes=reserved_bytes,
            alignment_bytes=alignment_bytes,
            pinned_bytes=requests * stripes.unit_bytes if is_bounced else 0,
            device_type=device_type,
            queues=ThreadQueues(
                name,
                _Move(self._files, stripes, device_type),
                whole_blocks(chunk_bytes, stripes.unit_bytes),
            ),
            resources=tuple(self._files),
        )

    @classmethod
    def of_ssd(
        cls, ssd: Ssd, directory: Directories, reserved_bytes: int, *, device: str = "cuda"
    ) -> GdsStore:
        """The store of a Hardware's SSD, with its alignment, I/O size and capacity."""
        return cls(
            ssd.name,
            directory,
            reserved_bytes,
            capacity_bytes=ssd.capacity_bytes,
            alignment_bytes=ssd.alignment_bytes,
            # Within the SSD's bounce buffers also where it is kvikio that bounces.
            preferred_io_bytes=min(
                ssd.preferred_io_bytes,
                ssd.bounce_bytes // (_DIRECTIONS * _DEPTH * len(as_directories(directory))),
            ),
            device=device,
        )

    @property
    def is_gds(self) -> bool:
        """Whether the driver moves the bytes of every file directly."""
        return all(file.is_gds for file in self._files)

    @property
    def file_uses(self) -> list[FileUse]:
        """What each file has done so far; also of a closed store."""
        return [
            file.meter.use(self.name, str(file.directory), "gds" if file.is_gds else "gds-compat")
            for file in self._files
        ]

    def grow(self, nbytes: int) -> None:
        """Reserve ``nbytes`` more of the disk. Raises CapacityError (budget), StoreError (disk)."""
        self.reserved_bytes = grow_members(self, nbytes, self._stripes, self._files)


class GdsFile:
    """A file that kvikio has open and nobody else can: its name is gone before it has content.

    cuFile asks for the place of the file by its name when it is opened, so it has one until then.
    """

    def __init__(
        self, name: str, directory: Path, library: KvikioLibrary, *, alignment_bytes: int
    ) -> None:
        self.label = f"{name} in {directory}"
        self.directory = directory
        self.meter = FileMeter()
        check_directory(name, directory)
        try:
            descriptor, path = tempfile.mkstemp(prefix=".teraio-", dir=directory)
        except OSError as error:
            raise StoreError(f"{self.label}: cannot create a file: {error.strerror}") from None
        self._space = ReservedSpace(descriptor, self.label, alignment_bytes)
        try:
            self._handle, self.is_gds = library.open(path)
        except Exception as error:
            self._space.close()
            raise StoreError(f"{self.label}: kvikio cannot open a file: {error}") from error
        finally:
            os.unlink(path)

    def reserve(self, reserved_bytes: int) -> None:
        """Let the file occupy at least so many bytes. Raises StoreError: needs X, has Y."""
        self._space.reserve(reserved_bytes)

    def start(
        self,
        memory: Any,
        nbytes: int,
        member_offset: int,
        *,
        is_write: bool,
        stream: torch.cuda.Stream | None,
    ) -> _Request:
        """Hand a request over. Whoever does keeps the memory until :meth:`_Request.wait` is over.

        With ``stream`` cuFile orders it there; without, a thread of kvikio carries it out. Raises
        StoreError.
        """
        self._space.check()
        handle = self._handle
        meter = self.meter.of(is_write=is_write)
        meter.begin()
        finish: Callable[[], int]
        try:
            if stream is None:
                call = handle.pwrite if is_write else handle.pread
                finish = call(memory, nbytes, member_offset, nbytes).get
            else:
                call = handle.raw_write_async if is_write else handle.raw_read_async
                future = call(memory, stream.cuda_stream, nbytes, member_offset, 0)
                finish = future.check_bytes_done
        except Exception as error:
            meter.end(0)
            raise self._failed(is_write, member_offset, nbytes, error) from error
        return _Request(self, finish, member_offset, nbytes, is_write)

    def complete(self, request: _Request) -> None:
        """Wait for a request. Raises StoreError naming path, offset, wanted and got bytes."""
        got = 0
        try:
            got = int(request.finish())
        except Exception as error:
            raise self._failed(
                request.is_write, request.member_offset, request.nbytes, error
            ) from error
        finally:
            self.meter.of(is_write=request.is_write).end(got)
        if got != request.nbytes:
            raise StoreError(
                f"{self.label}: {_verb(request.is_write)} at offset {request.member_offset} wanted "
                f"{request.nbytes} bytes, got {got}"
            )

    def close(self) -> None:
        """Close the file, which gives the disk space back. Every request has ended before."""
        with suppress(Exception):  # The process's CUDA context may be gone.
            self._handle.close()
        self._space.close()

    def _failed(
        self, is_write: bool, member_offset: int, nbytes: int, error: Exception
    ) -> StoreError:
        reason = str(error).strip() or type(error).__name__
        return StoreError(
            f"{self.label}: {_verb(is_write)} at offset {member_offset} wanted {nbytes} bytes, "
            f"failed: {reason}"
        )


@dataclass(frozen=True)
class _Request:
    """Bytes under way between memory and a file."""

    file: GdsFile
    finish: Callable[[], int]
    member_offset: int
    nbytes: int
    is_write: bool

    def wait(self) -> None:
        """Block until it has ended. Raises StoreError."""
        self.file.complete(self)


class _DeviceBytes:
    """``nbytes`` of GPU memory from an address on, which may lie inside an allocation."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


class _Move:
    """Keeps a few requests under way in every file that a chunk touches."""

    def __init__(self, files: list[GdsFile], stripes: Stripes, device_type: str) -> None:
        self._files = files
        self._stripes = stripes
        self._is_cuda = device_type == "cuda"
        # kvikio waits for the whole default stream before a request without a stream of its own.
        self._streams = {
            is_write: [[self._own_stream(file) for _ in range(_DEPTH)] for file in files]
            for is_write in (False, True)
        }

    def __call__(self, transfer: ThreadTransfer, begin: int, end: int) -> None:
        base = transfer.buffer.data_ptr()
        under_way: list[deque[_Request]] = [deque() for _ in self._files]
        try:
            for number, piece in enumerate(self._stripes.pieces(transfer.offset_bytes, begin, end)):
                requests = under_way[piece.member]
                if len(requests) == _DEPTH:
                    requests.popleft().wait()
                requests.append(self._start(base, piece, number, transfer.is_write))
            for requests in under_way:
                while requests:
                    requests.popleft().wait()
        finally:
            # Also after an error: nothing may still use the memory when the transfer lets it go.
            for request in (request for requests in under_way for request in requests):
                with suppress(StoreError):
                    request.wait()

    def _own_stream(self, file: GdsFile) -> torch.cuda.Stream | None:
        return torch.cuda.Stream() if self._is_cuda and file.is_gds else None

    def _start(self, base: int, piece: Piece, number: int, is_write: bool) -> _Request:
        address, nbytes = base + piece.begin, piece.end - piece.begin
        memory = (
            _DeviceBytes(address, nbytes)
            if self._is_cuda
            else (ctypes.c_char * nbytes).from_address(address)
        )
        turn = number // len(self._files) % _DEPTH
        return self._files[piece.member].start(
            memory,
            nbytes,
            piece.member_offset,
            is_write=is_write,
            stream=self._streams[is_write][piece.member][turn],
        )


def _verb(is_write: bool) -> str:
    return "write" if is_write else "read"
