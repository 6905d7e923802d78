"""A lower bound on the iteration time of any plan, proved by a dual solution (DESIGN: Planning)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from teraio.contracts.hardware import Hardware, as_hardware
from teraio.planner.fluid.certificate import certified_minimum
from teraio.planner.fluid.classes import gap_classes, needed_bytes
from teraio.planner.fluid.formulation import FluidProgram, formulate
from teraio.planner.fluid.prices import prices_of_memory, prices_of_rates
from teraio.planner.fluid.slots import FINE_KERNELS, cut_into_slots
from teraio.planner.fluid.solve import Solution, solve
from teraio.simulator.engine_setup import check_feasible
from teraio.traces.trace import Trace, as_trace

SLOT_SHARE = 1 / 2000
SLOT_SECONDS = 4e-3
"""Slots of large traces last at most this, or SLOT_SHARE of the iteration if that is longer."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """No valid plan that fits has a mean iteration time below ``seconds``.

    ``kind``: dual (shown by a dual solution of the fluid program) or ideal (no more than unlimited
    memory's time could be shown). ``status`` is the solver's word: optimal, no_solution_found, ...;
    infeasible means that it saw no room for a plan on the tiers, which is not certified.
    ``value_of_gb`` (seconds saved per further GB; ``gpu`` and tiers) and ``value_of_gb_per_second``
    (seconds saved per further GB/s, by channel or link direction) are slopes at the solution found:
    they tell what the limits are, and only for small changes.
    """

    seconds: float
    kind: str
    status: str
    value_of_gb: Mapping[str, float] = field(default_factory=dict)
    value_of_gb_per_second: Mapping[str, float] = field(default_factory=dict)
    solving_seconds: float = 0.0
    num_rows: int = 0
    num_columns: int = 0
    solver_seconds: float | None = None


def lower_bound(
    trace: Trace | str | Path,
    hardware: Hardware | str | Path,
    *,
    gpu_memory: int | str | None = None,
    host_memory: int | str | None = None,
    time_limit: float | None = None,
    slot_seconds: float | None = None,
) -> Bound:
    """Bound the iteration time of any plan of ``trace`` on ``hardware`` from below.

    ``gpu_memory`` and ``host_memory`` are budgets (bytes or text) in place of the hardware's.
    ``time_limit`` is the solver's, in seconds; a bound cut short is still one. ``slot_seconds`` is
    the longest slot of a large trace: shorter ones give a higher bound and take longer.
    Raises InfeasibleError that names the kernel if one needs more than the GPU has.
    """
    started = time.perf_counter()
    trace = as_trace(trace)
    budgeted = as_hardware(hardware).with_budgets(gpu_memory, host_memory)
    capacity_bytes = budgeted.gpu_of_rank(trace.metadata.rank).memory_bytes
    check_feasible(trace, capacity_bytes)
    fluid = _fluid_program(trace, budgeted, capacity_bytes, slot_seconds)
    if fluid is None:
        seconds = time.perf_counter() - started
        return Bound(
            seconds=trace.ideal_seconds, kind="ideal", status="optimal", solving_seconds=seconds
        )
    solution = solve(fluid.program, time_limit)
    stall_seconds = _certified_stall_seconds(fluid, solution)
    values = {}
    if solution.duals is not None and solution.values is not None:
        values = {
            "value_of_gb": prices_of_memory(fluid, solution.duals),
            "value_of_gb_per_second": prices_of_rates(fluid, solution.duals, solution.values),
        }
    return Bound(
        seconds=trace.ideal_seconds + stall_seconds,
        kind="dual" if stall_seconds > 0 else "ideal",
        status=solution.status,
        solving_seconds=time.perf_counter() - started,
        num_rows=len(fluid.program.row_lower),
        num_columns=len(fluid.program.cost),
        solver_seconds=_objective_seconds(trace, fluid, solution),
        **values,
    )


def _fluid_program(
    trace: Trace, hardware: Hardware, capacity_bytes: int, slot_seconds: float | None
) -> FluidProgram | None:
    """The program; None if every kernel fits with nothing away but what costs nothing."""
    longest = slot_seconds
    if slot_seconds is None and trace.num_kernels > FINE_KERNELS:
        longest = max(SLOT_SECONDS, SLOT_SHARE * trace.ideal_seconds)
    slowdown = hardware.slowdown
    slows_down = max(slowdown.read, slowdown.write, slowdown.both) > 1
    slots = cut_into_slots(trace, longest, runs_may_stretch=slows_down)
    needed = needed_bytes(trace, slots, capacity_bytes)
    if needed.max() <= 0:
        return None
    gaps = gap_classes(trace, slots)
    return formulate(
        hardware,
        trace.metadata.rank,
        slots,
        gaps,
        needed,
        trace.peak_live_bytes,
    )


def _objective_seconds(trace: Trace, fluid: FluidProgram, solution: Solution) -> float | None:
    """What the solver found, ideal time included: an estimate, never a bound."""
    if solution.values is None:
        return None
    stall = float(fluid.program.cost @ solution.values) * fluid.second_unit
    return trace.ideal_seconds + stall


def _certified_stall_seconds(fluid: FluidProgram, solution: Solution) -> float:
    """Stall that every plan has, from the duals alone; 0 if they show nothing.

    Stalls are unlimited, but a plan either stalls ``most`` in all or keeps each stall below it, so
    min(most, the certified minimum of those) holds for all, whatever ``most`` is.
    """
    if solution.duals is None:
        return 0.0
    program = fluid.program
    guess = 0.0 if solution.values is None else float(program.cost @ solution.values)
    best = 0.0
    for most in (1.01 * guess, *(4.0**n for n in range(-4, 16))):
        upper = np.where(np.isfinite(program.column_upper), program.column_upper, most)
        shown = certified_minimum(program, solution.duals, upper)
        best = max(best, min(most, shown))
    return best * fluid.second_unit
