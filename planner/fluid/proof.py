"""Prove a bound on one cut into slots: by the whole program, or by that of its turns made one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from teraio.contracts.hardware import Hardware
from teraio.planner.fluid.aggregation import aggregate
from teraio.planner.fluid.certificate import shown_by
from teraio.planner.fluid.classes import GapClasses, gap_classes, needed_bytes
from teraio.planner.fluid.formulation import FluidProgram, formulate
from teraio.planner.fluid.slots import Slots, SlotTurns
from teraio.planner.fluid.solve import Solution, solve
from teraio.traces.trace import Trace

SMALL_ROWS = 15_000
"""A program of fewer rows is solved as it is; it takes a second."""

TURNS_APART = (3, 2, 1)
"""Turns at either end that are not averaged: there the iteration begins and ends differently. As
many as keep the program small. With one, bounds agree to nine digits with those of the whole
program of every real trace whose whole program could be solved; on small random ones they are up to
0.4 % lower where a tier is full (two: 0.005 %), and up to 6 % with none."""

LEAST_TURNS = 2
"""Fewer cannot be made one."""

MOST_ROWS = 100_000
"""More are not solved within a minute."""


@dataclass(frozen=True)
class Instance:
    """A trace on a machine, cut into slots; ``turns`` is None where nothing repeats."""

    fluid: FluidProgram
    gaps: GapClasses
    num_slots: int
    turns: SlotTurns | None


@dataclass(frozen=True)
class Proof:
    """Every plan stalls ``stall_seconds`` or more, as ``solution``'s duals show on ``fluid``.

    ``solution`` is the whole program's, also where a smaller one was solved (``is_tiled``);
    ``num_rows`` and ``num_columns`` are of the one that was solved.
    """

    stall_seconds: float
    is_tiled: bool
    fluid: FluidProgram
    solution: Solution
    num_rows: int
    num_columns: int

    @property
    def found_seconds(self) -> float:
        """The stall that the solver found: an estimate, never a bound. 0 if it found none."""
        values = self.solution.values
        found = 0.0 if values is None else float(self.fluid.program.cost @ values)
        return found * self.fluid.second_unit


def instance_of(
    trace: Trace,
    hardware: Hardware,
    slots: Slots,
    turns: SlotTurns | None,
    ssd_write_budget: Mapping[str, float] | None = None,
) -> Instance | None:
    """The program on these slots; None if it fits with nothing away but what costs nothing."""
    rank = trace.metadata.rank
    capacity_bytes = hardware.gpu_of_rank(rank).memory_bytes
    # Tails given away for nothing (F4) keep turns alike, and the program small.
    with_tails = turns is None
    needed = needed_bytes(trace, slots, capacity_bytes, with_tails=with_tails)
    if needed.max() <= 0:
        return None
    gaps = gap_classes(trace, slots, with_tails=with_tails)
    fluid = formulate(
        hardware,
        rank,
        slots,
        gaps,
        needed,
        trace.peak_live_bytes,
        ssd_write_budget=ssd_write_budget,
    )
    return Instance(fluid, gaps, len(slots), turns)


def is_too_large(instance: Instance) -> bool:
    """Whether the program that would have to be solved has more than MOST_ROWS rows."""
    turns = _turns_to_average(instance)
    num_rows = len(instance.fluid.program.row_lower)
    return (num_rows if turns is None else _rows_left(instance, turns)) > MOST_ROWS


def _turns_to_average(instance: Instance) -> SlotTurns | None:
    """Turns that are worth making one, if there are some."""
    turns = instance.turns
    if turns is None or len(instance.fluid.program.row_lower) < SMALL_ROWS:
        return None
    choices = [turns.inner(apart) for apart in TURNS_APART]
    choices = [inner for inner in choices if inner.count >= LEAST_TURNS]
    small = [inner for inner in choices if _rows_left(instance, inner) < SMALL_ROWS]
    return next(iter([*small, *choices[-1:]]), None)


def _rows_left(instance: Instance, turns: SlotTurns) -> int:
    """About how many rows there are with ``turns`` made one.

    Nearly all rows are about slots or gaps, and those are spread over the iteration.
    """
    share = 1 - turns.length * (turns.count - 1) / instance.num_slots
    return round(len(instance.fluid.program.row_lower) * share)


def prove(instance: Instance, time_limit: float | None = None) -> Proof:
    """The bound by turns where there are enough of them, else by the whole program."""
    deadline = None if time_limit is None else time.monotonic() + time_limit
    turns = _turns_to_average(instance)
    if turns is not None:
        proof = prove_by_turns(instance, turns, deadline)
        if proof.solution.duals is not None or deadline is not None:
            return proof
    return prove_by_all(instance, deadline)


def prove_by_all(instance: Instance, deadline: float | None = None) -> Proof:
    """Solve the whole program; ``deadline`` is on the clock of time.monotonic."""
    fluid = instance.fluid
    solution = solve(fluid.program, _left(deadline))
    size = len(fluid.program.row_lower), len(fluid.program.cost)
    return Proof(_certified_stall_seconds(fluid, solution), False, fluid, solution, *size)


def prove_by_turns(instance: Instance, turns: SlotTurns, deadline: float | None = None) -> Proof:
    """Solve the program in which ``turns`` are one, and share out its duals among them."""
    fluid = instance.fluid
    small = aggregate(fluid, instance.gaps, instance.num_slots, turns)
    found = solve(small.program, _left(deadline))
    solution = Solution(
        status=found.status,
        values=None if found.values is None else small.values(found.values),
        duals=None if found.duals is None else small.duals(found.duals),
    )
    size = len(small.program.row_lower), len(small.program.cost)
    return Proof(_certified_stall_seconds(fluid, solution), True, fluid, solution, *size)


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _certified_stall_seconds(fluid: FluidProgram, solution: Solution) -> float:
    """Stall that every plan has, from the duals alone; 0 if they show nothing."""
    if solution.duals is None:
        return 0.0
    return shown_by(fluid.program, solution.duals).minimum() * fluid.second_unit
