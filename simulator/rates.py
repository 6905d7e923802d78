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
def rates_of(engine: Engine, mask: int) -> FloatArray:
    """Bytes per second of every channel while the channels in ``mask`` are active.

    A table that is too small for all masks is one row of scratch.
    """
    is_tabulated = mask < engine.is_known.size
    row = mask if is_tabulated else 0
    if not (is_tabulated and engine.is_known[row]):
        fill_fair_rates(engine, mask, engine.rates[row])
        engine.is_known[row] = is_tabulated
    rates: FloatArray = engine.rates[row]
    return rates


@compiled
def fill_fair_rates(engine: Engine, mask: int, rates: FloatArray) -> None:
    """Progressive filling over the active channels; ``rates`` receives the result."""
    channels = engine.channels
    num_active = 0
    for channel in range(rates.size):
        is_active = (mask >> channel) & 1
        rates[channel] = UNSET if is_active else 0.0
        num_active += is_active
    link_left = link_rates(engine, mask)
    memory_left = engine.stream[0].memory_rate
    while num_active > 0:
        link_share, memory_share = fair_shares(engine, rates, link_left, memory_left)
        level = min(link_share[0], link_share[1], memory_share)
        for channel in range(rates.size):
            if rates[channel] == UNSET:
                level = min(level, device_rate(engine, mask, channel))
        for channel in range(rates.size):
            weight = channels[channel].memory_weight
            if rates[channel] == UNSET and (
                device_rate(engine, mask, channel) <= level
                or link_share[channel % 2] <= level
                or (weight > 0 and memory_share <= level)
            ):
                rates[channel] = level
                link_left[channel % 2] -= level
                memory_left -= weight * level
                num_active -= 1


@compiled
def device_rate(engine: Engine, mask: int, channel: int) -> float:
    """The device's own limit: duplex while its other direction is active too."""
    is_duplex = (mask >> (channel ^ 1)) & 1
    limits = engine.channels[channel]
    return float(limits.duplex_rate if is_duplex else limits.solo_rate)


@compiled
def link_rates(engine: Engine, mask: int) -> FloatArray:
    """What the link carries per direction: duplex while both are active."""
    is_duplex = directions_of(mask) == 3
    rates = np.empty(2)
    for direction in range(2):
        link = engine.links[direction]
        rates[direction] = link.duplex_rate if is_duplex else link.solo_rate
    return rates


@compiled
def directions_of(mask: int) -> int:
    """1 if any read is active, plus 2 if any write is: the index into slowdown factors."""
    directions = 0
    while mask:
        directions |= mask & 3
        mask >>= 2
    return directions


@compiled
def fair_shares(
    engine: Engine, rates: FloatArray, link_left: FloatArray, memory_left: float
) -> tuple[FloatArray, float]:
    """The level at which each link direction, and host memory, would be full."""
    members = np.zeros(2)
    weight = 0.0
    for channel in range(rates.size):
        if rates[channel] == UNSET:
            members[channel % 2] += 1
            weight += engine.channels[channel].memory_weight
    link_share = np.full(2, np.inf)
    for direction in range(2):
        if members[direction] > 0:
            link_share[direction] = max(link_left[direction], 0.0) / members[direction]
    memory_share = max(memory_left, 0.0) / weight if weight > 0 else np.inf
    return link_share, memory_share
