"""From measurements to Hardware, with machines that no test machine is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from teraio.contracts.hardware import Hardware, Slowdown
from teraio.executor.probing.description import Raw, describe, notes_on_memory
from teraio.executor.probing.disks import Disk, MeasuredDisk
from teraio.executor.probing.fitting import KINDS, Fit, Timing
from teraio.executor.probing.limits import Limits
from teraio.executor.probing.links import LinkGroup, Together
from teraio.executor.probing.measurements import MeasuredPath, Measurements
from teraio.executor.probing.places import GpuPlace
from teraio.executor.probing.sustained import SustainedWrites

GB = 10**9
LIMITS = Limits(100 * GB, 100 * GB, None, None)
DISK_FIT = Fit(7e9, 6e9, 4e9, 3e9, 1e-4)


def path(device: str, backend: str, fit: Fit, gpu: int = 0) -> MeasuredPath:
    """A path that its fit describes exactly."""
    timings = tuple(Timing(kind, 2**20, fit.seconds(kind, 2**20)) for kind in KINDS)
    return MeasuredPath(device, backend, gpu, timings, fit)


def four_gpus(folder: Path) -> Raw:
    """Two links of two GPUs each; the second GPU's own rate is a little lower. One disk."""
    fits = [Fit(55e9, 55e9, 49e9, 49e9, 15e-6), Fit(50e9, 50e9, 45e9, 45e9, 20e-6)] * 2
    shared = dict(zip(KINDS, (60e9, 58e9, 50e9, 50e9), strict=True))
    links = (LinkGroup((0, 1), shared), LinkGroup((2, 3), shared))
    disk = MeasuredDisk(Disk("ssd0", (folder,)), (path("ssd0", "gds", DISK_FIT),), None)
    return Raw(
        places=[GpuPlace(i, f"cuda:{i}", node=i // 2) for i in range(4)],
        host_paths=[path("host", "memory", fit, gpu) for gpu, fit in enumerate(fits)],
        slowdowns={"elementwise": Slowdown(both=1.03)},
        together=Together(tuple([shared] * 4), links, 200e9),
        disks=[disk],
        shares=[1.0],
    )


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch as it is beside four GPUs."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: f"H200 {gpu}")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (130 * GB, 140 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda gpu: 2 * GB)


def described(raw: Raw) -> Measurements:
    """Without limits that changed or wishes."""
    return describe("probed cuda", raw, LIMITS, LIMITS, None, keeps_paths=True)


@pytest.mark.usefixtures("gpus")
def test_four_gpus_on_two_links(tmp_path: Path) -> None:
    """GPUs of a pair name the same link; the host is as fast as the fastest of them."""
    measured = described(four_gpus(tmp_path))
    hardware = measured.hardware
    assert [gpu.link for gpu in hardware.gpu] == ["link0", "link0", "link1", "link1"]
    assert [gpu.memory_bytes for gpu in hardware.gpu] == [132 * GB] * 4
    assert len(hardware.link) == 2
    assert hardware.link[0].write_rate == 58e9
    assert (hardware.host.read_rate, hardware.host.latency_seconds) == (55e9, 20e-6)
    assert (hardware.host.memory_rate, hardware.host.numa_nodes) == (200e9, (0, 0, 1, 1))
    assert hardware.host.memory_bytes == 75 * GB
    assert any("--numa-binding" in note for note in measured.notes)
    assert Hardware.from_toml(hardware.to_toml()) == hardware


@pytest.mark.usefixtures("gpus")
def test_a_gpu_with_a_link_of_its_own(tmp_path: Path) -> None:
    """Its link has the rates of its own transfers."""
    raw = four_gpus(tmp_path)
    one = replace(raw, places=raw.places[1:2], host_paths=raw.host_paths[1:2], together=None)
    hardware = described(one).hardware
    assert (hardware.link[0].read_rate, hardware.link[0].latency_seconds) == (50e9, 0)
    assert hardware.host.numa_nodes == (0,)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("backend", "is_gds", "note"),
    [
        ("gds", True, ""),
        ("gds-compat", False, "without GPUDirect"),
        ("file", False, ""),
        ("file buffered", False, "page cache"),
    ],
)
def test_only_gpudirect_is_gds(backend: str, is_gds: bool, note: str, tmp_path: Path) -> None:
    """Whatever goes through host memory costs its bandwidth, and the file says so."""
    raw = four_gpus(tmp_path)
    disk = replace(raw.disks[0], paths=(path("ssd0", backend, DISK_FIT),))
    measured = described(replace(raw, disks=[disk]))
    assert measured.hardware.ssd[0].gds is is_gds
    assert any(note in text for text in measured.notes if text.startswith("ssd0")) is bool(note)


@pytest.mark.usefixtures("gpus")
def test_gds_that_does_not_work_is_told(tmp_path: Path) -> None:
    """With what kvikio said."""
    raw = four_gpus(tmp_path)
    disk = replace(raw.disks[0], gds_error="kvikio is not installed")
    notes = described(replace(raw, disks=[disk])).notes
    assert "ssd0 without GPUDirect Storage: kvikio is not installed" in notes


@pytest.mark.usefixtures("gpus")
def test_writes_are_as_fast_as_in_the_long_run(tmp_path: Path) -> None:
    """6 GB/s until the cache was full, 2 GB/s then: also beside reads not more."""
    raw = four_gpus(tmp_path)
    writes = SustainedWrites("ssd0", (1.0, 20.0, 30.0), (6 * GB, 44 * GB, 64 * GB), steady_from=2)
    measured = described(replace(raw, disks=[replace(raw.disks[0], sustained=writes)]))
    ssd = measured.hardware.ssd[0]
    assert (ssd.write_rate, ssd.duplex_write_rate, ssd.read_rate) == (2e9, 2e9, 7e9)
    assert "ssd0 writes 6.00 GB/s at first and 2.00 GB/s in the long run" in measured.notes[0]


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(("share", "read_rate"), [(0.95, 7e9), (0.5, 3.5e9)])
def test_disks_beside_each_other(share: float, read_rate: float, tmp_path: Path) -> None:
    """A tenth is noise; more is what the disks behind one bridge cost each other."""
    measured = described(replace(four_gpus(tmp_path), shares=[share]))
    assert measured.hardware.ssd[0].read_rate == read_rate
    assert any("keeps 50%" in note for note in measured.notes) is (share < 0.9)


def test_memory_that_may_grow_is_noticed() -> None:
    """It has grown meanwhile, or its control group allows more than there seems to be."""
    small = Limits(31 * GB, 31 * GB, None, None)
    assert notes_on_memory(small, small) == []
    (grown,) = notes_on_memory(small, replace(small, machine_bytes=64 * GB))
    assert "showed 31.0 GB of memory at first and 64.0 GB later" in grown
    allowed = replace(small, control_group_bytes=128 * GB)
    (note,) = notes_on_memory(allowed, allowed)
    assert "allows 128 GB, the machine shows 31.0 GB" in note
    assert "--host-memory" in note
