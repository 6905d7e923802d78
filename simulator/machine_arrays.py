"""A machine as one rank sees it, as flat arrays: channel 2 * device + direction, host first.

Links and devices that several GPUs share are this rank's alone here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from teraio.contracts.hardware import HOST, Hardware, Host, Link, Ssd
from teraio.contracts.table import FloatArray, IntArray
from teraio.contracts.timeline import channel_name
from teraio.units import to_picoseconds


class Machine(NamedTuple):
    """Devices, channels and budgets of one rank.

    ``alignment`` and ``capacity_bytes`` are per device; ``latency`` (ps), rates (bytes/s) and
    ``memory_weight`` (host memory traffic per byte) per channel; link rates per direction.
    ``bounce_bytes`` per device are host memory that its transfers need. ``slowdown`` is indexed by
    (reads active) + 2 * (writes active).
    """

    devices: list[str]
    channel_names: list[str]
    gpu_memory_bytes: int
    alignment: IntArray
    capacity_bytes: IntArray
    bounce_bytes: IntArray
    latency: IntArray
    solo_rate: FloatArray
    duplex_rate: FloatArray
    memory_weight: FloatArray
    memory_rate: float
    link_solo_rate: FloatArray
    link_duplex_rate: FloatArray
    slowdown: FloatArray


def machine_arrays(hardware: Hardware, rank: int) -> Machine:
    """What one rank's transfers meet, with its budgets as ``hardware`` states them."""
    ssds, host, link = hardware.ssds_of_rank(rank), hardware.host, hardware.link_of_rank(rank)
    parts: list[Host | Ssd] = [host, *ssds]
    devices = [HOST, *(ssd.name for ssd in ssds)]
    seconds = [part.latency_seconds + link.latency_seconds for part in parts]
    slowdown = hardware.slowdown
    return Machine(
        devices=devices,
        channel_names=[channel_name(d, is_write=w) for d in devices for w in (False, True)],
        gpu_memory_bytes=hardware.gpu_of_rank(rank).memory_bytes,
        alignment=np.array([hardware.alignment_bytes(device) for device in devices]),
        capacity_bytes=np.array([host.memory_bytes, *(ssd.capacity_bytes for ssd in ssds)]),
        bounce_bytes=np.array([0, *(0 if ssd.gds else ssd.bounce_bytes for ssd in ssds)]),
        latency=np.repeat([to_picoseconds(s) for s in seconds], 2),
        solo_rate=np.concatenate([_solo_rates(part) for part in parts]),
        duplex_rate=np.concatenate([_duplex_rates(part) for part in parts]),
        memory_weight=np.repeat([1.0, *(0.0 if ssd.gds else 2.0 for ssd in ssds)], 2),
        memory_rate=np.inf if host.memory_rate is None else float(host.memory_rate),
        link_solo_rate=_solo_rates(link),
        link_duplex_rate=_duplex_rates(link),
        slowdown=np.array([1.0, slowdown.read, slowdown.write, slowdown.both]),
    )


def _solo_rates(part: Host | Ssd | Link) -> FloatArray:
    return np.array([part.read_rate, part.write_rate], dtype=np.float64)


def _duplex_rates(part: Host | Ssd | Link) -> FloatArray:
    return np.array([part.duplex_read_rate, part.duplex_write_rate], dtype=np.float64)
