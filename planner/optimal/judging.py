"""The simulator's word on moves that are not a plan yet: slots on the tiers are still open."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from teraio.contracts.table import MISSING, FloatArray, IntArray
from teraio.planner.optimal.periods import Problem
from teraio.planner.optimal.timing import Timed
from teraio.simulator.engine_setup import engine_of_moves
from teraio.simulator.plan_checks import PlannedMoves
from teraio.simulator.state import KERNEL_EVENT, STALL_EVENT, Engine
from teraio.simulator.steady_state import find_cycle
from teraio.units import PICOSECONDS_PER_SECOND

_MAX_ITERATIONS = 8


class Judged(NamedTuple):
    """Mean seconds per iteration; ``starts``: simulated start of each kernel's gap, (K + 1,);
    ``waits`` float64 (storages,): seconds that kernels waited for each storage to move.
    """

    seconds: float
    starts: FloatArray
    waits: FloatArray


def judge(problem: Problem, timed: Timed, device: IntArray) -> Judged:
    """Simulate until steady. ``device`` int64 (rows,) is the choice that was timed."""
    moves = _planned_moves(problem, timed, device)
    engine = engine_of_moves(problem.trace, moves, problem.machine, record=True)
    cycle = find_cycle(engine, _MAX_ITERATIONS, _cannot_end, None, keeps_events=False)
    seconds = [int(turn.account["iteration"][0]) for turn in cycle.iterations]
    mean = float(np.mean(seconds)) / PICOSECONDS_PER_SECOND
    events = cycle.iterations[-1].events
    ends = events["end"][events["what"] == KERNEL_EVENT]
    starts = np.zeros(problem.num_kernels + 1)
    starts[1:] = (ends - ends[-1] + seconds[-1]) / PICOSECONDS_PER_SECOND
    stalls = events[(events["what"] == STALL_EVENT) & (events["storage"] != MISSING)]
    waits = np.zeros(len(problem.trace.storages))
    np.add.at(waits, stalls["storage"], (stalls["end"] - stalls["start"]) / PICOSECONDS_PER_SECOND)
    return Judged(mean, starts, waits)


def _planned_moves(problem: Problem, timed: Timed, device: IntArray) -> PlannedMoves:
    rows = timed.rows
    is_tail = problem.is_tail[rows]
    return PlannedMoves(
        storage=problem.storage[rows],
        device=device[rows],
        tier_offset_bytes=np.zeros(len(rows), dtype=np.int64),
        nbytes=problem.num_bytes[rows],
        writes=timed.writes,
        is_tail=is_tail,
        after_kernel=problem.after[rows],
        offload_start=problem.after[rows],
        free_by=timed.windows.free_by,
        prefetch_start=np.where(is_tail, MISSING, timed.windows.prefetch_start),
        end=problem.end[rows],
    )


def _cannot_end(_: Engine, failure: int) -> Exception:
    return RuntimeError(f"the simulator stopped at moves that fit (failure {failure})")
