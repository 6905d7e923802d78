"""An earlier plan as the start of a search: for another budget, or another machine."""

from __future__ import annotations

import numpy as np

from teraio.contracts.plan import Plan
from teraio.contracts.table import FloatArray, IntArray
from teraio.errors import InputError
from teraio.planner.optimal.periods import STAYS, Problem
from teraio.traces.lifetimes import kernel_starts_seconds


def choice_of_plan(problem: Problem, plan: Plan) -> tuple[IntArray, FloatArray]:
    """What the plan moves, as a device per row, and a timeline as long as it predicts.

    A device that the machine lacks becomes the first one of the same tier, or the first one with
    room. Raises InputError for a plan of another trace.
    """
    num_kernels = problem.num_kernels
    moves = plan.moves
    if len(plan.kernels) != num_kernels or len(plan.storages) != len(problem.trace.storages):
        raise InputError(
            f"start: the plan is for another trace ({len(plan.kernels)} kernels and "
            f"{len(plan.storages)} storages, not {num_kernels} and {len(problem.trace.storages)})"
        )
    key = problem.storage * num_kernels + problem.after
    order = np.argsort(key)
    wanted = moves.storage * num_kernels + moves.after_kernel
    place = np.minimum(np.searchsorted(key[order], wanted), max(len(key) - 1, 0))
    row = order[place] if len(order) else np.zeros(0, dtype=np.int64)
    if len(row) != len(wanted) or (key[row] != wanted).any():
        raise InputError("start: the plan is for another trace: it moves periods that are not here")
    device = np.full(len(problem.period), STAYS)
    numbers = {name: _device_number(problem, name) for name in set(moves.device.tolist())}
    device[row] = [numbers[name] for name in moves.device.tolist()]
    starts = kernel_starts_seconds(problem.trace)
    longer = max(1.0, plan.predicted_seconds / float(starts[-1])) if starts[-1] > 0 else 1.0
    return device, starts * longer


def _device_number(problem: Problem, name: str) -> int:
    devices = problem.machine.devices
    has_room = problem.machine.capacity_bytes > 0
    if name in devices and has_room[devices.index(name)]:
        return devices.index(name)
    return int(np.argmax(has_room)) if has_room.any() else STAYS
