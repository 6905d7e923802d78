"""From fluid to whole tensors: error diffusion over time, tier by tier.

The program's solution has fractions in few classes only, so carrying what rounding leaves over to
the next class is enough (chronologically, within bounds). Periods of one version share
a copy on each device, so that the same members of a class should go to the same device every time.
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
    gaps = guide.gaps
    gap = gaps.row_of_period[problem.period]
    members = np.flatnonzero(gap >= 0)
    num_slots = int(gaps.due.max(initial=0)) + 1
    release = gaps.release[gap[members]] % num_slots
    order = np.lexsort((members, -problem.num_bytes[members], gap[members], release))
    members = members[order]
    begins = np.flatnonzero(np.diff(gap[members], prepend=-1))
    device = np.full(len(problem.period), STAYS)
    _diffuse(
        members,
        np.r_[begins, len(members)],
        gap[members[begins]],
        problem.num_bytes.astype(float),
        guide.wanted_bytes,
        gaps.num_bytes,
        device,
    )
    if guide.repeated is not None:
        # What leaves the repeated turn is what enters it.
        device[guide.repeated.rows_in] = device[guide.repeated.rows_out]
    return device


@numba.njit(cache=True)
def _diffuse(
    members: IntArray,
    bounds: IntArray,
    gap: IntArray,
    size: FloatArray,
    wanted_bytes: FloatArray,
    class_bytes: FloatArray,
    device: IntArray,
) -> None:
    """``members`` are rows by class, in order of release; class i from bounds[i] on is ``gap[i]``.

    The first device takes members from the front and the others from the back, so that each finds
    the same ones in every gap of a version, and few need copies on two devices.
    """
    num_devices = wanted_bytes.shape[0]
    left = np.zeros(num_devices)
    for i in range(len(gap)):
        first, last = bounds[i], bounds[i + 1] - 1
        for d in range(num_devices):
            left[d] = min(max(left[d], -_MAX_CARRY_BYTES), _MAX_CARRY_BYTES)
            left[d] += wanted_bytes[d, gap[i]]
            if wanted_bytes[d, gap[i]] <= _LEAST_SHARE * class_bytes[gap[i]]:
                continue
            while first <= last:
                row = members[first] if d == 0 else members[last]
                if left[d] < size[row] / 2:
                    break
                device[row] = d
                left[d] -= size[row]
                first += d == 0
                last -= d != 0
