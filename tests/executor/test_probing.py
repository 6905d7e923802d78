"""The probe describes a machine that validates, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from teraio.contracts import drawing
from teraio.contracts.hardware import Hardware, Slowdown
from teraio.errors import InputError
from teraio.executor import probe
from teraio.executor.probing import Measurements, machine, measure_machine, usable_memory_bytes
from teraio.executor.probing.disks import Disk, DiskProbe
from teraio.executor.probing.effort import FULL, QUICK
from teraio.executor.probing.fitting import KINDS
from teraio.executor.probing.hosts import measure_host, measure_kernels
from teraio.executor.probing.kernels import slowdown_factor, weighted_slowdown
from teraio.executor.probing.limits import Limits
from teraio.executor.probing.places import GpuPlace
from teraio.executor.probing.plot_measurements import plot_measurements

MIB = 2**20
SIZES = (MIB, 2 * MIB - 5)


@pytest.fixture(scope="module")
def threads_before() -> set[threading.Thread]:
    """Those of the process before it probed."""
    return set(threading.enumerate())


@pytest.fixture(scope="module")
def usable_before() -> int:
    """Memory of the machine before it was probed; some machines grow."""
    return usable_memory_bytes()


@pytest.fixture(scope="module")
def probed(
    tmp_path_factory: pytest.TempPathFactory,
    usable_before: int,
    threads_before: set[threading.Thread],
) -> tuple[Measurements, list[Path], list[str]]:
    """One quick probe of two directories for all tests: result, directories, what it said."""
    folders = [tmp_path_factory.mktemp("disk") for _ in range(2)]
    said: list[str] = []
    measured = measure_machine(
        directory=folders, quick=True, sizes=SIZES, sustained=0.2, progress=said.append
    )
    return measured, folders, said


@pytest.fixture
def hardware(probed: tuple[Measurements, list[Path], list[str]]) -> Hardware:
    """What it came to."""
    return probed[0].hardware


def test_the_result_survives_its_file(hardware: Hardware) -> None:
    """What was measured can be saved and validates when it is read again."""
    assert Hardware.from_toml(hardware.to_toml(), "probed") == hardware


def test_rates_are_those_of_a_machine(hardware: Hardware) -> None:
    """Memory moves gigabytes a second, a disk megabytes; latencies are far below a second."""
    host = hardware.host
    assert 0.05e9 < host.duplex_read_rate <= host.read_rate < 1e12
    assert 0.05e9 < host.duplex_write_rate <= host.write_rate < 1e12
    assert 0 <= host.latency_seconds < 0.1
    for ssd in hardware.ssd:
        assert 1e6 < ssd.duplex_read_rate <= ssd.read_rate < 1e12
        assert 1e6 < ssd.duplex_write_rate <= ssd.write_rate < 1e12
        assert 0 <= ssd.latency_seconds < 0.5
    assert hardware.slowdown.both >= 1


def test_the_link_never_binds_on_a_cpu(hardware: Hardware) -> None:
    """Main memory is the link; all devices at full rate together stay within it."""
    link, host = hardware.link[0], hardware.host
    for kind in KINDS:
        ssds = sum(getattr(ssd, f"{kind}_rate") for ssd in hardware.ssd)
        assert getattr(link, f"{kind}_rate") >= getattr(host, f"{kind}_rate") + ssds - 1


def test_capacities_fit_the_machine(
    hardware: Hardware,
    probed: tuple[Measurements, list[Path], list[str]],
    usable_before: int,
) -> None:
    """Half of the memory plays the GPU, a quarter the host; the disk keeps a tenth free."""
    least, most = sorted((usable_before, usable_memory_bytes()))
    assert 0 < least <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert least // 2 <= hardware.gpu[0].memory_bytes <= most // 2
    assert least // 4 <= hardware.host.memory_bytes <= most // 4
    system = os.statvfs(probed[1][0])
    assert 0 < hardware.ssd[0].capacity_bytes < system.f_blocks * system.f_frsize


def test_it_cleans_up_and_says_what_it_does(
    hardware: Hardware,
    probed: tuple[Measurements, list[Path], list[str]],
    threads_before: set[threading.Thread],
) -> None:
    """No file, no thread; each given directory is a device of its own."""
    _, folders, said = probed
    assert all(list(folder.iterdir()) == [] for folder in folders)
    started = set(threading.enumerate()) - threads_before
    assert not [thread for thread in started if thread.name.startswith("teraio-")]
    assert [(ssd.name, ssd.paths) for ssd in hardware.ssd] == [
        ("ssd0", (str(folders[0]),)),
        ("ssd1", (str(folders[1]),)),
    ]
    assert sum(str(folder) in line for folder in folders for line in said) == 2
    assert said[-1] == "all disks at once"


def test_tables_are_complete(probed: tuple[Measurements, list[Path], list[str]]) -> None:
    """Every path has every kind at every size, and what the fit makes of it; all of it is JSON."""
    data = json.loads(json.dumps(probed[0].to_dict()))
    rows = data["rates"]["rows"]
    assert {(row["device"], row["kind"], row["bytes"]) for row in rows} == {
        (device, kind, size)
        for device in ("host", "ssd0", "ssd1")
        for kind in KINDS
        for size in SIZES
    }
    for row in rows:
        # Time predicted over time measured, as rates.
        assert row["rate"] / row["fitted_rate"] - 1 == pytest.approx(row["misfit"])
    assert abs(data["worst_misfit"]) == pytest.approx(max(abs(row["misfit"]) for row in rows))
    assert [row["kind"] for row in data["kernels"]["rows"]] == list(QUICK.kernels)
    assert {row["device"] for row in data["sustained_writes"]["rows"]} == {"ssd0", "ssd1"}
    assert data["gpu"][0]["name"] == "main memory"


def test_one_drive_given_twice_is_noticed(
    probed: tuple[Measurements, list[Path], list[str]],
) -> None:
    """Both directories lie on one file system, so they share its rates."""
    assert any("lie on one file system" in note for note in probed[0].notes)


def test_the_sustained_rate_limits_writes(
    probed: tuple[Measurements, list[Path], list[str]],
) -> None:
    """No drive is said to write faster than it did in the long run."""
    for writes, ssd in zip(probed[0].sustained, probed[0].hardware.ssd, strict=True):
        assert writes.end_seconds[-1] >= 0.2
        assert ssd.write_rate <= writes.rate * 1.001


def test_the_picture_shows_paths_and_writes(
    probed: tuple[Measurements, list[Path], list[str]], tmp_path: Path
) -> None:
    """One panel per path, one for the writes over time."""
    axes = plot_measurements(probed[0])
    drawing.save_picture(axes, tmp_path / "probe.png")
    assert len(axes.figure.axes) == 4
    assert axes.figure.axes[-1].get_ylabel() == "sustained writes (GB/s)"
    assert (tmp_path / "probe.png").stat().st_size > 10_000


def test_striped_directories_are_one_device(tmp_path: Path) -> None:
    """Two folders, one SSD; without --sustained a quick probe does not wait for the cache."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    measured = measure_machine(directory=folders, stripe=True, quick=True, sizes=SIZES)
    (ssd,) = measured.hardware.ssd
    assert ssd.paths == tuple(map(str, folders))
    assert measured.sustained == ()
    assert [list(folder.iterdir()) for folder in folders] == [[], []]


