"""Disks through both backends, with files in the place of kvikio where there is no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from teraio.contracts.hardware import Ssd
from teraio.errors import StoreError
from teraio.executor.probing import disks
from teraio.executor.probing.disks import Disk, DiskProbe
from teraio.executor.probing.effort import MIB, QUICK, Effort
from teraio.executor.probing.fitting import Fit, Timing
from teraio.executor.probing.measurements import MeasuredPath
from teraio.executor.probing.places import GpuPlace
from teraio.executor.probing.sustained import SustainedWrites
from teraio.executor.probing.transfers import TransferBench
from teraio.executor.stores.io_meter import FileUse
from teraio.executor.stores.ssd import SsdStore, open_ssd

MB = 10**6
EFFORT = replace(QUICK, sizes=(2**18, MIB), disk_bytes=4 * MIB)


class CpuAsGpu(GpuPlace):
    """A CPU that the probe takes for a GPU."""

    @property
    def is_cuda(self) -> bool:
        """It says so."""
        return True


class FilesAsKvikio:
    """A store whose files call themselves ``backend``."""

    def __init__(self, store: SsdStore, backend: str) -> None:
        self._store = store
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    @property
    def file_uses(self) -> list[FileUse]:
        """What the files have done, under the other name."""
        return [replace(use, backend=self._backend) for use in self._store.file_uses]


def with_kvikio(monkeypatch: pytest.MonkeyPatch, answer: str | StoreError) -> list[str]:
    """Let backend ``gds`` be files that call themselves so, or fail; returns what is opened."""
    opened: list[str] = []

    def open_instead(ssd: Ssd, *arguments: Any, device: str, backend: str) -> SsdStore:
        opened.append(backend)
        if backend == "gds" and isinstance(answer, StoreError):
            raise answer
        store = open_ssd(ssd, *arguments, device=device, backend="file")
        return store if backend == "file" else FilesAsKvikio(store, str(answer))

    monkeypatch.setattr(disks, "open_ssd", open_instead)
    return opened


def measured(folder: Path, sustained_seconds: float = 0.0) -> disks.MeasuredDisk:
    """One disk, measured from what passes for a GPU."""
    effort = replace(EFFORT, sustained_seconds=sustained_seconds)
    probe = DiskProbe(CpuAsGpu(0, "cpu"), effort, None, lambda message: None)
    return probe.measure(Disk("ssd0", (folder,)))


@pytest.mark.parametrize("backend", ["gds", "gds-compat"])
def test_both_backends_are_measured(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The faster one in both directions comes first and is the one that is written to for long."""
    opened = with_kvikio(monkeypatch, backend)
    result = measured(tmp_path, sustained_seconds=0.1)
    assert result.gds_error == ""
    first, second = result.paths
    assert {first.backend, second.backend} == {"file", backend}
    assert _both(first.fit) >= _both(second.fit)
    assert opened == ["file", "gds", "file" if first.backend == "file" else "gds"]
    assert result.sustained is not None
    assert result.as_ssd().gds is (first.backend == "gds")


def test_without_kvikio_files_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it said is kept, and nothing is left of the attempt."""
    opened = with_kvikio(monkeypatch, StoreError("kvikio does not load here"))
    result = measured(tmp_path)
    assert [path.backend for path in result.paths] == ["file"]
    assert result.gds_error == "kvikio does not load here"
    assert opened == ["file", "gds"]
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fails_ends_the_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ordinary files there is nothing to describe."""

    def fail(*arguments: Any, **named: Any) -> SsdStore:
        raise StoreError("ssd0: cannot create a file")

    monkeypatch.setattr(disks, "open_ssd", fail)
    with pytest.raises(StoreError, match="cannot create a file"):
        measured(tmp_path)


def test_sustained_writes_are_read_back_from_a_small_part_of_what_they_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the file is full before it counts; the store's own files count the same bytes."""
    opened: list[SsdStore] = []

    def remember(*arguments: Any, **named: Any) -> SsdStore:
        opened.append(open_ssd(*arguments, **named))
        return opened[-1]

    monkeypatch.setattr(disks, "open_ssd", remember)
    effort = replace(EFFORT, sustained_seconds=0.5)
    probe = DiskProbe(GpuPlace(0, "cpu"), effort, None, lambda message: None)
    fit = Fit(1e9, 2e8, 1e9, 2e8, 0.0)
    path = MeasuredPath("ssd0", "file", 0, (), fit)
    writes = probe._sustain(Disk("ssd0", (tmp_path,)), path)
    # 15 % of what 200 MB/s would write in half a second are less than two transfers.
    assert opened[0].reserved_bytes == 32 * MIB
    assert writes.read_bytes > 0
    assert sum(use.read_bytes for use in opened[0].file_uses) == writes.read_bytes
    assert sum(use.write_bytes for use in opened[0].file_uses) == writes.total_bytes[-1]


def test_rounds_on_a_disk_have_a_length_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual disk changes its pace within the time that is enough for copies in memory."""
    seconds: list[float] = []
    timings = TransferBench.timings

    def remember(bench: TransferBench, effort: Effort, sizes: Sequence[int]) -> list[Timing]:
        seconds.append(effort.round_seconds)
        return timings(bench, effort, sizes)

    monkeypatch.setattr(TransferBench, "timings", remember)
    effort = replace(EFFORT, round_seconds=1e-4, disk_round_seconds=2e-4)
    DiskProbe(GpuPlace(0, "cpu"), effort, None, print).measure(Disk("ssd0", (tmp_path,)))
    assert seconds == [2e-4]


def test_a_latency_is_not_counted_twice(tmp_path: Path) -> None:
    """Transfers of 16 MB that took 10 ms in the long run, 2 ms of them the latency."""
    fit = Fit(3e9, 4e9, 2.9e9, 3e9, 2e-3)
    writes = SustainedWrites("ssd0", (0.01, 0.02), (16 * MB, 32 * MB), 1, 16 * MB, 0.01)
    path = MeasuredPath("ssd0", "file", 0, (), fit)
    measured = disks.MeasuredDisk(Disk("ssd0", (tmp_path,)), (path,), writes)
    ssd = measured.as_ssd()
    assert ssd.latency_seconds + 16 * MB / ssd.write_rate == pytest.approx(0.01)
    assert ssd.latency_seconds + 16 * MB / ssd.read_rate == pytest.approx(0.01)
    assert (ssd.duplex_read_rate, ssd.duplex_write_rate) == (2e9, 2e9)


@pytest.mark.parametrize(("lasting", "written"), [(5e9, 4e9), (3e9, 3e9)])
def test_reads_of_the_long_run_count_and_writes_only_if_slower(
    lasting: float, written: float, tmp_path: Path
) -> None:
    """A short probe of a virtual disk sees one moment of it; a cache must not be believed."""
    fit = Fit(1.6e9, 4e9, 1e9, 1.1e9, 0.0)
    seconds = 16 * MB / lasting
    writes = SustainedWrites("ssd0", (seconds,), (16 * MB,), 0, 19 * MB, 0.01)
    path = MeasuredPath("ssd0", "file", 0, (), fit)
    ssd = disks.MeasuredDisk(Disk("ssd0", (tmp_path,)), (path,), writes).as_ssd()
    assert (ssd.read_rate, ssd.write_rate) == pytest.approx((1.9e9, written))
    assert (ssd.duplex_read_rate, ssd.duplex_write_rate) == (1e9, 1.1e9)


def _both(fit: Any) -> float:
    total: float = fit.duplex_read_rate + fit.duplex_write_rate
    return total
