"""The proof of a bound: what any dual vector shows, computed without the solver (F9)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from teraio.contracts.table import FloatArray
from teraio.planner.fluid.linear_program import LinearProgram

_ROUNDING = 1e-13
"""Generous relative error of one sum in doubles, taken off the bound."""


class Shown(NamedTuple):
    """No feasible x whose unlimited variables are at most u costs less than at_zero + slope x u.

    ``slope`` is never positive.
    """

    at_zero: float
    slope: float

    def minimum(self) -> float:
        """What no feasible x costs less than, if unlimited variables cost 1 and none costs less.

        Such an x costs u or more, or has none of them above u: the lower of two lines, whatever u
        is, and highest where they meet.
        """
        meets = max(0.0, self.at_zero) / (1 - self.slope)
        return max(0.0, min(meets, self.at_zero + self.slope * meets))


def shown_by(program: LinearProgram, duals: FloatArray) -> Shown:
    """What ``duals`` prove, whatever they are.

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
    negative = np.minimum(0.0, reduced - _ROUNDING * size)
    is_limited = np.isfinite(program.column_upper)
    limited = negative[is_limited] * program.column_upper[is_limited]
    terms = np.concatenate((y * side, limited))
    at_zero = float(np.sum(terms)) - _ROUNDING * float(np.sum(np.abs(terms)))
    return Shown(at_zero, float(np.sum(negative[~is_limited])) * (1 + _ROUNDING))