def test_a_temporary_folder_is_not_in_the_result() -> None:
    """It is gone; host memory that was asked for is the host tier's; no random number is drawn."""
    before = torch.get_rng_state()
    hardware = probe(quick=True, sizes=["1MiB"], host_memory="64MiB")
    assert hardware.ssd[0].paths == ()
    assert hardware.host.memory_bytes == 64 * MIB
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "meta"}, "device: must be cpu, cuda or cuda:N, got 'meta'"),
        ({"sizes": [0]}, "sizes: between 1 byte and"),
        ({"sizes": ["1TiB"]}, "sizes: between 1 byte and"),
        ({"sizes": []}, "sizes: between 1 byte and"),
        ({"sustained": -1.0}, "sustained: must be 0 or more seconds, got -1"),
        ({"stripe": True}, "stripe: needs a --directory on each"),
        ({"directory": "/nowhere"}, "directory: /nowhere is not a directory"),
        ({"host_memory": "1PiB"}, "host_memory: needs 1126 TB"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line that says what to change, before anything is measured."""
    monkeypatch.setattr(machine, "measure_host", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr("teraio.executor.probing.limits.available_memory_bytes", lambda: 0)
    with pytest.raises(InputError, match=message):
        probe(quick=True, **arguments)


def test_disks_that_slow_each_other_down_are_described_by_what_they_keep(tmp_path: Path) -> None:
    """Shares lie between nothing and all, whatever noise says."""
    disks = [Disk("ssd0", (tmp_path,)), Disk("ssd1", (tmp_path,))]
    effort = replace(QUICK, sizes=SIZES, disk_bytes=8 * MIB)
    disk_probe = DiskProbe(GpuPlace(0, "cpu"), effort, None, lambda message: None)
    measured = [disk_probe.measure(disk) for disk in disks]
    assert all(0 < share <= 1 for share in disk_probe.shares_beside_each_other(measured))


def test_slowdown_of_partly_covered_kernels() -> None:
    """2 s of kernels; beside transfers they run at half speed, for 4, 2 or 0.5 s."""
    assert slowdown_factor(2.0, 4.0, 4.5) == pytest.approx(2.0)
    assert slowdown_factor(2.0, 3.0, 2.0) == pytest.approx(2.0)
    assert slowdown_factor(2.0, 2.25, 0.5) == pytest.approx(2.0)


def test_one_slowdown_stands_for_a_step() -> None:
    """Kinds count by their shares, those that were measured: here 0.35 and 0.2."""
    slowdown = weighted_slowdown(
        {"fp32 matmul": Slowdown(read=1.0), "elementwise": Slowdown(read=1.55, both=1.11)}
    )
    assert slowdown.read == pytest.approx(1.2)
    assert slowdown.both == pytest.approx(1.04)


def test_sizes_fit_into_small_memory() -> None:
    """A sixteenth each: four copies in a quarter of a machine of 1 GiB."""
    limits = Limits(2**30, 2**30, None, None)
    effort = machine._effort(FULL, None, None, limits)
    assert effort.sizes == (2**18, 2**20, 2**22, 2**24, 2**26)
    assert effort.memory_bytes == 64 * MIB
    assert machine._effort(FULL, ["1MiB", 2**20, 5], 3.0, limits).sizes == (5, 2**20)


@pytest.mark.gpu
def test_gpu(tmp_path: Path) -> None:
    """Links are what pinned copies show; the fit holds; memory is what is free."""
    before = torch.cuda.get_rng_state()
    measured = measure_machine(device="cuda", directory=tmp_path, quick=True)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    hardware = measured.hardware
    assert len(hardware.gpu) == torch.cuda.device_count()
    for gpu in range(len(hardware.gpu)):
        free_bytes, _ = torch.cuda.mem_get_info(gpu)
        assert 0 < hardware.gpu[gpu].memory_bytes <= free_bytes + 2**30
        assert hardware.link_of_rank(gpu).read_rate > 1e9
    host_paths = [path for path in measured.paths if path.device == "host"]
    assert all(abs(path.worst_misfit) < 0.6 for path in host_paths)
    assert 0 < hardware.host.latency_seconds < 100e-6


@pytest.mark.gpu
def test_gpu_does_not_count_the_time_to_issue() -> None:
    """Transfers of 256 KiB take less time than a thread needs to issue one."""
    effort = replace(FULL, sizes=(2**18, 64 * MIB), rounds=3)
    path = measure_host(GpuPlace(0, "cuda:0"), effort)
    small, large = (
        next(x for x in path.timings if (x.kind, x.nbytes) == ("read", size))
        for size in effort.sizes
    )
    assert small.seconds - small.nbytes / large.rate < 30e-6


@pytest.mark.gpu
def test_gpu_disk_is_measured_through_both_backends(tmp_path: Path) -> None:
    """Or it is said why kvikio does not work here."""
    measured = measure_machine(device="cuda:0", directory=tmp_path, quick=True, sustained=1.0)
    backends = {path.backend for path in measured.paths if path.device == "ssd0"}
    assert backends & {"file", "file buffered"}
    refused = any("without GPUDirect Storage" in note for note in measured.notes)
    assert bool(backends & {"gds", "gds-compat"}) is not refused
    assert measured.sustained[0].rate > 1e6
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
def test_gpu_slowdowns_are_by_kind() -> None:
    """All four kinds; copies cost kernels little on a GPU that has engines for them."""
    effort = replace(FULL, sizes=(64 * MIB,), rounds=3)
    place = GpuPlace(0, "cuda:0")
    slowdowns = measure_kernels(place, measure_host(place, effort), effort)
    assert list(slowdowns) == list(FULL.kernels)
    assert all(slowdown.both < 1.5 for slowdown in slowdowns.values())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_two_gpus_at_once(tmp_path: Path) -> None:
    """Every GPU has a link, and all at once none is faster than alone."""
    measured = measure_machine(device="cuda", directory=tmp_path, quick=True)
    assert measured.together is not None
    members = [gpu for link in measured.together.links for gpu in link.gpus]
    assert sorted(members) == list(range(torch.cuda.device_count()))
    for gpu, rates in enumerate(measured.together.rates):
        assert 1e9 < rates["read"] < 1.2 * measured.hardware.host.read_rate
        assert measured.hardware.gpu[gpu].link in {link.name for link in measured.hardware.link}
