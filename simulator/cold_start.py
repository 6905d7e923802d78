"""Where storages are before the first kernel of a run off plan.

The rule: storages that cannot move come first, then the others in order of their first access (ties
and storages never accessed: by index). Each stays on the GPU if it still fits; else it is on the
tier where it has a copy, else on the host if it fits, else on the SSD with the most room.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from teraio.contracts.table import MISSING, BoolArray, IntArray
from teraio.errors import CapacityError
from teraio.traces.trace import Storages
from teraio.units import format_bytes


class Placement(NamedTuple):
    """``is_on_gpu`` and ``overflow_device`` (MISSING: none) per storage; room left per device."""

    is_on_gpu: BoolArray
    overflow_device: IntArray
    room_bytes: IntArray


def place_storages(
    storages: Storages,
    candidates: IntArray,
    first_access: IntArray,
    has_copy: BoolArray,
    gpu_memory_bytes: int,
    room_bytes: IntArray,
    alignment: IntArray,
) -> Placement:
    """Place the ``candidates`` (indices of storages alive at the cut and not away by plan).

    Raises CapacityError if a storage fits nowhere.
    """
    is_on_gpu = np.zeros(len(storages), dtype=bool)
    overflow_device = np.full(len(storages), MISSING)
    room_bytes = room_bytes.copy()
    order = np.lexsort((candidates, first_access[candidates], storages.resizable[candidates]))
    free_bytes = gpu_memory_bytes
    for storage in candidates[order].tolist():
        allocated = int(storages.allocated_bytes[storage])
        if allocated <= free_bytes or not storages.resizable[storage]:
            is_on_gpu[storage] = True
            free_bytes -= allocated
        elif not has_copy[storage]:
            device, slot_bytes = _overflow(int(storages.nbytes[storage]), room_bytes, alignment)
            if device == MISSING:
                raise CapacityError(
                    f"storage {storage} ({format_bytes(slot_bytes)}) fits neither on the GPU nor "
                    "on host or SSD before the first kernel; give more host memory or SSD capacity"
                )
            overflow_device[storage] = device
            room_bytes[device] -= slot_bytes
    return Placement(is_on_gpu, overflow_device, room_bytes)


def _overflow(nbytes: int, room_bytes: IntArray, alignment: IntArray) -> tuple[int, int]:
    """Device for a storage, and its slot's bytes there; MISSING if no device has room."""
    slots = -(-nbytes // alignment) * alignment
    if slots[0] <= room_bytes[0]:
        return 0, int(slots[0])
    if len(room_bytes) > 1:
        device = 1 + int(np.argmax(room_bytes[1:]))
        if slots[device] <= room_bytes[device]:
            return device, int(slots[device])
    return MISSING, int(slots[0])
