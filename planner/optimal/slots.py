"""Slots of the guide: by layer, and finer where one slot would touch too much memory."""

from __future__ import annotations

import numpy as np

from teraio.contracts.table import BoolArray, FloatArray
from teraio.planner.fluid.slots import Slots, cut_into_slots
from teraio.traces.trace import Trace


def guide_slots(trace: Trace, max_seconds: float, max_bytes: float) -> Slots:
    """Slots that end where micro-batch, phase or layer change, after ``max_seconds`` of ideal time,
    and before the kernels of the optimizer in one slot touch more than ``max_bytes``.

    Parameters and their state are many storages that each one kernel needs at once, so that a slot
    of several such kernels would ask for all of them together.
    """
    coarse = cut_into_slots(trace, max_seconds, runs_may_stretch=True)
    slot = coarse.of_piece[0::2]
    begins = np.ones(trace.num_kernels, dtype=bool)
    begins[1:] = np.diff(slot) != 0
    touched = np.zeros(trace.num_kernels)
    accesses = trace.accesses
    np.add.at(touched, accesses.kernel, trace.storages.allocated_bytes[accesses.storage])
    is_step = trace.kernels.phase == "optimizer"
    filled = 0.0
    for k in np.flatnonzero(is_step).tolist():
        if begins[k] or filled + touched[k] > max_bytes:
            begins[k], filled = True, 0.0
        filled += touched[k]
    return _slots(trace, begins)


def _slots(trace: Trace, begins: BoolArray) -> Slots:
    kernels = trace.kernels
    slot = np.cumsum(begins) - 1
    seconds: FloatArray = np.zeros(int(slot[-1]) + 1)
    np.add.at(seconds, slot, kernels.duration_seconds)
    np.add.at(seconds, slot, np.roll(kernels.gap_before_seconds, -1))
    return Slots(
        of_piece=np.repeat(slot, 2), seconds=seconds, may_stretch=np.ones(len(seconds), dtype=bool)
    )
