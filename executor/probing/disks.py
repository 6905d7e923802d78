"""Rates of disks: through files that bounce in host memory, and through GPUDirect Storage."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from teraio.contracts.hardware import Ssd
from teraio.errors import StoreError
from teraio.executor.probing.effort import MIB, Effort
from teraio.executor.probing.fitting import KINDS, fit_rates
from teraio.executor.probing.limits import check_directory, free_disk_bytes, is_in_memory
from teraio.executor.probing.links import rates_at_once
from teraio.executor.probing.measurements import MeasuredPath
from teraio.executor.probing.numa import near_node
from teraio.executor.probing.places import GpuPlace
from teraio.executor.probing.sustained import SustainedWrites, sustain_writes
from teraio.executor.probing.transfers import Background, TransferBench
from teraio.executor.stores import Store
from teraio.executor.stores.ssd import SsdStore, open_ssd

Say = Callable[[str], None]

_BUFFER_BYTES = 64 * MIB
_SUSTAINED_BYTES = 16 * MIB
_FREE_SHARE = 0.5
_WRITTEN_SHARE = 0.15
"""Sustained writes go round in at most this share of the free space, and in about this share of
what they write: most of it goes to blocks that have been written before, as in training.
"""

_MOST_LATENCY_SHARE = 0.5
"""A latency that was fitted to small transfers takes no more of a large one's time."""

_FALL = 0.1
"""Disks that lose more than this share beside each other are described by what they keep."""


@dataclass(frozen=True)
class Disk:
    """An SSD device to measure: its folders, of which several are one striped device."""

    name: str
    folders: tuple[Path, ...]

    @property
    def free_bytes(self) -> int:
        """What files spread evenly over the folders may take."""
        return len(self.folders) * min(free_disk_bytes(folder) for folder in self.folders)

    @property
    def is_in_memory(self) -> bool:
        """Whether it is no disk at all."""
        return any(is_in_memory(folder) for folder in self.folders)


@dataclass(frozen=True)
class MeasuredDisk:
    """All paths to a disk, the best one first; ``sustained`` None if that was not asked for.

    ``gds_error`` says why there is no path through GPUDirect Storage, where one was tried.
    """

    disk: Disk
    paths: tuple[MeasuredPath, ...]
    sustained: SustainedWrites | None
    gds_error: str = ""

    @property
    def lasting_write_rate(self) -> float | None:
        """Bytes per second of the sustained writes beyond the latency, as the fitted rates are."""
        return None if self.sustained is None else self._beyond_latency(self.sustained.rate)

    @property
    def lasting_read_rate(self) -> float | None:
        """The same of what was read back between them."""
        rate = None if self.sustained is None else self.sustained.read_rate
        return None if rate is None else self._beyond_latency(rate)

    def as_ssd(self) -> Ssd:
        """What Hardware says of it.

        A sustained write rate below that of short writes replaces it. Reads between them went on
        for longer and over more of the disk than any others: theirs is the read rate.
        """
        fields = asdict(self.paths[0].fit)
        if self.lasting_write_rate is not None:
            fields["write_rate"] = min(fields["write_rate"], _rounded(self.lasting_write_rate))
        if self.lasting_read_rate is not None:
            fields["read_rate"] = _rounded(self.lasting_read_rate)
        for kind in ("read_rate", "write_rate"):
            fields[f"duplex_{kind}"] = min(fields[f"duplex_{kind}"], fields[kind])
        return Ssd(
            name=self.disk.name,
            capacity_bytes=self.disk.free_bytes * 9 // 10,
            paths=tuple(str(folder) for folder in self.disk.folders),
            gds=self.paths[0].backend == "gds",
            **fields,
        )

    def _beyond_latency(self, rate: float) -> float:
        """The rate that with the fitted latency makes sustained transfers as fast as they were.

        The latency is part of each transfer's time: left in the rate it would count twice.
        """
        assert self.sustained is not None
        nbytes = self.sustained.transfer_bytes
        seconds = nbytes / rate
        latency = min(self.paths[0].fit.latency_seconds, _MOST_LATENCY_SHARE * seconds)
        return nbytes / (seconds - latency)


