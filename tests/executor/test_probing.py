"""The probe describes a machine that validates, and leaves nothing behind."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from teraio.contracts.hardware import Hardware
from teraio.errors import InputError
from teraio.executor import probing
from teraio.executor.stores import Transfer

MIB = 2**20


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Hardware, Path, list[str]]:
    """One quick probe for all tests: the result, its directory, and what it said."""
    folder, said = tmp_path_factory.mktemp("disk"), list[str]()
    hardware = probing.probe(
        directory=folder, quick=True, transfer_bytes=2 * MIB - 5, progress=said.append
    )
    return hardware, folder, said


def test_the_result_survives_its_file(probed: tuple[Hardware, Path, list[str]]) -> None:
    """What was measured can be saved and validates when it is read again."""
    hardware = probed[0]
    assert Hardware.from_toml(hardware.to_toml(), "probed") == hardware


def test_rates_are_those_of_a_machine(probed: tuple[Hardware, Path, list[str]]) -> None:
    """Memory moves gigabytes a second, a disk megabytes; latencies are far below a second."""
    hardware = probed[0]
    ssd, host = hardware.ssd[0], hardware.host
    assert 0.05e9 < host.duplex_read_rate <= host.read_rate < 1e12
    assert 0.05e9 < host.duplex_write_rate <= host.write_rate < 1e12
    assert 1e6 < ssd.duplex_read_rate <= ssd.read_rate < 1e12
    assert 0 < host.latency_seconds < 0.1
    assert 0 < ssd.latency_seconds < 0.5
    assert hardware.slowdown.both >= 1


def test_the_link_never_binds_on_a_cpu(probed: tuple[Hardware, Path, list[str]]) -> None:
    """Main memory is the link; both devices at full rate together stay within it."""
    hardware = probed[0]
    link, host, ssd = hardware.link[0], hardware.host, hardware.ssd[0]
    for name in ("read_rate", "write_rate", "duplex_read_rate", "duplex_write_rate"):
        assert getattr(link, name) >= getattr(host, name) + getattr(ssd, name) - 1


def test_capacities_fit_the_machine(probed: tuple[Hardware, Path, list[str]]) -> None:
    """Half of the memory plays the GPU, a quarter the host; the disk keeps a tenth free."""
    hardware, folder, _ = probed
    memory_bytes = probing.usable_memory_bytes()
    assert 0 < memory_bytes <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert hardware.gpu[0].memory_bytes == memory_bytes // 2
    assert hardware.host.memory_bytes == memory_bytes // 4
    system = os.statvfs(folder)
    assert hardware.ssd[0].capacity_bytes < system.f_blocks * system.f_frsize


def test_it_cleans_up_and_says_what_it_does(probed: tuple[Hardware, Path, list[str]]) -> None:
    """No file, no thread; the given directory stands in the result, a temporary one would not."""
    hardware, folder, said = probed
    assert list(folder.iterdir()) == []
    assert not [x for x in threading.enumerate() if x.name.startswith("teraio-")]
    assert hardware.ssd[0].paths == (str(folder),)
    assert len(said) == 3
    assert str(folder) in said[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "meta"}, "device: must be cpu or cuda, got 'meta'"),
        ({"transfer_bytes": 0}, "transfer_bytes: must be positive, got 0"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    """One line that says what to change."""
    with pytest.raises(InputError, match=message):
        probing.probe(quick=True, **arguments)


def test_control_groups_limit_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least limit of the group and its parents counts; "max" is none."""
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    (tmp_path / "outer" / "memory.max").write_text("1000000\n")
    (tmp_path / "outer" / "inner" / "memory.max").write_text("max\n")
    (tmp_path / "self").write_text("0::/outer/inner\n")
    monkeypatch.setattr(probing, "_CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(probing, "_OWN_GROUPS", tmp_path / "self")
    assert probing.usable_memory_bytes() == 1000000


def test_slowdown_of_partly_covered_kernels() -> None:
    """2 s of kernels; beside transfers they run at half speed, for 4, 2 or 0.5 s."""
    assert probing._factor(2.0, 4.0, 4.5) == pytest.approx(2.0)
    assert probing._factor(2.0, 3.0, 2.0) == pytest.approx(2.0)
    assert probing._factor(2.0, 2.25, 0.5) == pytest.approx(2.0)


def test_rates_within_a_window() -> None:
    """Three transfers of 100 bytes; the window cuts the last in half, and idle time is no time."""
    spans = [(0.0, 1.0), (1.0, 2.0), (3.0, 5.0)]
    issued = [
        cast(Transfer, SimpleNamespace(start_seconds=start, end_seconds=end, nbytes=100))
        for start, end in spans
    ]
    assert probing._rate(issued, 0.0, 2.0) == pytest.approx(100.0)
    assert probing._rate(issued, 0.0, 4.0) == pytest.approx(250.0 / 3)
    assert probing._rate([], 0.0, 4.0) == 0.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_gpu(tmp_path: Path) -> None:
    """The link of a GPU is what pinned copies show; its memory is what is free."""
    hardware = probing.probe(device="cuda", directory=tmp_path, quick=True)
    assert hardware.link[0].read_rate == hardware.host.read_rate > 1e9
    assert 0 < hardware.gpu[0].memory_bytes <= torch.cuda.mem_get_info()[1]
