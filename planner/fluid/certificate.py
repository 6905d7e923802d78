"""The proof of a bound: what any dual vector shows, computed without the solver (F9)."""

from __future__ import annotations

import numpy as np

from teraio.contracts.table import FloatArray
from teraio.planner.fluid.linear_program import LinearProgram

_ROUNDING = 1e-13
"""Generous relative error of one sum in doubles, taken off the bound."""


def certified_minimum(program: LinearProgram, duals: FloatArray, upper: FloatArray) -> float:
    """A number that no feasible x with 0 <= x <= ``upper`` costs less than; -inf if none is shown.

    For any y: cost x = y'Ax + (cost - A'y)x >= sum_i min over the row's interval of y_i a_i
    + sum_j min(0, reduced cost_j) upper_j. Duals whose sign points at an infinite side count as 0,
    and so does anything that is not a number.
    """
    y = np.where(np.isfinite(duals), duals, 0.0)
    side = np.where(y > 0, program.row_lower, program.row_upper)
    y = np.where(np.isfinite(side), y, 0.0)
    side = np.where(np.isfinite(side), side, 0.0)
    products = program.values * y[program.rows]
    count = len(program.cost)
    reduced = program.cost - np.bincount(program.columns, weights=products, minlength=count)
    # Cancellation in a reduced cost is bounded by the size of what was added.
    size = np.abs(program.cost) + np.bincount(
        program.columns, weights=np.abs(products), minlength=count
    )
    corrections = np.minimum(0.0, reduced - _ROUNDING * size) * upper
    terms = y * side
    total = float(np.sum(terms) + np.sum(corrections))
    return total - _ROUNDING * float(np.sum(np.abs(terms)) + np.sum(np.abs(corrections)))
