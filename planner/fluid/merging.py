"""Columns of a linear program that are the same in every row become one."""

from __future__ import annotations

import numpy as np

from teraio.contracts.table import IntArray
from teraio.planner.fluid.linear_program import LinearProgram
from teraio.planner.fluid.sequences import dense, labels_of_runs


def merge_columns(program: LinearProgram) -> tuple[LinearProgram, IntArray]:
    """A program whose variables are averages over equal columns, and the new column of each."""
    column = _alike(program)
    size = np.bincount(column).astype(float)
    count = len(size)
    _, example = np.unique(column, return_index=True)
    is_example = np.zeros(len(column), dtype=bool)
    is_example[example] = True
    keeps = is_example[program.columns]
    columns = column[program.columns[keeps]]
    merged = LinearProgram(
        cost=program.cost[example] * size,
        column_upper=np.bincount(column, weights=program.column_upper, minlength=count) / size,
        row_lower=program.row_lower,
        row_upper=program.row_upper,
        rows=program.rows[keeps],
        columns=columns,
        values=program.values[keeps] * size[columns],
    )
    return merged, column


def _alike(program: LinearProgram) -> IntArray:
    """A number per column, equal for those with equal cost, entries and kind of limit."""
    num_columns = len(program.cost)
    order = np.argsort(program.columns, kind="stable")  # Entries come by row.
    value = dense(program.values.view(np.int64))
    code = (program.rows * (int(value.max(initial=0)) + 1) + value)[order]
    count = np.bincount(program.columns, minlength=num_columns)
    own = 2 * dense(program.cost.view(np.int64)) + np.isfinite(program.column_upper)
    return labels_of_runs(np.cumsum(count) - count, count, code, own)
