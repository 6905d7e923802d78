"""Large storages are settled before the rest: a fluid moves a third of them, a plan cannot.

Of many storages that are alike, rounding moves about as many bytes as the guide wants. Of an
embedding and its optimizer state, each a twentieth of the GPU's memory, it is off by up to half of
one, and no small storage makes up for that where the guide has settled all. So the guide is solved
again with whole numbers of the large ones, and decides about the others with that in mind.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from teraio.contracts.table import FloatArray, IntArray
from teraio.planner.fluid.classes import GapClasses
from teraio.planner.fluid.formulation import FluidProgram
from teraio.planner.optimal.periods import Problem

_LARGE_SHARE = 0.02
"""Of the GPU's memory: from here on a storage is large."""

_WHOLE = 0.02
"""Solutions this near to a whole number of storages are whole."""


def settle_large(
    fluid: FluidProgram, problem: Problem, gaps: GapClasses, wanted_bytes: FloatArray
) -> FluidProgram | None:
    """The program with whole numbers of large storages, those nearest to what it wanted; None if
    all are whole.

    ``wanted_bytes`` float64 (devices, gaps) is its solution. Numbers that contradict each other
    make the program infeasible.
    """
    row = gaps.row_of_period[problem.period]
    members = np.bincount(row[row >= 0], minlength=len(gaps))
    size = gaps.num_bytes / members
    number = wanted_bytes / size
    is_whole = (np.abs(number - np.round(number)) <= _WHOLE).all(axis=0)
    open_gaps = np.flatnonzero((size >= _LARGE_SHARE * problem.capacity_bytes) & ~is_whole)
    if not len(open_gaps):
        return None
    devices = np.array([problem.machine.devices.index(tier.name) for tier in fluid.tiers])
    settled_bytes = (np.round(number) * size)[np.ix_(devices, open_gaps)]
    return _with_settled(fluid, open_gaps, settled_bytes / fluid.byte_unit)


def _with_settled(fluid: FluidProgram, gaps: IntArray, settled: FloatArray) -> FluidProgram:
    """With further rows: delta + kappa of each tier and gap is ``settled`` (tiers, gaps)."""
    program = fluid.program
    rows, columns = [program.rows], [program.columns]
    place = np.searchsorted(fluid.serves, gaps)
    has_kappa = np.isin(gaps, fluid.serves)
    for tier, of_tier in enumerate(fluid.tier_columns):
        own = len(program.row_lower) + tier * len(gaps) + np.arange(len(gaps))
        rows += [own, own[has_kappa]]
        columns += [of_tier.delta[gaps], of_tier.kappa[place[has_kappa]]]
    all_rows, all_columns = np.concatenate(rows), np.concatenate(columns)
    ones = np.ones(len(all_rows) - len(program.rows))
    order = np.lexsort((all_columns, all_rows))
    longer = replace(
        program,
        row_lower=np.r_[program.row_lower, settled.reshape(-1)],
        row_upper=np.r_[program.row_upper, settled.reshape(-1)],
        rows=all_rows[order],
        columns=all_columns[order],
        values=np.r_[program.values, ones][order],
    )
    return replace(fluid, program=longer)
