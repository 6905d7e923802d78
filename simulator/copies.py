"""Off plan: copies on host and SSD, in the plan's places, beside its arenas, or in their gaps.

A copy is there from the moment at which its write is issued, and lasts until the storage is written
or dies, until it is copied elsewhere, or until its place is needed while the storage is on the GPU.
A storage that leaves the GPU with a copy leaves at no cost.
"""

from __future__ import annotations

from teraio.contracts.table import MISSING
from teraio.simulator.arena_gaps import find_gap, leave_gap, note_gap
from teraio.simulator.compilation import compiled
from teraio.simulator.state import AWAY, Engine


@compiled
def leave_gpu(engine: Engine, storage: int) -> None:
    """Give a storage's GPU memory back; a copy of it exists."""
    engine.storages[storage].status = AWAY
    engine.stream[0].held -= engine.storages[storage].allocated_bytes


@compiled
def copy_device(engine: Engine, storage: int) -> int:
    """Device of a copy, the plan's before any other; MISSING if there is none."""
    first, end = engine.storages[storage].first_copy, engine.storages[storage + 1].first_copy
    for row in range(first, end):
        if engine.copies[row].is_valid:
            return int(engine.copies[row].device)
    return int(engine.storages[storage].overflow_device)


@compiled
def has_copy(engine: Engine, storage: int) -> bool:
    """Whether a copy is there, or being written."""
    return copy_device(engine, storage) != MISSING


@compiled
def give_up_copies(engine: Engine, storage: int) -> None:
    """The copies of a storage are no longer what it holds, or no longer there."""
    first, end = engine.storages[storage].first_copy, engine.storages[storage + 1].first_copy
    for row in range(first, end):
        engine.copies[row].is_valid = False
    release_overflow(engine, storage)


@compiled
def slot_bytes(engine: Engine, storage: int, device: int) -> int:
    """Room that a storage takes on a device."""
    alignment = engine.devices[device].alignment
    return int((engine.storages[storage].nbytes + alignment - 1) // alignment * alignment)


@compiled
def reserve_overflow(engine: Engine, storage: int) -> int:
    """Device of a place, taken, for a copy that the plan does not know; MISSING if none has room.

    The host if it has room, else the SSD with the most, else a gap in the arenas.
    """
    devices, best = engine.devices, 0
    if devices[0].room < slot_bytes(engine, storage, 0):
        for device in range(1, devices.size - 1):
            if best == 0 or devices[device].room > devices[best].room:
                best = device
    nbytes = slot_bytes(engine, storage, best)
    if devices[best].room >= nbytes:
        devices[best].room -= nbytes
        devices[best].lowest_room = min(devices[best].lowest_room, devices[best].room)
        engine.storages[storage].overflow_device = best
        return best
    for device in range(devices.size - 1):
        begin = find_gap(engine, device, slot_bytes(engine, storage, device))
        if begin != MISSING:
            take_place(engine, storage, device, begin)
            engine.storages[storage].overflow_device = device
            engine.storages[storage].overflow_offset = begin
            note_gap(engine, storage)
            return device
    return MISSING


@compiled
def release_overflow(engine: Engine, storage: int) -> None:
    """Give the copy that the plan does not know up."""
    record = engine.storages[storage]
    device = record.overflow_device
    if device == MISSING:
        return
    if record.overflow_offset == MISSING:
        engine.devices[device].room += slot_bytes(engine, storage, device)
    else:
        leave_gap(engine, storage)
    record.overflow_device = MISSING
    record.overflow_offset = MISSING


@compiled
def take_place(engine: Engine, storage: int, device: int, begin: int) -> bool:
    """Let others give bytes of an arena up; False, and nothing done, if one's only copy is there.

    The place is as long as the storage.
    """
    end = begin + max(engine.storages[storage].nbytes, 1)
    if not visit_owners(engine, storage, device, begin, end, False):
        return False
    return visit_owners(engine, storage, device, begin, end, True)


@compiled
def visit_owners(
    engine: Engine, storage: int, device: int, begin: int, end: int, is_final: bool
) -> bool:
    """Whether all other owners of some bytes are on the GPU; if ``is_final``, they lose them."""
    first, row = engine.devices[device].first_place, place_at(engine, device, end) - 1
    while row >= first and engine.places[row].reach > begin:
        place = engine.places[row]
        is_met = place.end > begin and place.storage != storage
        if is_met and engine.copies[place.copy].is_valid:
            if engine.storages[place.storage].status == AWAY:
                return False
            if is_final:
                engine.copies[place.copy].is_valid = False
        row -= 1
    for row in range(engine.stream[0].num_in_gaps - 1, -1, -1):
        other = engine.in_gaps[row]
        owner = engine.storages[other]
        offset = owner.overflow_offset
        is_met = owner.overflow_device == device and other != storage
        if is_met and offset < end and offset + max(owner.nbytes, 1) > begin:
            if owner.status == AWAY:
                return False
            if is_final:
                release_overflow(engine, other)
    return True


@compiled
def place_at(engine: Engine, device: int, offset: int) -> int:
    """First place of a device that begins at ``offset`` or later."""
    low, high = engine.devices[device].first_place, engine.devices[device + 1].first_place
    while low < high:
        middle = (low + high) // 2
        if engine.places[middle].begin < offset:
            low = middle + 1
        else:
            high = middle
    return int(low)
