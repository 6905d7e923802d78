"""Off plan: copies on host and SSD, the plan's slots and the overflow beside them.

A planned copy is valid from the end of its offload until the storage is written or the last move
that uses the slot ends. An overflow copy lasts to the end of the inactive period in which it was
made. A storage that leaves the GPU with a valid copy leaves at no cost.
"""

from __future__ import annotations

from teraio.contracts.table import MISSING
from teraio.simulator.compilation import compiled
from teraio.simulator.state import AWAY, Engine


@compiled
def leave_gpu(engine: Engine, storage: int) -> None:
    """Give a storage's GPU memory back; a copy of it exists."""
    engine.storages[storage].status = AWAY
    engine.stream[0].held -= engine.storages[storage].allocated_bytes


@compiled
def valid_copy_device(engine: Engine, storage: int) -> int:
    """Device of a valid copy, the plan's before the overflow's; MISSING if there is none."""
    first, end = engine.storages[storage].first_copy, engine.storages[storage + 1].first_copy
    for row in range(first, end):
        if engine.copies[row].is_valid:
            return int(engine.copies[row].device)
    return int(engine.storages[storage].overflow_device)


@compiled
def invalidate_copies(engine: Engine, storage: int) -> None:
    """The planned copies of a storage are no longer what it holds."""
    first, end = engine.storages[storage].first_copy, engine.storages[storage + 1].first_copy
    for row in range(first, end):
        engine.copies[row].is_valid = False


@compiled
def slot_bytes(engine: Engine, storage: int, device: int) -> int:
    """Room that a storage takes on a device."""
    alignment = engine.devices[device].alignment
    return int((engine.storages[storage].nbytes + alignment - 1) // alignment * alignment)


@compiled
def overflow_target(engine: Engine, storage: int) -> int:
    """The host if it has room, else the SSD with the most; MISSING if none has enough."""
    devices, best = engine.devices, 0
    if devices[0].room < slot_bytes(engine, storage, 0):
        for device in range(1, devices.size):
            if best == 0 or devices[device].room > devices[best].room:
                best = device
    return best if devices[best].room >= slot_bytes(engine, storage, best) else MISSING


@compiled
def reserve_overflow(engine: Engine, storage: int, device: int) -> None:
    """Take overflow room for a copy that is about to be written."""
    target = engine.devices[device]
    target.room -= slot_bytes(engine, storage, device)
    target.lowest_room = min(target.lowest_room, target.room)
    engine.storages[storage].overflow_device = device


@compiled
def release_overflow(engine: Engine, storage: int) -> None:
    """Give the overflow room of a storage back."""
    device = engine.storages[storage].overflow_device
    if device != MISSING:
        engine.devices[device].room += slot_bytes(engine, storage, device)
        engine.storages[storage].overflow_device = MISSING
