"""An SSD device as a store: which backend serves it, by wish or by measurement."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from teraio.contracts.hardware import Ssd
from teraio.errors import InputError, StoreError
from teraio.executor.stores.base import Store
from teraio.executor.stores.file import FileStore
from teraio.executor.stores.gds import GdsStore
from teraio.executor.stores.io_meter import FileUse
from teraio.executor.stores.striped_space import Directories

BACKENDS = ("auto", "gds", "file")

_TRANSFER_BYTES = 16 * 2**20
_TRANSFERS = 2
"""Of each direction and round: 64 MiB with both."""

_ROUNDS = 2
"""The first one warms up."""

_CLEARLY = 1.1
_BUSY_SECONDS = 0.1
_SPIN_CYCLES = 2_000_000
"""About a millisecond of a GPU."""


class SsdStore(Store, Protocol):
    """A store on disk."""

    @property
    def file_uses(self) -> Sequence[FileUse]:
        """What each file has done so far; also of a closed store."""
        ...


@dataclass(frozen=True)
class BackendRates:
    """Bytes per second of each backend, both directions at once, beside busy kernels on a GPU.

    ``gds`` is None where it does not work, and ``gds_error`` says why; ``is_direct`` says whether
    GPUDirect Storage serves it, rather than kvikio's compatibility mode.
    """

    file: float
    gds: float | None
    gds_error: str = ""
    is_direct: bool = False

    @property
    def fastest(self) -> str:
        """The backend to take. One that bounces all the same must be clearly faster: its copies
        wait for kernels, and kernels for them.
        """
        needed = self.file if self.is_direct else _CLEARLY * self.file
        return "gds" if self.gds is not None and self.gds > needed else "file"


def open_ssd(
    ssd: Ssd,
    directories: Directories,
    reserved_bytes: int,
    *,
    device: str = "cpu",
    backend: str = "auto",
) -> SsdStore:
    """The store of a Hardware's SSD, striped over ``directories`` if there are several.

    ``auto`` measures both backends there for less than a second and takes the faster one; on a CPU
    there is nothing that GPUDirect could reach, so it is ``file``. Raises InputError (backend,
    directory), CapacityError, StoreError (disk; ``gds`` where it does not work, with a remedy).
    """
    check_backend(backend)
    is_cuda = torch.device(device).type == "cuda"
    if backend == "auto":
        backend = _fastest(ssd, directories, device) if is_cuda else "file"
    if backend == "gds":
        _try_gds(ssd, directories, device)
        return GdsStore.of_ssd(ssd, directories, reserved_bytes, device=device)
    return FileStore.of_ssd(ssd, directories, reserved_bytes, device=device)


def check_backend(backend: str) -> None:
    """Raise InputError for a backend that there is not."""
    if backend not in BACKENDS:
        raise InputError(f"ssd_backend: must be one of {BACKENDS}, got {backend!r}")


def measure_backends(ssd: Ssd, directories: Directories, *, device: str = "cuda") -> BackendRates:
    """How fast each backend is in ``directories``. Raises InputError, StoreError (``file``)."""
    ssd = replace(ssd, capacity_bytes=2 * _TRANSFERS * _TRANSFER_BYTES)
    size = ssd.capacity_bytes
    with ExitStack() as stack:
        file = FileStore.of_ssd(ssd, directories, size, device=device)
        stack.callback(file.close)
        file_rate = _rate(file, device)
    try:
        with ExitStack() as stack:
            gds = GdsStore.of_ssd(ssd, directories, size, device=device)
            stack.callback(gds.close)
            return BackendRates(file_rate, _rate(gds, device), is_direct=gds.is_gds)
    except StoreError as error:
        return BackendRates(file_rate, None, str(error))


def _fastest(ssd: Ssd, directories: Directories, device: str) -> str:
    try:
        return measure_backends(ssd, directories, device=device).fastest
    except (StoreError, torch.OutOfMemoryError):
        return "file"  # Whatever is wrong, opening the store says it; or there is room for less.


def _rate(store: Store, device: str) -> float:
    """Bytes per second, reading and writing at once, while the compute stream is busy.

    Beside an idle GPU a backend would look fast whose copies wait for every kernel.
    """
    buffers = [
        torch.zeros(_TRANSFER_BYTES, dtype=torch.uint8, device=device)
        for _ in range(2 * _TRANSFERS)
    ]
    places = range(0, len(buffers) * _TRANSFER_BYTES, _TRANSFER_BYTES)
    for buffer, place in zip(buffers, places, strict=True):
        store.write(buffer, place, _TRANSFER_BYTES).wait()
    seconds = 0.0
    for _ in range(_ROUNDS):
        after = _keep_busy(device)
        begin = time.perf_counter()
        transfers = [
            (store.write if index % 2 else store.read)(buffer, place, _TRANSFER_BYTES, after=after)
            for index, (buffer, place) in enumerate(zip(buffers, places, strict=True))
        ]
        for transfer in transfers:
            transfer.wait()
        seconds = time.perf_counter() - begin
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
    return len(buffers) * _TRANSFER_BYTES / seconds


def _keep_busy(device: str) -> torch.cuda.Event | None:
    """Give the current stream work for a while; an event before it."""
    if torch.device(device).type != "cuda":
        return None
    torch.cuda.synchronize()
    before: torch.cuda.Event = torch.cuda.current_stream().record_event()
    for _ in range(round(_BUSY_SECONDS * 1000)):
        torch.cuda._sleep(_SPIN_CYCLES)
    return before


def _try_gds(ssd: Ssd, directories: Directories, device: str) -> None:
    """Raise StoreError if bytes do not come back from there through kvikio."""
    nbytes = ssd.alignment_bytes + 1
    source = torch.arange(nbytes, device=device).to(torch.uint8)
    destination = torch.zeros_like(source)
    with ExitStack() as stack:
        store = GdsStore.of_ssd(ssd, directories, 2 * ssd.alignment_bytes, device=device)
        stack.callback(store.close)
        try:
            store.write(source, 0, nbytes).wait()
            store.read(destination, 0, nbytes).wait()
        except StoreError as error:
            raise StoreError(
                f"{error}; kvikio does not work here: say --ssd-backend file (ssd_backend='file')"
            ) from error
    if not torch.equal(source, destination):
        raise StoreError(
            f"{ssd.name}: kvikio gives back other bytes than it was given; say --ssd-backend file "
            "(ssd_backend='file')"
        )
