"""The planner that proves its optimum on small problems: the yardstick for all others.

The program of :mod:`teraio.planner.milp.program` is solved by CP-SAT. What it chooses is checked in
bytes by code of our own, made a plan and simulated. Where transfers can slow each other or a kernel
down (a shared link, duplex rates, host memory), the program takes every transfer at its best rate
and so only bounds a plan: choices are excluded one after the other until none that is left could
beat the best one simulated.

A trace with more kernels or periods than the program can take is coarsened first
(:mod:`teraio.planner.milp.coarsening`), and nothing is proved of the trace itself.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Moves, Plan
from teraio.errors import CapacityError
from teraio.planner.cost import excess_writes
from teraio.planner.drafts import draft_moves
from teraio.planner.greedy import plan_greedy
from teraio.planner.milp.choice import STAYS, Choice, short_steps
from teraio.planner.milp.coarsening import MOST_PERIODS, MOST_STEPS, coarsen
from teraio.planner.milp.instance import Instance
from teraio.planner.milp.periods import find_periods
from teraio.planner.milp.program import Program
from teraio.planner.milp.scaling import make_instance
from teraio.planner.milp.solve import Outcome, solve
from teraio.planner.plan_building import build_plan
from teraio.simulator import simulate
from teraio.traces.lifetimes import inactive_periods
from teraio.traces.trace import Trace
from teraio.units import PICOSECONDS_PER_SECOND

DEFAULT_TIME_LIMIT = 60.0
"""Seconds, where the caller sets none: the search ends, with what is proved by then."""

MOST_ITERATIONS = 64
"""Simulated iterations in which a steady cycle is looked for; small plans are quick to simulate."""

_STAGES = (100, 3000, 100_000)
"""Ticks of the best iteration known, in turn: the solver is the slower the finer they are."""

_STAGE_SHARE = 0.4
"""Share of the time left for a stage that is not the last."""

_MARGINS = (1.0, 0.9, 0.75)
"""Shares of the tiers' capacity to plan with, in turn, until the slots can be packed."""


def plan_milp(
    trace: Trace,
    hardware: Hardware,
    *,
    time_limit: float | None = None,
    bandwidth_share: float = 1.0,
) -> Plan:
    """The best plan of a small trace, with the proof in its options; never worse than greedy.

    ``hardware`` holds the budgets. ``time_limit`` in seconds is DEFAULT_TIME_LIMIT if None.
    ``bandwidth_share`` plans for that share of the rates, and nothing is proved at full rates.

    Options: ``proof``, "optimal" (no plan is faster by more than ``resolution_seconds``) or
    "feasible"; ``proved_seconds``, below which no plan is; ``objective_seconds``, the program's own
    iteration time (None: it found nothing); ``coarse``, whether the trace was coarsened.

    Raises InfeasibleError if one kernel needs more than the GPU has, CapacityError if there is no
    plan or the tiers are too small, InputError if the trace is too large even when coarsened.
    """
    started = time.perf_counter()
    limit = DEFAULT_TIME_LIMIT if time_limit is None else time_limit
    search = _Search(trace, hardware, bandwidth_share, deadline=started + limit)
    search.start_from_greedy()
    if search.seconds > trace.ideal_seconds * (1 + 1e-9):
        search.run()
    return search.result(time.perf_counter() - started)


