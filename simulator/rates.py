"""Max-min fair rates of the transfers under way, by progressive filling.

All rates rise together; whoever meets a limit (device, link direction, host memory) stays there
while the others go on. The result depends on the set of active channels only.
"""

from __future__ import annotations

import numpy as np

from teraio.contracts.table import FloatArray
from teraio.simulator.compilation import compiled
from teraio.simulator.state import Engine

UNSET = -1.0


@compiled
def row_of_rates(engine: Engine, mask: int) -> int:
    """Row of ``engine.rates`` with the rates of all channels while those in ``mask`` are active.

    A table that is too small for all masks is one row of scratch.
    """
    is_tabulated = mask < engine.is_known.size
    row = mask if is_tabulated else 0
    if not (is_tabulated and engine.is_known[row]):
        fill_fair_rates(engine, mask, row)
        engine.is_known[row] = is_tabulated
    return row


@compiled
def fill_fair_rates(engine: Engine, mask: int, row: int) -> None:
    """Progressive filling over the active channels, into a row of ``engine.rates``."""
    rates = engine.rates[row]
    num_active = 0
    for channel in range(rates.size):
        is_active = (mask >> channel) & 1
        rates[channel] = UNSET if is_active else 0.0
        num_active += is_active
    open_links(engine, mask)
    memory_left = engine.stream[0].memory_rate
    while num_active > 0:
        memory_share = share_limits(engine, rates, memory_left)
        level = common_level(engine, mask, rates, memory_share)
        for channel in range(rates.size):
            link, weight = engine.links[channel % 2], engine.channels[channel].memory_weight
            if rates[channel] == UNSET and (
                device_rate(engine, mask, channel) <= level
                or link.share <= level
                or (weight > 0 and memory_share <= level)
            ):
                rates[channel] = level
                link.left -= level
                memory_left -= weight * level
                num_active -= 1


@compiled
def device_rate(engine: Engine, mask: int, channel: int) -> float:
    """The device's own limit: duplex while its other direction is active too."""
    is_duplex = (mask >> (channel ^ 1)) & 1
    limits = engine.channels[channel]
    return float(limits.duplex_rate if is_duplex else limits.solo_rate)


@compiled
def open_links(engine: Engine, mask: int) -> None:
    """What the link carries per direction: duplex while both are active."""
    is_duplex = directions_of(mask) == 3
    for direction in range(2):
        link = engine.links[direction]
        link.left = link.duplex_rate if is_duplex else link.solo_rate


@compiled
def directions_of(mask: int) -> int:
    """1 if any read is active, plus 2 if any write is: the index into slowdown factors."""
    directions = 0
    while mask:
        directions |= mask & 3
        mask >>= 2
    return directions


@compiled
def share_limits(engine: Engine, rates: FloatArray, memory_left: float) -> float:
    """Divide what is left of each link direction and of host memory, which is returned.

    A share is the level at which its limit would be full; no level fills one that nobody uses.
    """
    weight = 0.0
    for direction in range(2):
        members = 0
        for channel in range(direction, rates.size, 2):
            if rates[channel] == UNSET:
                members += 1
                weight += engine.channels[channel].memory_weight
        link = engine.links[direction]
        link.share = max(link.left, 0.0) / members if members > 0 else np.inf
    return max(memory_left, 0.0) / weight if weight > 0 else np.inf


@compiled
def common_level(engine: Engine, mask: int, rates: FloatArray, memory_share: float) -> float:
    """The rate at which the first of all limits is met."""
    level: float = min(engine.links[0].share, engine.links[1].share, memory_share)
    for channel in range(rates.size):
        if rates[channel] == UNSET:
            level = min(level, device_rate(engine, mask, channel))
    return level
