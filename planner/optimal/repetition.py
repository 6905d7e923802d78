"""The turn of a folded trace that stands for many: where it is among slots, gaps and periods."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from teraio.contracts.table import BoolArray, IntArray
from teraio.planner.fluid.classes import GapClasses
from teraio.planner.fluid.slots import Slots
from teraio.planner.optimal.periods import Problem
from teraio.traces.folding import Folding


@dataclass(frozen=True, eq=False)
class Repeated:
    """Slots [first_slot, end_slot) stand for ``times`` turns.

    ``gaps_in`` are classes of gaps that reach into the turn from the one before it, ``gaps_out``
    those that reach as far out of it, pair by pair, int64 (pairs,); ``serves`` bool (gaps,) tells
    the gaps that a copy may serve. ``rows_in`` and ``rows_out``: the same, as rows of the problem.
    """

    first_slot: int
    end_slot: int
    times: int
    gaps_in: IntArray
    gaps_out: IntArray
    serves: BoolArray
    rows_in: IntArray
    rows_out: IntArray


def find_repeated(
    problem: Problem, slots: Slots, gaps: GapClasses, folding: Folding
) -> Repeated | None:
    """The turn before the cut; None if the one before it does not do the same."""
    length = folding.turn_kernels
    end, begin = folding.first_kernel, folding.first_kernel - length
    if begin - length < 0:
        return None
    first_slot, end_slot = (int(slots.of_piece[2 * kernel]) for kernel in (begin, end))
    # Slots must be cut at the turn's ends, or what is inside cannot be told from what is not.
    if any(slots.of_piece[2 * k] == slots.of_piece[2 * k - 1] for k in (begin, end)):
        return None
    row = gaps.row_of_period[problem.period]
    rows_in, rows_out = (
        np.flatnonzero(
            (problem.after >= stop - length)
            & (problem.after < stop)
            & (problem.end >= stop)
            & (row >= 0)
        )
        for stop in (begin, end)
    )
    if len(rows_in) != len(rows_out):
        return None
    same = problem.after[rows_in] + length == problem.after[rows_out]
    same &= problem.num_bytes[rows_in] == problem.num_bytes[rows_out]
    rows_in, rows_out = rows_in[same], rows_out[same]
    pairs = np.unique(np.stack((row[rows_in], row[rows_out])), axis=1)
    return Repeated(
        first_slot=first_slot,
        end_slot=end_slot,
        times=folding.num_turns + 1,
        gaps_in=pairs[0],
        gaps_out=pairs[1],
        serves=gaps.previous >= 0,
        rows_in=rows_in,
        rows_out=rows_out,
    )
