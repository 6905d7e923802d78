"""Disks through both backends, with files in the place of kvikio where there is no GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from teraio.contracts.hardware import Ssd
from teraio.errors import StoreError
from teraio.executor.probing import disks
from teraio.executor.probing.disks import Disk, DiskProbe
from teraio.executor.probing.effort import MIB, QUICK
from teraio.executor.probing.places import GpuPlace
from teraio.executor.stores.io_meter import FileUse
from teraio.executor.stores.ssd import SsdStore, open_ssd

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


def _both(fit: Any) -> float:
    total: float = fit.duplex_read_rate + fit.duplex_write_rate
    return total
