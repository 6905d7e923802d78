"""Which node of memory and processors each GPU hangs on, and work that stays there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

_SYSTEM = Path("/sys")
UNKNOWN = -1


def gpu_nodes(gpus: Sequence[int], system: Path = _SYSTEM) -> tuple[int, ...]:
    """The node of each GPU; empty if that of any is unknown. One node alone is node 0."""
    nodes = [node_of_pci_device(pci_address(gpu), system) for gpu in gpus]
    return () if UNKNOWN in nodes else tuple(nodes)


def pci_address(gpu: int) -> str:
    """Where a GPU is, as the kernel writes it: ``0000:dc:00.0``."""
    properties = torch.cuda.get_device_properties(gpu)
    # In no type stub; torch.numa.binding reads the same three.
    domain, bus, device = (
        getattr(properties, f"pci_{part}_id") for part in ("domain", "bus", "device")
    )
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def node_of_pci_device(address: str, system: Path = _SYSTEM) -> int:
    """The node; ``UNKNOWN`` if the kernel does not say and there are several."""
    try:
        node = int((system / "bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        node = UNKNOWN
    if node >= 0:
        return node
    return 0 if len(online_nodes(system)) <= 1 else UNKNOWN


def online_nodes(system: Path = _SYSTEM) -> list[int]:
    """Numbers of all nodes; none where the kernel knows no nodes."""
    return _numbers(system / "devices/system/node/online")


@contextmanager
def near_node(node: int | None, system: Path = _SYSTEM) -> Iterator[None]:
    """Let this thread, and threads that it starts, use only processors of ``node``.

    Memory comes from the node of the thread that touches it first, so an arena made here lies
    there. Without effect for None and where none of the node's processors may be used.
    """
    before = os.sched_getaffinity(0)
    cpus = set() if node is None else before & set(_cpus_of_node(node, system))
    if not cpus:
        yield
        return
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _cpus_of_node(node: int, system: Path) -> list[int]:
    return _numbers(system / f"devices/system/node/node{node}/cpulist")


def _numbers(file: Path) -> list[int]:
    """Parse ``0-3,8``; nothing if the file is not there."""
    try:
        text = file.read_text().strip()
    except OSError:
        return []
    numbers: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers
