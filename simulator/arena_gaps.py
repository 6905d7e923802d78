"""Off plan: gaps in the plan's arenas, where a copy goes that no device has room for beside them.

As in the executor: the smallest gap that is large enough between the storages that are away; those
on the GPU have their bytes, and give a copy up that lies in the way.
"""

from __future__ import annotations

from teraio.contracts.table import MISSING
from teraio.simulator.compilation import compiled
from teraio.simulator.state import AWAY, NEVER, Engine


@compiled
def find_gap(engine: Engine, device: int, nbytes: int) -> int:
    """Offset of the smallest gap of at least ``nbytes``, the lowest of equal ones; else MISSING."""
    target = engine.devices[device]
    place, in_gap = target.first_place, 0
    best, best_bytes, cursor = MISSING, NEVER, 0
    while cursor <= target.arena_bytes:
        place = next_taken_place(engine, device, place)
        in_gap = next_taken_gap(engine, device, in_gap)
        taken, taken_bytes = target.arena_bytes, NEVER
        is_place = place < engine.devices[device + 1].first_place
        if is_place:
            taken = engine.places[place].begin
            taken_bytes = engine.places[place].end - taken
        if in_gap < engine.stream[0].num_in_gaps:
            owner = engine.storages[engine.in_gaps[in_gap]]
            if not is_place or owner.overflow_offset < taken:
                taken, taken_bytes = owner.overflow_offset, max(owner.nbytes, 1)
                is_place = False
                in_gap += 1
        if is_place:
            place += 1
        if taken - cursor >= nbytes and taken - cursor < best_bytes:
            best, best_bytes = cursor, taken - cursor
        if taken_bytes == NEVER:
            break
        end = (taken + taken_bytes + target.alignment - 1) // target.alignment * target.alignment
        cursor = max(cursor, end)
    return int(best)


@compiled
def next_taken_place(engine: Engine, device: int, row: int) -> int:
    """First place from ``row`` on that holds a storage that is away; else the device's end."""
    end = engine.devices[device + 1].first_place
    while row < end:
        place = engine.places[row]
        if engine.copies[place.copy].is_valid and engine.storages[place.storage].status == AWAY:
            break
        row += 1
    return int(row)


@compiled
def next_taken_gap(engine: Engine, device: int, row: int) -> int:
    """The same among the copies in gaps; else their number."""
    while row < engine.stream[0].num_in_gaps:
        owner = engine.storages[engine.in_gaps[row]]
        if owner.overflow_device == device and owner.status == AWAY:
            break
        row += 1
    return int(row)


@compiled
def note_gap(engine: Engine, storage: int) -> None:
    """Enter a storage whose copy goes into a gap, in the order of devices and offsets."""
    stream, in_gaps = engine.stream[0], engine.in_gaps
    record = engine.storages[storage]
    row = stream.num_in_gaps
    stream.num_in_gaps += 1
    while row > 0:
        other = engine.storages[in_gaps[row - 1]]
        if other.overflow_device < record.overflow_device or (
            other.overflow_device == record.overflow_device
            and other.overflow_offset < record.overflow_offset
        ):
            break
        in_gaps[row] = in_gaps[row - 1]
        row -= 1
    in_gaps[row] = storage


@compiled
def leave_gap(engine: Engine, storage: int) -> None:
    """Take a storage out again."""
    stream, kept = engine.stream[0], 0
    for row in range(stream.num_in_gaps):
        if engine.in_gaps[row] != storage:
            engine.in_gaps[kept] = engine.in_gaps[row]
            kept += 1
    stream.num_in_gaps = kept
