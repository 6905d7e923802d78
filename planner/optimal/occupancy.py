"""How full a choice makes the tiers, before and after slots are packed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from teraio.contracts.table import BoolArray, IntArray
from teraio.planner.optimal.periods import Problem
from teraio.planner.residency import cyclic_sum
from teraio.planner.slot_packing import align_up, pack_slots


class TakenSlots(NamedTuple):
    """Slots that a choice takes on one device, (slots,) each: whose version, from the end of which
    kernel (0 to K - 1), until how many kernels later, and bytes with alignment.

    A slot is taken from the first offload of its version to the device until the end of the last
    gap; that of a storage never written, always.
    """

    version: IntArray
    first_kernel: IntArray
    length: IntArray
    num_bytes: IntArray


def overfull_devices(problem: Problem, device: IntArray) -> BoolArray:
    """Devices whose slots would take more than there is at some kernel, bool (devices,).

    Packing may need somewhat more.
    """
    capacity_bytes = problem.machine.capacity_bytes
    result = np.zeros(len(capacity_bytes), dtype=bool)
    for number in limited_devices(problem):
        taken = taken_bytes(taken_slots(problem, device, number), problem.num_kernels)
        result[number] = taken.max(initial=0) > capacity_bytes[number]
    return result


def limited_devices(problem: Problem) -> list[int]:
    """Devices that have no room for all at once."""
    is_limited = problem.machine.capacity_bytes < problem.trace.peak_live_bytes
    result: list[int] = np.flatnonzero(is_limited).tolist()
    return result


def taken_slots(problem: Problem, device: IntArray, number: int) -> TakenSlots:
    """The slots of device ``number``, in order of version."""
    rows = problem.by_version[device[problem.by_version] == number]
    version = problem.version[rows]
    begins = np.flatnonzero(np.diff(version, prepend=-1))
    first = rows[begins]
    last = rows[np.r_[begins[1:], len(rows)] - 1] if len(rows) else first
    length = problem.position[last] - problem.position[first]
    length += problem.end[last] - problem.after[last]
    length = np.where(problem.is_unwritten[first], problem.num_kernels, length)
    return TakenSlots(
        version=version[begins],
        first_kernel=problem.after[first] % problem.num_kernels,
        length=np.minimum(length, problem.num_kernels),
        num_bytes=align_up(problem.num_bytes[first], _alignment_bytes(problem, number)),
    )


def _alignment_bytes(problem: Problem, number: int) -> int:
    """Of slots on a device; those of a closed one (:meth:`Problem.with_host_alone`) have none."""
    if problem.machine.capacity_bytes[number] <= 0:
        return 1
    return problem.hardware.alignment_bytes(problem.machine.devices[number])


def taken_bytes(slots: TakenSlots, num_kernels: int) -> IntArray:
    """Bytes of slots taken between each kernel and the next, int64 (K,)."""
    end = slots.first_kernel + slots.length
    return cyclic_sum(slots.first_kernel, end, slots.num_bytes, num_kernels)


def arena_bytes(slots: TakenSlots, num_kernels: int) -> int:
    """What the slots need as they will be packed."""
    end = slots.first_kernel + slots.length
    offsets = pack_slots(slots.first_kernel, end, slots.num_bytes, num_kernels)
    return int((offsets + slots.num_bytes).max(initial=0))
