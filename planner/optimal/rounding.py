"""From fluid to whole tensors: error diffusion over time, tier by tier; and repair of what is left.

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


def repair(problem: Problem, device: IntArray) -> IntArray | None:
    """The choice with further rows until the longest absences fit; None if they cannot.

    Where most is missing, the row that is idle longest leaves, if it alone is enough, to the device
    that the choice uses most.
    """
    device = device.copy()
    rows = np.flatnonzero(device != STAYS)
    used = np.bincount(
        device[rows], weights=problem.num_bytes[rows], minlength=len(problem.machine.devices)
    )
    preferred = int(np.argmax(used)) if len(rows) else len(problem.machine.devices) - 1
    over = problem.resident_with(rows, problem.away_first[rows], problem.away_end[rows])
    over -= problem.capacity_bytes
    num_kernels = problem.num_kernels
    lap = problem.away_first // num_kernels * num_kernels
    first, end = problem.away_first - lap, problem.away_end - lap
    while True:
        kernel = int(np.argmax(over))
        if over[kernel] <= 0:
            return device
        covers = ((first <= kernel) & (kernel < end)) | (kernel + num_kernels < end)
        free = np.flatnonzero(covers & (device == STAYS))
        if not len(free):
            return None
        enough = free[problem.relief_bytes[free] >= over[kernel]]
        row = _longest(problem, enough if len(enough) else free)
        device[row] = preferred
        over[first[row] : end[row]] -= problem.relief_bytes[row]
        over[: max(end[row] - num_kernels, 0)] -= problem.relief_bytes[row]


def _longest(problem: Problem, rows: IntArray) -> int:
    return int(rows[np.argmax(problem.seconds[rows])])