@dataclass
class _Search:
    """The best plan so far, and what is proved.

    ``proved`` seconds are below no plan; ``seconds`` are the simulated ones of ``best``.
    """

    trace: Trace
    hardware: Hardware
    bandwidth_share: float
    deadline: float
    best: Plan | None = None
    seconds: float = math.inf
    proved: float = 0.0
    resolution: float = 0.0
    error: CapacityError | None = None
    objective: float | None = None
    is_coarse: bool = False
    rounds: int = 0
    hint: Choice | None = None

    def start_from_greedy(self) -> None:
        """Something to return, and a limit for the program."""
        self.proved = self.trace.ideal_seconds
        try:
            self.consider(
                plan_greedy(self.trace, self.hardware, bandwidth_share=self.bandwidth_share)
            )
        except CapacityError as error:
            self.error = error

    def consider(self, plan: Plan) -> bool:
        """Simulate a plan, and keep it if it is the fastest; whether SSDs may be written so much.

        The program allows what a longer iteration would.
        """
        most = MOST_ITERATIONS if self.trace.num_kernels <= MOST_STEPS else 8
        timeline = simulate(self.trace, plan, self.hardware, record=False, max_iterations=most)
        seconds = timeline.iteration_seconds
        plan = replace(plan, metadata=replace(plan.metadata, predicted_seconds=seconds))
        if excess_writes(plan) is not None:
            return False
        if seconds < self.seconds:
            self.best, self.seconds = plan, seconds
        return True

    def run(self) -> None:
        """Solve the program in rough ticks, which are quick, and then in ever finer ones."""
        # Where whole ticks are few enough, there is nothing to gain from rough ones.
        stages = _STAGES[1:] if self.pose(_STAGES[1]).is_whole else _STAGES
        for ticks in stages:
            instance = self.pose(ticks)
            is_last = instance.is_whole or self.is_coarse or ticks == _STAGES[-1]
            if is_last and not self.is_coarse:
                # Of a loop of waits at most two times per step and per period are rounded.
                rounded = 2 * (instance.num_steps + len(instance.periods))
                self.resolution = instance.tick_seconds * (1 + rounded * (not instance.is_whole))
            left = self.deadline - time.perf_counter()
            until = self.deadline if is_last else self.deadline - left * (1 - _STAGE_SHARE)
            self.solve_with_room(instance, until, is_last)
            if is_last or self.is_proved:
                break

    def pose(self, ticks: int) -> Instance:
        """The trace kernel by kernel if it is small enough, else coarsened."""
        trace, hardware, share = self.trace, self.hardware, self.bandwidth_share
        most_ps = math.inf if self.best is None else self.seconds * PICOSECONDS_PER_SECOND
        if trace.num_kernels <= MOST_STEPS:
            kernels = np.arange(trace.num_kernels + 1)
            periods = find_periods(trace, kernels)
            instance = make_instance(trace, hardware, share, kernels, periods, ticks, most_ps)
            if len(instance.periods) <= MOST_PERIODS:
                return instance
        self.is_coarse = True
        gpu_bytes = hardware.gpu_of_rank(trace.metadata.rank).memory_bytes
        steps, periods = coarsen(trace, gpu_bytes)
        return make_instance(trace, hardware, share, steps, periods, ticks, most_ps)

    def solve_with_room(self, instance: Instance, until: float, is_last: bool) -> None:
        """Solve with less of the tiers if the slots of the choice cannot be packed."""
        for margin in _MARGINS:
            capacity = np.floor(margin * instance.capacity).astype(np.int64)
            narrowed = replace(instance, capacity=capacity)
            try:
                self.solve(narrowed, until, proves=margin == 1.0, is_last=is_last)
            except CapacityError as error:
                self.error = error
                continue
            break

    def solve(self, instance: Instance, until: float, *, proves: bool, is_last: bool) -> None:
        """Solve until the choice fits in bytes and, where rates vary, nothing better is left.

        Raises CapacityError if the slots of a choice cannot be packed.
        """
        proves &= not self.is_coarse and self.bandwidth_share == 1.0
        program = Program(instance, self.most_ticks(instance, is_limit=proves))
        if self.hint is not None:
            program.suggest(self.hint)
        while (left := until - time.perf_counter()) > 0:
            outcome = solve(program, left)
            self.rounds += 1
            if proves:
                self.note_proof(instance, outcome, is_first=not program.num_cuts)
            if outcome.choice is None:
                break
            self.objective = outcome.ticks * instance.tick_seconds
            self.hint = outcome.choice
            short = short_steps(instance, outcome.choice)
            for step, away in short:
                program.forbid_away(step, away)
            if short:
                continue
            is_allowed = self.consider(self.plan_of(instance, outcome.choice))
            is_enough = instance.has_constant_rates or self.is_proved or not is_last
            if is_allowed and is_enough:
                break
            program.forbid(outcome.choice)

    def most_ticks(self, instance: Instance, *, is_limit: bool) -> int:
        """Ticks that the best plan does not exceed."""
        if not is_limit or self.best is None:
            return instance.longest
        return min(instance.longest, math.ceil(self.seconds / instance.tick_seconds) + 1)

    def note_proof(self, instance: Instance, outcome: Outcome, *, is_first: bool) -> None:
        """What is excluded was simulated, and the rest is bounded by the program.

        Raises RuntimeError if the solver denies what exists (a defect, never the user's).
        """
        if outcome.status == "infeasible":
            if is_first and self.best is not None:
                raise RuntimeError("planner milp: the solver denies that greedy's plan exists")
            self.proved = self.seconds
        else:
            # A plan may end within the tick.
            ticks = outcome.bound if instance.is_whole else outcome.bound - 1
            self.proved = max(self.proved, ticks * instance.tick_seconds)

    @property
    def is_proved(self) -> bool:
        """Whether no plan is faster by more than the resolution."""
        return self.seconds <= self.proved + self.resolution + 1e-9 * self.seconds

    def plan_of(self, instance: Instance, choice: Choice) -> Plan:
        """The plan of a choice, its prediction still open."""
        moves = _moves_of(self.trace, instance, choice)
        return build_plan(
            self.trace,
            moves,
            self.hardware,
            planner="milp",
            predicted_seconds=self.trace.ideal_seconds,
        )

    def result(self, planning_seconds: float) -> Plan:
        """The best plan with its account. Raises CapacityError if there is none."""
        if self.best is None:
            raise self.error or CapacityError("no plan fits")
        options: dict[str, Any] = {
            "bandwidth_share": self.bandwidth_share,
            "proof": "optimal" if self.is_proved else "feasible",
            "proved_seconds": min(self.proved, self.seconds),
            "resolution_seconds": self.resolution,
            "objective_seconds": self.objective,
            "coarse": self.is_coarse,
            "rounds": self.rounds,
        }
        metadata = replace(
            self.best.metadata,
            planner="milp",
            options=options,
            predicted_seconds=self.seconds,
            planning_seconds=planning_seconds,
        )
        return replace(self.best, metadata=metadata)


def _moves_of(trace: Trace, instance: Instance, choice: Choice) -> Moves:
    """A draft of the moves chosen, kernel by kernel, in the order of rows chosen."""
    leaving = np.flatnonzero(choice.device != STAYS)
    leaving = leaving[np.argsort(choice.rank[leaving], kind="stable")]
    rows = [instance.periods.rows[p] for p in leaving]
    period = np.repeat(leaving, [len(members) for members in rows])
    first, num_steps = instance.first_kernel, instance.num_steps
    names = np.array(instance.devices, dtype=object)
    return draft_moves(
        trace,
        inactive_periods(trace),
        np.concatenate([*rows, np.empty(0, dtype=np.int64)]).astype(np.int64),
        offload_start=first[choice.offload_start[period] % num_steps + 1] - 1,
        free_by=first[choice.free_by[period] % num_steps],
        prefetch_start=first[choice.prefetch_start[period] % num_steps],
        device=names[choice.device[period]],
    )
