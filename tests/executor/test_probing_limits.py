"""What a process may use: control groups of both versions, memory that grows, disks, nodes."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from teraio.errors import InputError
from teraio.executor.probing import limits, numa
from teraio.executor.probing.places import places_of

GIB = 2**30
MIB = 2**20


def write(root: Path, files: dict[str, str]) -> Path:
    """A tree of small files, like those of the kernel."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        # Version 2: the least of the group and those around it; "max" is no limit.
        ("0::/a/b", {"a/memory.max": "1000000", "a/b/memory.max": "max"}, 1000000),
        ("0::/a", {"a/memory.max": "9000000", "a/memory.high": "8000000"}, 8000000),
        # In a container the own path may be one that is not to be seen from there.
        ("0::/../../pod", {"memory.max": "7000000"}, 7000000),
        # Version 1, nested, beside an empty version 2 as systemd mounts both.
        (
            "4:cpu,memory:/docker/x\n0::/",
            {"memory/docker/x/memory.limit_in_bytes": "5000000", "unified/x": ""},
            5000000,
        ),
        ("4:memory:/docker/gone", {"memory/memory.limit_in_bytes": "6000000"}, 6000000),
        ("0::/", {"memory.max": "max"}, None),
        # Version 1 writes "none" as this number.
        ("4:memory:/", {"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
    ],
)
def test_control_groups(
    own: str, files: dict[str, str], expected: int | None, tmp_path: Path
) -> None:
    """The limit that binds is found; without one the machine's memory counts."""
    write(tmp_path, {"own": own, **{f"groups/{name}": text for name, text in files.items()}})
    found = limits.read_limits(tmp_path / "groups", tmp_path / "own")
    assert found.control_group_bytes == expected
    assert found.machine_bytes == limits.machine_memory_bytes()
    assert found.memory_bytes == (expected or found.machine_bytes)


def test_a_limit_above_the_machine_does_not_bind(tmp_path: Path) -> None:
    """A machine that grows shows less memory than its control group allows."""
    write(tmp_path, {"own": "0::/", "memory.max": str(2**50)})
    found = limits.read_limits(tmp_path, tmp_path / "own")
    assert found.memory_bytes == found.machine_bytes
    assert found.control_group_bytes == 2**50


def test_available_memory_is_read(tmp_path: Path) -> None:
    """Kilobytes, as the kernel counts them."""
    write(tmp_path, {"meminfo": "MemTotal: 9000 kB\nMemAvailable:    5000 kB"})
    assert limits.available_memory_bytes(tmp_path / "meminfo") == 5000 * 1024


def test_a_machine_that_grows_when_touched_passes() -> None:
    """Available memory stays at 3 GiB because the machine gets more: 8 MiB in steps of 2."""
    said: list[str] = []
    limits.check_memory_by_touching(
        8 * MIB, available=lambda: 3 * GIB, say=said.append, step_bytes=2 * MIB
    )
    assert len(said) == 4
    assert said[-1] == "touching host memory: 8.39 MB of 8.39 MB"


def test_a_machine_that_does_not_grow_is_told_what_it_has() -> None:
    """It begins with 4 MiB above the margin and loses what is touched."""
    left = iter([2 * GIB + 4 * MIB, 2 * GIB + 2 * MIB, *[2 * GIB] * 100])
    with pytest.raises(InputError, match=r"needs 8\.39 MB, this machine has 4\.19 MB to give"):
        limits.check_memory_by_touching(
            8 * MIB, available=lambda: next(left), step_bytes=2 * MIB, patience_seconds=0.1
        )


def test_directories_are_checked_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing, not writable, too full: each says what to do."""
    with pytest.raises(InputError, match="gone is not a directory; create it"):
        limits.check_directory(tmp_path / "gone", 1)
    with pytest.raises(InputError, match=r"measuring needs 1152922 TB, the disk has .* free"):
        limits.check_directory(tmp_path, 2**60)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(InputError, match="is not writable"):
        limits.check_directory(tmp_path, 1)


def test_files_in_memory_are_no_disk(tmp_path: Path) -> None:
    """As the kernel lists file systems: number of the device third, type after the dash."""
    device = os.stat(tmp_path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    lines = "21 1 0:999 / /x rw - ext4 /dev/a rw\n22 1 {} / /tmp rw shared:2 - {} none rw"
    write(tmp_path, {"ram": lines.format(number, "tmpfs"), "disk": lines.format(number, "ext4")})
    assert limits.is_in_memory(tmp_path, tmp_path / "ram")
    assert not limits.is_in_memory(tmp_path, tmp_path / "disk")
    assert not limits.is_in_memory(tmp_path, tmp_path / "unknown")


NODES = {
    "devices/system/node/online": "0-1",
    "devices/system/node/node0/cpulist": "0-3,8",
    "devices/system/node/node1/cpulist": "4-7",
    "bus/pci/devices/0000:dc:00.0/numa_node": "1",
    "bus/pci/devices/0000:dd:00.0/numa_node": "-1",
}


def test_nodes_of_gpus(tmp_path: Path) -> None:
    """What the kernel says of a PCI device; -1 is unknown, except where there is one node only."""
    system = write(tmp_path, NODES)
    assert numa.online_nodes(system) == [0, 1]
    assert numa.node_of_pci_device("0000:dc:00.0", system) == 1
    assert numa.node_of_pci_device("0000:dd:00.0", system) == numa.UNKNOWN
    assert numa.node_of_pci_device("0000:00:00.0", system) == numa.UNKNOWN
    (system / "devices/system/node/online").write_text("0\n")
    assert numa.node_of_pci_device("0000:dd:00.0", system) == 0


def test_nodes_are_recorded_only_if_all_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Addresses are written as the kernel does."""
    system = write(tmp_path, NODES)
    buses = [0xDC, 0xDC, 0xDD]
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda gpu: SimpleNamespace(pci_domain_id=0, pci_bus_id=buses[gpu], pci_device_id=0),
    )
    assert numa.pci_address(0) == "0000:dc:00.0"
    assert numa.gpu_nodes([0, 1], system) == (1, 1)
    assert numa.gpu_nodes([0, 1, 2], system) == ()


def test_work_stays_near_a_node_and_comes_back(tmp_path: Path) -> None:
    """Only processors of the node; all of them again afterwards, and for a node without any."""
    before = os.sched_getaffinity(0)
    one = min(before)
    system = write(
        tmp_path,
        {
            "devices/system/node/node0/cpulist": str(one),
            "devices/system/node/node1/cpulist": "99999",
        },
    )
    with numa.near_node(0, system):
        assert os.sched_getaffinity(0) == {one}
    assert os.sched_getaffinity(0) == before
    for node in (1, 2, None):
        with numa.near_node(node, system):
            assert os.sched_getaffinity(0) == before


def test_devices_are_named_as_in_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """All GPUs, one of them, or none; their nodes are looked up."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("teraio.executor.probing.places.gpu_nodes", lambda gpus: ())
    assert [place.device for place in places_of("cuda")] == ["cuda:0", "cuda:1"]
    assert [place.device for place in places_of("cuda:1")] == ["cuda:1"]
    assert [place.device for place in places_of("cpu")] == ["cpu"]
    for device in ("meta", "gpu", "cuda:2"):
        with pytest.raises(InputError, match="device: "):
            places_of(device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(InputError, match="cuda was asked for, PyTorch sees 0"):
        places_of("cuda")
