"""The engine's event log: appending a row. Turning rows into a Timeline is another module's."""

from __future__ import annotations

from teraio.simulator.compilation import compiled
from teraio.simulator.state import Engine


@compiled
def log_event(
    engine: Engine,
    what: int,
    kernel: int,
    storage: int,
    channel: int,
    start: int,
    end: int,
    nbytes: int,
    cause: int,
) -> None:
    """Append an event, unless nothing is recorded (a log that is to be written is long enough)."""
    stream = engine.stream[0]
    if stream.num_events == engine.log.size:
        return
    event = engine.log[stream.num_events]
    stream.num_events += 1
    event.what = what
    event.kernel = kernel
    event.storage = storage
    event.channel = channel
    event.start = start
    event.end = end
    event.nbytes = nbytes
    event.cause = cause