class DiskProbe:
    """Measures disks from one GPU, or from the CPU."""

    def __init__(
        self, place: GpuPlace, effort: Effort, background: Background | None, say: Say
    ) -> None:
        self._place = place
        self._effort = effort
        self._background = background
        self._say = say
        self._half_bytes = _half_bytes(effort)

    @staticmethod
    def check(effort: Effort, disks: Sequence[Disk]) -> None:
        """Raise InputError if a folder is missing, read-only or too full."""
        for disk in disks:
            for folder in disk.folders:
                check_directory(folder, 2 * _half_bytes(effort) // len(disk.folders))

    def measure(self, disk: Disk) -> MeasuredDisk:
        """Every path to the disk, then its sustained writes on the best one.

        Raises StoreError if ordinary files do not work there.
        """
        paths, gds_error = [self._path(disk, "file")], ""
        if self._place.is_cuda:
            try:
                paths.append(self._path(disk, "gds"))
            except StoreError as error:
                gds_error = str(error)
        # What is asked of a disk at once is mostly both directions.
        paths.sort(key=lambda path: -path.fit.duplex_read_rate - path.fit.duplex_write_rate)
        sustained = None
        if self._effort.sustained_seconds > 0:
            sustained = self._sustain(disk, paths[0])
        return MeasuredDisk(disk, tuple(paths), sustained, gds_error)

    def shares_beside_each_other(self, disks: Sequence[MeasuredDisk]) -> list[float]:
        """The share of its rate that each disk keeps while all of them transfer, at most 1."""
        nbytes = max(self._effort.sizes)
        with ExitStack() as opened:
            benches = [
                self._bench(
                    opened.enter_context(
                        self._opened(x.disk, _family(x.paths[0]), 2 * self._half_bytes)
                    )
                )
                for x in disks
            ]
            count = max(4, self._half_bytes // nbytes)
            alone = [rates_at_once([bench], nbytes, count)[0] for bench in benches]
            beside = rates_at_once(benches, nbytes, count)
        return [
            min(1.0, *(b[kind] / a[kind] for kind in KINDS))
            for a, b in zip(alone, beside, strict=True)
        ]

    def _path(self, disk: Disk, backend: str) -> MeasuredPath:
        where = ", ".join(str(folder) for folder in disk.folders)
        self._say(f"{disk.name} through {backend}: files in {where}")
        with self._opened(disk, backend, 2 * self._half_bytes) as store:
            effort = replace(self._effort, round_seconds=self._effort.disk_round_seconds)
            timings = self._bench(store).timings(effort, effort.sizes)
            name = store.file_uses[0].backend
        fit = fit_rates(timings)
        return MeasuredPath(disk.name, name, self._place.index, tuple(timings), fit)

    def _sustain(self, disk: Disk, path: MeasuredPath) -> SustainedWrites:
        seconds = self._effort.sustained_seconds
        wanted_bytes = int(_WRITTEN_SHARE * seconds * path.fit.write_rate)
        file_bytes = min(wanted_bytes, int(_FREE_SHARE * disk.free_bytes))
        if disk.is_in_memory:
            file_bytes = min(file_bytes, self._half_bytes)
        num_places = max(file_bytes // _SUSTAINED_BYTES, 2)
        file_bytes = num_places * _SUSTAINED_BYTES
        with self._opened(disk, _family(path), file_bytes) as store:
            bench = TransferBench(
                store,
                self._place.device,
                store_bytes=file_bytes,
                buffer_bytes=_BUFFER_BYTES,
                writes_only=True,
            )
            return sustain_writes(
                disk.name,
                lambda is_write, place: bench.issue(is_write, _SUSTAINED_BYTES, place),
                num_places,
                seconds,
                self._say,
            )

    def _bench(self, store: Store) -> TransferBench:
        return TransferBench(
            store,
            self._place.device,
            store_bytes=self._half_bytes,
            buffer_bytes=max(_BUFFER_BYTES, max(self._effort.sizes)),
            background=self._background,
        )

    @contextmanager
    def _opened(self, disk: Disk, backend: str, file_bytes: int) -> Iterator[SsdStore]:
        """The store that training would open, on the GPU's node; its rates do not matter."""
        ssd = Ssd(name=disk.name, capacity_bytes=file_bytes, read_rate=1, write_rate=1)
        with self._place.current():
            with near_node(self._place.node):
                store = open_ssd(
                    ssd, disk.folders, file_bytes, device=self._place.device, backend=backend
                )
            try:
                yield store
            finally:
                store.close()


def _half_bytes(effort: Effort) -> int:
    """Of the file, for one direction."""
    return max(effort.disk_bytes, 2 * max(effort.sizes))


def slower(ssd: Ssd, share: float) -> Ssd:
    """The same device at ``share`` of its rates, if that is much less than all of them."""
    if share >= 1 - _FALL:
        return ssd
    rates = {name: _rounded(getattr(ssd, name) * share) for name in _RATE_FIELDS}
    slow: Ssd = replace(ssd, **rates)  # type: ignore[arg-type]
    return slow


_RATE_FIELDS = [f"{kind}_rate" for kind in KINDS]


def _rounded(rate: float) -> float:
    """Four significant digits, as fitted rates have."""
    return float(f"{rate:.4g}")


def share_a_file_system(disks: Sequence[Disk]) -> bool:
    """Whether two folders lie on the same file system, so that what is measured is one drive's."""
    numbers = [os.stat(folder).st_dev for disk in disks for folder in disk.folders]
    return len(set(numbers)) < len(numbers)


def _family(path: MeasuredPath) -> str:
    """The name that opens what called itself so: ``file buffered`` is a ``file``."""
    return "gds" if path.backend.startswith("gds") else "file"
