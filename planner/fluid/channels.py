"""What transfers share: devices, links and host memory as rows of rates (F7).

The rates that can hold together in a slot, averaged over it, lie in the convex hull of doing
nothing, only writing, only reading and both at once.
"""

from __future__ import annotations

from typing import NamedTuple

from teraio.contracts.hardware import HOST, Hardware, Host, Link, Rates, Ssd
from teraio.contracts.timeline import channel_name


class Shared(NamedTuple):
    """A device or link: ``devices`` whose bytes cross it, and its rates."""

    name: str
    devices: tuple[str, ...]
    rates: Rates


class Tier(NamedTuple):
    """A device that takes bytes; ``memory_weight``: host memory traffic per byte moved."""

    name: str
    capacity_bytes: int
    part: Host | Ssd
    memory_weight: float


def tiers_of(hardware: Hardware, rank: int) -> list[Tier]:
    """The devices with room that a rank's GPU reaches."""
    tiers = [Tier(HOST, hardware.host.memory_bytes, hardware.host, 1.0)]
    tiers += [
        Tier(ssd.name, ssd.capacity_bytes, ssd, 0.0 if ssd.gds else 2.0)
        for ssd in hardware.ssds_of_rank(rank)
    ]
    return [tier for tier in tiers if tier.capacity_bytes > 0]


def shared_rates(hardware: Hardware, rank: int, tiers: list[Tier]) -> list[Shared]:
    """Each device alone, then the GPU's link with all of them."""
    link: Link = hardware.link_of_rank(rank)
    alone = [Shared(tier.name, (tier.name,), tier.part) for tier in tiers]
    return [*alone, Shared(link.name, tuple(tier.name for tier in tiers), link)]


def is_no_limit(link: Shared, hardware: Hardware) -> bool:
    """Whether a link carries all that its devices can move, both ways at once.

    Its rows would say nothing, and rates far above all others only blur the numbers.
    """
    rates: list[Rates] = [ssd for ssd in hardware.ssd if ssd.name in link.devices]
    rates += [hardware.host] if HOST in link.devices else []
    return (
        sum(part.read_rate for part in rates) <= link.rates.duplex_read_rate
        and sum(part.write_rate for part in rates) <= link.rates.duplex_write_rate
    )


def hull(
    read: float, write: float, duplex_read: float, duplex_write: float
) -> list[tuple[float, float]]:
    """Seconds per byte (read, write) in each face of the hull: r x read + w x write <= 1.

    Where both at once carry no more than taking turns does, taking turns is the hull.
    """
    if duplex_read / read + duplex_write / write <= 1:
        return [(1 / read, 1 / write)]
    return [
        ((1 - duplex_write / write) / duplex_read, 1 / write),
        (1 / read, (1 - duplex_read / read) / duplex_write),
    ]


def hull_of(
    rates: Rates, *, faster_reads: float = 0.0, faster_writes: float = 0.0
) -> list[tuple[float, float]]:
    """The faces for ``rates``, in bytes per second, each direction sped up by so much."""
    return hull(
        rates.read_rate + faster_reads,
        rates.write_rate + faster_writes,
        rates.duplex_read_rate + faster_reads,
        rates.duplex_write_rate + faster_writes,
    )


def channel_names(shared: Shared) -> tuple[str, str]:
    """Names of the two directions, read first."""
    return channel_name(shared.name, is_write=False), channel_name(shared.name, is_write=True)
