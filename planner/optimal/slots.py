"""Slots of the guide: by layer, and finer where one slot would touch too much memory."""

from __future__ import annotations

from teraio.planner.fluid.slots import Slots, cut_into_slots
from teraio.traces.trace import Trace


def guide_slots(trace: Trace, max_seconds: float, max_bytes: float) -> Slots:
    """Slots that end where micro-batch, phase or layer change, after ``max_seconds`` of ideal time,
    and before the kernels of the optimizer in one slot touch more than ``max_bytes``. In all of
    them kernels may be slower: the guide's timeline stretches whole slots.
    """
    return cut_into_slots(trace, max_seconds, runs_may_stretch=True, max_bytes=max_bytes)
