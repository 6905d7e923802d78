"""Planned transfers: the static order of each channel, and what a kernel requires of it.

Because a channel serves in order, "this move has left" is the same as "the channel has served that
many entries": a plan that fits needs no other state than one counter per channel.
"""

from __future__ import annotations

from teraio.contracts.table import MISSING
from teraio.simulator.channels import begin_transfer
from teraio.simulator.compilation import compiled
from teraio.simulator.state import FREES, NEVER, PLANNED, WRITE, Engine


@compiled
def entry_at(engine: Engine, index: int, position: int) -> int:
    """Row in ``entries`` of a position in a channel's endless, repeating order."""
    channel = engine.channels[index]
    return int(channel.first_entry + position % channel.num_entries)


@compiled
def find_head(engine: Engine, index: int) -> None:
    """Note the next entry of a channel, and the kernel of this iteration's count that it awaits."""
    channel = engine.channels[index]
    if channel.num_entries == 0:
        channel.trigger = NEVER
        return
    channel.head = entry_at(engine, index, channel.served)
    iteration = channel.served // channel.num_entries
    trigger = engine.entries[channel.head].trigger
    channel.trigger = trigger + iteration * engine.stream[0].num_kernels


@compiled
def leave_queue(engine: Engine, index: int) -> None:
    """The head of a channel's queue is served."""
    channel = engine.channels[index]
    channel.served += 1
    find_head(engine, index)


@compiled
def may_start(engine: Engine, index: int) -> bool:
    """Whether the head of a channel's queue has been triggered."""
    trigger, stream = engine.channels[index].trigger, engine.stream[0]
    if index % 2 == WRITE or stream.stage == FREES:
        return bool(trigger < stream.current)
    return bool(trigger <= stream.current)


@compiled
def begin_planned(engine: Engine, index: int) -> None:
    """Start the head of a channel's queue, or what is left of it."""
    channel = engine.channels[index]
    entry = engine.entries[channel.head]
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
