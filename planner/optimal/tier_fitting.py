"""Tiers get no more than they hold: what finds no slot on one goes to another that has room.

Without this, one storage too many on the host makes a choice worthless, however fast it would be;
and with a margin for that, as much is always on the slow tier. Where a device has too much,
versions leave it one by one, those first whose transfers elsewhere take least time for what they
free at the fullest kernel. What then has room again comes back, large ones first.
"""

from __future__ import annotations

import numpy as np

from teraio.contracts.table import BoolArray, FloatArray, IntArray
from teraio.planner.optimal.occupancy import (
    TakenSlots,
    arena_bytes,
    limited_devices,
    taken_bytes,
    taken_slots,
)
from teraio.planner.optimal.periods import Problem

_MAX_PACKINGS = 6
"""How often less is planned for a device whose slots do not pack into it."""


def fit_tiers(problem: Problem, device: IntArray) -> IntArray:
    """The choice with versions on other devices than before, so that every device has room for its
    slots as they will be packed; as it was where that is not possible.
    """
    result = device
    for number in limited_devices(problem):
        if problem.machine.capacity_bytes[number] > 0:
            result = _fitted(problem, result, number)
    return result


def _fitted(problem: Problem, device: IntArray, number: int) -> IntArray:
    """Room for all slots of device ``number``."""
    target = _with_most_room(problem, device, number)
    if target is None:
        return device
    capacity_bytes = int(problem.machine.capacity_bytes[number])
    room_bytes, result = capacity_bytes, device
    for _ in range(_MAX_PACKINGS):
        result = _within(problem, device, number, room_bytes, target)
        slots = taken_slots(problem, result, number)
        excess = arena_bytes(slots, problem.num_kernels) - capacity_bytes
        if excess <= 0:
            break
        room_bytes -= excess
    taken = taken_bytes(taken_slots(problem, result, target), problem.num_kernels)
    has_room = taken.max(initial=0) <= problem.machine.capacity_bytes[target]
    return result if excess <= 0 and has_room else device


def _within(
    problem: Problem, device: IntArray, number: int, room_bytes: int, target: int
) -> IntArray:
    """At most ``room_bytes`` taken on device ``number`` at any kernel, the rest on ``target``."""
    slots = taken_slots(problem, device, number)
    over = taken_bytes(slots, problem.num_kernels) - max(room_bytes, 0)
    if over.max(initial=0) <= 0:
        return device
    seconds = _moving_seconds(problem, device, slots, number, target)
    stays = _enough_leave(slots, over, seconds)
    for slot in np.flatnonzero(~stays)[np.argsort(-seconds[~stays], kind="stable")]:
        _add(over, slots, slot, 1)
        stays[slot] = over.max() <= 0
        if not stays[slot]:
            _add(over, slots, slot, -1)
    is_moved = (device == number) & np.isin(problem.version, slots.version[~stays])
    return np.where(is_moved, target, device)


def _enough_leave(slots: TakenSlots, over: IntArray, seconds: FloatArray) -> BoolArray:
    """Which slots stay, bool (slots,), once nothing is ``over``, which is brought up to date.

    ``over`` int64 (K,) are bytes too many, ``seconds`` what it costs that a slot leaves.
    """
    stays = np.ones(len(slots.version), dtype=bool)
    while over.max() > 0:
        kernel = int(np.argmax(over))
        at_once = np.flatnonzero(stays & _covers(slots, kernel, len(over)))
        freed = np.minimum(slots.num_bytes[at_once], over[kernel])
        order = np.lexsort((-slots.length[at_once], seconds[at_once] / freed))
        stays[at_once[order[0]]] = False
        _add(over, slots, at_once[order[0]], -1)
    return stays


def _with_most_room(problem: Problem, device: IntArray, number: int) -> int | None:
    """The device other than ``number`` with the most bytes free at its fullest."""
    free = problem.machine.capacity_bytes.copy()
    for other in np.flatnonzero(free > 0).tolist():
        slots = taken_slots(problem, device, other)
        free[other] -= taken_bytes(slots, problem.num_kernels).max(initial=0)
    free[number] = 0
    return int(np.argmax(free)) if free.max() > 0 else None


def _moving_seconds(
    problem: Problem, device: IntArray, slots: TakenSlots, number: int, target: int
) -> FloatArray:
    """Seconds of the transfers of each slot's version, if they are of ``target``, (slots,)."""
    read_rate, write_rate = problem.machine.solo_rate[2 * target : 2 * target + 2]
    rows = np.flatnonzero(device == number)
    is_written = problem.writes(device)[rows]
    seconds = is_written / write_rate + ~problem.is_tail[rows] / read_rate
    total = np.zeros(int(slots.version.max()) + 1)
    np.add.at(total, problem.version[rows], seconds * problem.num_bytes[rows])
    result: FloatArray = total[slots.version]
    return result


def _covers(slots: TakenSlots, kernel: int, num_kernels: int) -> BoolArray:
    """Whether each slot is taken after ``kernel``, bool (slots,)."""
    result: BoolArray = (kernel - slots.first_kernel) % num_kernels < slots.length
    return result


def _add(over: IntArray, slots: TakenSlots, slot: int, sign: int) -> None:
    """Count a slot once more (``sign`` 1) or no more (-1)."""
    first = slots.first_kernel[slot]
    end = first + slots.length[slot]
    over[first:end] += sign * slots.num_bytes[slot]
    over[: max(0, end - len(over))] += sign * slots.num_bytes[slot]
