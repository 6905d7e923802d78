"""Disks of a machine that is known, measured again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from teraio.contracts.hardware import Gpu, Hardware, Host, Link, Ssd
from teraio.errors import InputError
from teraio.executor import probe_disks
from teraio.executor.probing import renewal
from teraio.executor.probing.effort import MIB, QUICK

SSD = Ssd(
    name="scratch",
    capacity_bytes=10**9,
    read_rate=1.0,
    write_rate=1.0,
    latency_seconds=5.0,
    bounce_bytes=2**18,
    preferred_io_bytes=2**16,
)


def machine(*ssds: Ssd) -> Hardware:
    """One whose disks nobody has measured."""
    return Hardware(
        name="known",
        gpu=(Gpu(name="main memory", memory_bytes=10**9, link="link0"),),
        link=(Link(name="link0", read_rate=1e9, write_rate=1e9),),
        host=Host(memory_bytes=10**9, read_rate=1e9, write_rate=1e9),
        ssd=ssds,
    )


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files, short rounds."""
    monkeypatch.setattr(renewal, "FULL", replace(QUICK, disk_bytes=2 * MIB))


def test_rates_are_new_and_nothing_else(tmp_path: Path) -> None:
    """What was measured takes the place of what the file said; name, capacity, buffers stay."""
    known = machine(SSD)
    found = probe_disks(known, directory=tmp_path, sizes=[2**18], sustained_seconds=0.05)
    [ssd] = found.ssd
    assert min(ssd.read_rate, ssd.write_rate) > 1e6
    assert ssd.latency_seconds < 5
    assert ssd.duplex_read_rate <= ssd.read_rate
    assert ssd.duplex_write_rate <= ssd.write_rate
    as_before = {
        name: getattr(SSD, name)
        for name in (
            *("read_rate", "write_rate", "latency_seconds"),
            *("duplex_read_rate", "duplex_write_rate"),
        )
    }
    assert replace(found, ssd=(replace(ssd, **as_before),)) == known
    assert not list(tmp_path.iterdir())


def test_each_in_its_own_folder(tmp_path: Path) -> None:
    """Several disks are measured where the hardware has them, beside each other too."""
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    ssds = [replace(SSD, name=folder.name, paths=(str(folder),)) for folder in folders]
    found = probe_disks(machine(*ssds), sizes=[2**18], sustained_seconds=0)
    assert [ssd.name for ssd in found.ssd] == ["one", "two"]
    assert all(ssd.read_rate > 1e6 for ssd in found.ssd)


def test_which_folder(tmp_path: Path) -> None:
    """None is known, or one is given for two."""
    with pytest.raises(InputError, match="scratch: the hardware has no paths for it"):
        probe_disks(machine(SSD))
    with pytest.raises(InputError, match="one SSD, this has 2"):
        probe_disks(machine(SSD, replace(SSD, name="other")), directory=tmp_path)
    with pytest.raises(InputError, match="nowhere"):
        probe_disks(machine(SSD), directory=tmp_path / "nowhere")
