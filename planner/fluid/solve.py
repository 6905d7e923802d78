"""Solve a linear program with OR-Tools, from arrays; the answer is used through its duals only."""

from __future__ import annotations

import datetime
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from teraio.contracts.table import FloatArray
from teraio.planner.fluid.linear_program import LinearProgram

LARGE_ROWS = 20_000
"""From here on HiGHS' interior point method is tried before GLOP's dual simplex: that takes half as
long to twice as long there, and below a third to two thirds of its time."""

_PRESOLVE_SECONDS_PER_ROW = 3e-5
"""HiGHS forgets a limit that is over before its presolve is; seen with a limit of 0.05 s."""

_CONCLUSIVE = ("optimal", "infeasible")


@dataclass(frozen=True)
class Solution:
    """``status`` is the solver's word, in lower case; arrays are None where it gave none."""

    status: str
    values: FloatArray | None
    duals: FloatArray | None


def solve(program: LinearProgram, time_limit: float | None = None) -> Solution:
    """Minimise; ``time_limit`` in seconds. Never raises for what the solvers cannot do.

    Where one gives up (GLOP: "imprecise", without values), another is asked in the time left.
    """
    deadline = None if time_limit is None else time.monotonic() + time_limit
    best = Solution("no_solution_found", None, None)
    ways = [("GLOP", True), ("GLOP", False), ("HIGHS", True)]
    num_rows = len(program.row_lower)
    if num_rows >= LARGE_ROWS:
        ways = [("HIGHS", True), ("GLOP", True)]
    for solver, presolves in ways:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            break
        if solver == "HIGHS" and left is not None and left < _PRESOLVE_SECONDS_PER_ROW * num_rows:
            continue
        found = _attempt(program, solver, presolves, left)
        if found is not None and (best.duals is None or found.duals is not None):
            # Until one is sure, values of one and duals of another are of use.
            is_whole = found.values is not None or found.status in _CONCLUSIVE
            best = found if is_whole else replace(found, values=best.values)
        if best.status in _CONCLUSIVE:
            break
    return best


def _attempt(
    program: LinearProgram, solver: str, presolves: bool, time_limit: float | None
) -> Solution | None:
    from ortools.math_opt.python import mathopt

    keywords: dict[str, Any] = {}
    if time_limit is not None:
        keywords["time_limit"] = datetime.timedelta(seconds=max(time_limit, 0.001))
    algorithm = mathopt.LPAlgorithm
    keywords["lp_algorithm"] = algorithm.BARRIER if solver == "HIGHS" else algorithm.DUAL_SIMPLEX
    if not presolves:
        keywords["presolve"] = mathopt.Emphasis.OFF
    model = mathopt.Model.from_model_proto(_to_proto(program))
    try:
        result = mathopt.solve(
            model, mathopt.SolverType[solver], params=mathopt.SolveParameters(**keywords)
        )
    except (RuntimeError, ValueError, AttributeError):
        # MathOpt reports a failure of the solver inside as any of these (AttributeError: 9.15).
        return None
    return _read(result, program)


def _read(result: Any, program: LinearProgram) -> Solution:
    from ortools.math_opt.python import mathopt

    status = str(result.termination.reason.name).lower()
    values = duals = None
    for solution in result.solutions:
        primal = solution.primal_solution
        # The dual simplex tells values of infeasible programs too.
        is_feasible = primal and primal.feasibility_status is mathopt.SolutionStatus.FEASIBLE
        if values is None and is_feasible:
            values = _by_id(primal.variable_values, len(program.cost))
        if duals is None and solution.dual_solution is not None:
            duals = _by_id(solution.dual_solution.dual_values, len(program.row_lower))
    return Solution(status, values, duals)


def _by_id(values: Any, count: int) -> FloatArray:
    result = np.zeros(count)
    for item, value in values.items():
        result[item.id] = value
    return result


def _to_proto(program: LinearProgram) -> Any:
    from ortools.math_opt import model_pb2

    proto = model_pb2.ModelProto()
    num_columns, num_rows = len(program.cost), len(program.row_lower)
    columns, rows = proto.variables, proto.linear_constraints
    columns.ids.extend(range(num_columns))
    columns.lower_bounds.extend(np.zeros(num_columns).tolist())
    columns.upper_bounds.extend(program.column_upper.tolist())
    columns.integers.extend([False] * num_columns)
    rows.ids.extend(range(num_rows))
    rows.lower_bounds.extend(program.row_lower.tolist())
    rows.upper_bounds.extend(program.row_upper.tolist())
    costly = np.flatnonzero(program.cost)
    proto.objective.linear_coefficients.ids.extend(costly.tolist())
    proto.objective.linear_coefficients.values.extend(program.cost[costly].tolist())
    matrix = proto.linear_constraint_matrix
    matrix.row_ids.extend(program.rows.tolist())
    matrix.column_ids.extend(program.columns.tolist())
    matrix.coefficients.extend(program.values.tolist())
    return proto
