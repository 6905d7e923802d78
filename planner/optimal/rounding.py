"""From fluid to whole tensors: error diffusion over time, tier by tier.

The program's solution has fractions in few classes only, so carrying what rounding leaves over to
the next class is enough (chronologically, within bounds).
"""

from __future__ import annotations

import numba
import numpy as np

from teraio.contracts.table import FloatArray, IntArray
from teraio.planner.optimal.guide import Guide
from teraio.planner.optimal.periods import STAYS, Problem

_LEAST_SHARE = 1e-3
"""Less of a class than this is noise of the solver."""

_MAX_CARRY_BYTES = 4e9


def round_guide(problem: Problem, guide: Guide) -> IntArray:
    """A device per row: in each class, of each tier about the bytes that the guide wants."""
    gap = guide.gaps.row_of_period[problem.period]
    members = np.flatnonzero(gap >= 0)
    num_slots = int(guide.gaps.due.max(initial=0)) + 1
    members = members[
        np.lexsort(
            (
                members,
                -problem.num_bytes[members],
                gap[members],
                guide.gaps.release[gap[members]] % num_slots,
            )
        )
    ]
    device = np.full(len(problem.period), STAYS)
    size = problem.num_bytes.astype(float)
    _diffuse(members, gap, size, guide.wanted_bytes, guide.gaps.num_bytes, device)
    if guide.repeated is not None:
        # What leaves the repeated turn is what enters it.
        device[guide.repeated.rows_in] = device[guide.repeated.rows_out]
    return device


@numba.njit(cache=True)
def _diffuse(
    members: IntArray,
    gap: IntArray,
    size: FloatArray,
    wanted_bytes: FloatArray,
    class_bytes: FloatArray,
    device: IntArray,
) -> None:
    """``members`` are rows in order of release, those of a class together."""
    num_devices = wanted_bytes.shape[0]
    left = np.zeros(num_devices)
    current = -1
    for row in members:
        if gap[row] != current:
            current = gap[row]
            for d in range(num_devices):
                left[d] = min(max(left[d], -_MAX_CARRY_BYTES), _MAX_CARRY_BYTES)
                left[d] += wanted_bytes[d, current]
        best = -1
        for d in range(num_devices):
            is_wanted = wanted_bytes[d, current] > _LEAST_SHARE * class_bytes[current]
            if is_wanted and (best < 0 or left[d] > left[best]):
                best = d
        if best >= 0 and left[best] >= size[row] / 2:
            device[row] = best
            left[best] -= size[row]
