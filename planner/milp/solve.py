"""CP-SAT on the program: its answer, never read where there is none."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from teraio.planner.milp.choice import STAYS, Choice
from teraio.planner.milp.program import Program


@dataclass(frozen=True)
class Outcome:
    """``status``: optimal, feasible, infeasible or unknown. ``ticks`` is the iteration time of
    ``choice``, ``bound`` ticks that no choice is below.
    """

    status: str
    choice: Choice | None
    ticks: int
    bound: int


def solve(program: Program, time_limit: float | None) -> Outcome:
    """The best choice found within ``time_limit`` seconds, and what is proved about the best."""
    from ortools.sat.python import cp_model

    solver = careful_solver(time_limit)
    status = solver.solve(program.model)
    name = solver.status_name(status).lower()
    least = program.instance.ideal
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        # Values of a search without a solution are not even zeros.
        return Outcome("infeasible" if name == "infeasible" else "unknown", None, 0, least)
    bound = math.ceil(solver.best_objective_bound - 1e-6)
    ticks = int(solver.value(program.total))
    return Outcome(name, _choice(program, solver), ticks, max(bound, least))


def careful_solver(time_limit: float | None) -> Any:
    """A CpSolver that is deterministic up to its limit in seconds.

    One step of its presolve adds up coefficients in 32 bits and has certified wrong optima where
    they are bytes (or-tools issue 5293); it is left out, besides the small units.
    """
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.num_workers = 1
    parameters.random_seed = 1
    parameters.presolve_inclusion_work_limit = 0
    if time_limit is not None:
        parameters.max_time_in_seconds = max(time_limit, 0.001)
    return solver


def _choice(program: Program, solver: Any) -> Choice:
    count = len(program.instance.periods)

    def chosen(literals: dict[int, Any]) -> int:
        return next((j for j, literal in literals.items() if solver.boolean_value(literal)), 0)

    device = [chosen(dict(enumerate(on))) if _any(solver, on) else STAYS for on in program.on]
    return Choice(
        device=np.array(device, dtype=np.int64),
        offload_start=np.array([chosen(x) for x in program.offload], dtype=np.int64),
        free_by=np.array([chosen(x) for x in program.free], dtype=np.int64),
        prefetch_start=np.array([chosen(x) for x in program.back], dtype=np.int64),
        rank=np.array(
            [solver.value(program.rank[p]) if p in program.rank else 0 for p in range(count)],
            dtype=np.int64,
        ),
    )


def _any(solver: Any, literals: list[Any]) -> bool:
    return any(solver.boolean_value(literal) for literal in literals)
