"""Channels: one direction of one device each, serving one transfer at a time.

Rounding: the clock is an integer number of picoseconds. A byte phase ends at the first whole
picosecond by which all its bytes have moved (TOLERANCE absorbs the error of the division), and what
is left after a change of rate is kept as it is, unrounded. Nothing depends on absolute time, so
equal states at two cuts evolve equally, bit by bit.
"""

from __future__ import annotations

import math

from teraio.contracts.table import MISSING
from teraio.simulator.compilation import compiled
from teraio.simulator.event_log import log_event
from teraio.simulator.rates import directions_of, row_of_rates
from teraio.simulator.state import (
    BYTES,
    DEMAND,
    IDLE,
    LATENCY,
    NEVER,
    OFFLOAD,
    PLANNED,
    PREFETCH,
    RUNNING,
    TRANSFER_EVENT,
    WRITE,
    Engine,
)

PICOSECONDS = 1e12
TOLERANCE = 1e-3
CHUNK_BYTES = 256 * 10**6
"""A demand fetch waits for the chunk under way only (DESIGN: Static order)."""


@compiled
def whole_picoseconds(duration: float) -> int:
    """Rounded up, but for an error of the division far below a picosecond."""
    return math.ceil(duration - TOLERANCE)


@compiled
def begin_transfer(
    engine: Engine, index: int, purpose: int, move: int, storage: int, for_kernel: int, nbytes: int
) -> None:
    """Occupy an idle channel: first the latency, then the bytes."""
    channel, now = engine.channels[index], engine.stream[0].now
    channel.purpose = purpose
    channel.move = move
    channel.storage = storage
    channel.for_kernel = for_kernel
    channel.started = now
    channel.segment_bytes = nbytes
    channel.remaining = nbytes
    channel.after_stop = 0
    is_resumed = purpose == PLANNED and channel.suspended > 0
    if channel.latency > 0 and not is_resumed:
        channel.phase = LATENCY
        channel.finish = now + channel.latency
    else:
        begin_bytes(engine, index)


@compiled
def begin_bytes(engine: Engine, index: int) -> None:
    """Enter the byte phase; the rate follows when all changes of this instant are known."""
    channel = engine.channels[index]
    channel.phase = BYTES
    engine.stream[0].rates_are_due = True
    channel.anchor = engine.stream[0].now
    channel.rate = 0.0
    channel.finish = NEVER


@compiled
def update_rates(engine: Engine) -> None:
    """Give every byte phase its fair rate; only a change of rate touches a transfer."""
    stream, mask = engine.stream[0], 0
    stream.rates_are_due = False
    for index in range(engine.channels.size):
        if engine.channels[index].phase == BYTES:
            mask |= 1 << index
    stream.active_mask = mask
    if mask == 0:
        return
    row = row_of_rates(engine, mask)
    for index in range(engine.channels.size):
        channel = engine.channels[index]
        if channel.phase == BYTES and engine.rates[row, index] != channel.rate:
            settle_bytes(engine, index)
            channel.rate = engine.rates[row, index]
            duration = channel.remaining * PICOSECONDS / channel.rate
            channel.finish = stream.now + whole_picoseconds(duration)


@compiled
def settle_bytes(engine: Engine, index: int) -> None:
    """Move the anchor of a byte phase to now."""
    channel, now = engine.channels[index], engine.stream[0].now
    moved = channel.rate * (now - channel.anchor) / PICOSECONDS
    channel.remaining = max(channel.remaining - moved, 0.0)
    channel.anchor = now


@compiled
def update_pace(engine: Engine) -> None:
    """Slow the running kernel down, or speed it up again, as transfers begin and end."""
    stream = engine.stream[0]
    if stream.stage != RUNNING:
        return
    factor = engine.slowdown[directions_of(stream.active_mask)]
    if factor != stream.factor:
        if stream.factor > 0:
            done = (stream.now - stream.kernel_anchor) / stream.factor
            stream.work = max(stream.work - done, 0.0)
        stream.factor = factor
        stream.kernel_anchor = stream.now
        stream.kernel_finish = stream.now + whole_picoseconds(stream.work * factor)


@compiled
def request_pause(engine: Engine, index: int) -> None:
    """Let a planned transfer stop at the end of its chunk under way, for a demand fetch."""
    channel = engine.channels[index]
    if channel.phase == IDLE or channel.purpose == DEMAND or channel.after_stop > 0:
        return
    if channel.phase == BYTES:
        settle_bytes(engine, index)
        channel.rate = 0.0
        engine.stream[0].rates_are_due = True
    # A segment begins with its transfer or at the end of a chunk, so chunks count from there.
    moved = channel.segment_bytes - channel.remaining
    stop = max(1, math.ceil(moved / CHUNK_BYTES - 1e-9)) * CHUNK_BYTES
    if stop < channel.segment_bytes:
        channel.after_stop = channel.segment_bytes - stop
        channel.segment_bytes = stop
        channel.remaining = stop - moved


@compiled
def end_segment(engine: Engine, index: int) -> None:
    """Account for what a channel has just done and make it idle."""
    channel, now = engine.channels[index], engine.stream[0].now
    channel.busy += now - max(channel.started, 0)
    channel.moved_bytes += channel.segment_bytes
    channel.finished_at = now
    if channel.purpose == PLANNED:
        channel.suspended = channel.after_stop
        cause = OFFLOAD if index % 2 == WRITE else PREFETCH
    else:
        cause = channel.cause
    log_event(
        engine,
        TRANSFER_EVENT,
        channel.for_kernel,
        channel.storage,
        index,
        channel.started,
        now,
        channel.segment_bytes,
        cause,
    )
    reset_channel(engine, index)


@compiled
def reset_channel(engine: Engine, index: int) -> None:
    """An idle channel has no history, so that states at a cut compare equal."""
    channel = engine.channels[index]
    engine.stream[0].rates_are_due = True
    channel.phase = IDLE
    channel.purpose = PLANNED
    channel.cause = 0
    channel.move = MISSING
    channel.storage = MISSING
    channel.for_kernel = MISSING
    channel.anchor = 0
    channel.finish = 0
    channel.remaining = 0.0
    channel.rate = 0.0
    channel.after_stop = 0


@compiled
def next_finish(engine: Engine) -> int:
    """When the next phase of any channel ends; NEVER if all are idle."""
    earliest = NEVER
    for index in range(engine.channels.size):
        channel = engine.channels[index]
        if channel.phase != IDLE:
            earliest = min(earliest, channel.finish)
    return earliest


@compiled
def shift_channels(engine: Engine, duration: int) -> None:
    """Restart the clock at the cut: times become relative to it, queues begin anew."""
    for index in range(engine.channels.size):
        channel = engine.channels[index]
        channel.served -= channel.num_entries
        channel.finished_at = MISSING
        if channel.phase != IDLE:
            channel.busy += duration - max(channel.started, 0)
            channel.started -= duration
            channel.finish -= duration
            if channel.phase == BYTES:
                channel.anchor -= duration
