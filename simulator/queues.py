"""Planned transfers: the static order of each channel, and what a kernel requires of it.

Because a channel serves in order, "this move has left" is the same as "the channel has served that
many entries": a plan that fits needs no other state than one counter per channel.
"""

from __future__ import annotations

from teraio.contracts.table import MISSING
from teraio.simulator.channels import begin_transfer
from teraio.simulator.compilation import compiled
from teraio.simulator.state import FREES, PLANNED, WRITE, Engine


@compiled
def entry_at(engine: Engine, index: int, position: int) -> int:
    """Row in ``entries`` of a position in a channel's endless, repeating order."""
    channel = engine.channels[index]
    return int(channel.first_entry + position % channel.num_entries)


@compiled
def may_start(engine: Engine, index: int) -> bool:
    """Whether the head of a channel's queue has been triggered."""
    channel, stream = engine.channels[index], engine.stream[0]
    if channel.num_entries == 0:
        return False
    trigger = engine.entries[entry_at(engine, index, channel.served)].trigger
    trigger += channel.served // channel.num_entries * stream.num_kernels
    if index % 2 == WRITE:
        return bool(trigger < stream.current)
    opened = stream.current - 1 if stream.stage == FREES else stream.current
    return bool(trigger <= opened)


@compiled
def begin_planned(engine: Engine, index: int) -> None:
    """Start the head of a channel's queue, or what is left of it."""
    channel = engine.channels[index]
    entry = engine.entries[entry_at(engine, index, channel.served)]
    nbytes = channel.suspended if channel.suspended > 0 else entry.nbytes
    begin_transfer(engine, index, PLANNED, entry.move, entry.storage, entry.for_kernel, nbytes)


@compiled
def has_served(engine: Engine, direction: int) -> bool:
    """Whether all channels of a direction have served what the current kernel requires."""
    kernel = engine.stream[0].current
    for index in range(direction, engine.channels.size, 2):
        if engine.channels[index].served < engine.required[kernel, index]:
            return False
    return True


@compiled
def last_required(engine: Engine, direction: int) -> int:
    """Storage whose transfer, required by the current kernel, ends now; MISSING if none does."""
    stream = engine.stream[0]
    for index in range(direction, engine.channels.size, 2):
        channel, required = engine.channels[index], engine.required[stream.current, index]
        if channel.served == required and channel.finished_at == stream.now:
            return int(engine.entries[entry_at(engine, index, required - 1)].storage)
    return MISSING
