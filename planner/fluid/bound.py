"""A lower bound on the iteration time of any plan, proved by a dual solution (DESIGN: Planning)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from teraio.contracts.hardware import Hardware, as_hardware
from teraio.errors import InputError
from teraio.planner.fluid.prices import prices_of_memory, prices_of_rates
from teraio.planner.fluid.proof import Instance, Proof, instance_of, is_too_large, prove
from teraio.planner.fluid.slots import (
    FINE_KERNELS,
    Slots,
    SlotTurns,
    cut_into_slots,
    merged,
    turns_of_slots,
)
from teraio.simulator.engine_setup import check_feasible
from teraio.traces.trace import Trace, as_trace
from teraio.traces.turns import find_turns

SLOT_SHARE = 1 / 2000
SLOT_SECONDS = 4e-3
"""Slots of large traces last at most this, or SLOT_SHARE of the iteration if that is longer."""

SLOT_BYTES_SHARE = 1 / 30
"""Of the GPU's memory: what the optimizer's kernels of one slot of a large trace may touch. In a
few slots of ideal time, all parameters with all their state would come and go for nothing."""

_COARSE_SLOTS_OF_TURN = 8
_COARSE_SLOTS = 200
"""Under a time limit, a cut of about so many slots comes first: proved in a second or two."""

_BUILDING_SECONDS_PER_KERNEL = 2e-6
_FINER = 2
"""No program is begun that could not even be written down in the time left: a coarse one takes so
many seconds, and a fine one so many times what the coarse one took."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """No valid plan that fits has a mean iteration time below ``seconds``.

    ``kind``: dual (shown by a dual solution of the fluid program), tiled-dual (by one of a smaller
    program in which the turns of an iteration are one, copied to every turn and checked on the
    whole) or ideal (no more than unlimited memory's time could be shown). ``status`` is the
    solver's word on the finest program: optimal; no_solution_found if time was over (the bound may
    then be a coarser program's); infeasible if it saw no room for a plan on the tiers, which is not
    certified.
    ``value_of_gb`` (seconds saved per further GB; ``gpu`` and tiers) and ``value_of_gb_per_second``
    (seconds saved per further GB/s, by channel or link direction) are slopes at the solution found:
    they tell what the limits are, and only for small changes. ``solver_seconds`` is what the solver
    found if it finished, an estimate; ``num_rows`` and ``num_columns`` are of what it solved.
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
    ssd_write_budget: Mapping[str, float] | None = None,
) -> Bound:
    """Bound the iteration time of any plan of ``trace`` on ``hardware`` from below.

    ``gpu_memory`` and ``host_memory`` are budgets (bytes or text) in place of the hardware's.
    ``time_limit`` in seconds is for all of it: a coarse bound comes first, and one cut short is
    still a bound. ``slot_seconds`` is the longest slot of a large trace: shorter ones give a higher
    bound and take longer. ``ssd_write_budget`` bounds only plans that write at most so many bytes
    per second of iteration to each SSD that it names, in place of the hardware's write budgets.
    Raises InfeasibleError that names the kernel if one needs more than the GPU has, InputError if
    the budget names no SSD of this hardware or is negative.
    """
    started = time.perf_counter()
    trace = as_trace(trace)
    budgeted = as_hardware(hardware).with_budgets(gpu_memory, host_memory)
    check_feasible(trace, budgeted.gpu_of_rank(trace.metadata.rank).memory_bytes)
    _check_write_budget(ssd_write_budget, budgeted)
    ssd_write_budget = budgeted.write_budgets(trace.metadata.rank) | dict(ssd_write_budget or {})
    slots, turns = _cut(trace, budgeted, slot_seconds)
    make = partial(instance_of, trace, budgeted, ssd_write_budget=ssd_write_budget)
    search = _Search(
        make=make,
        slots=slots,
        turns=turns,
        may_be_coarser=slot_seconds is None,
        building_seconds=_BUILDING_SECONDS_PER_KERNEL * trace.num_kernels,
        deadline=None if time_limit is None else started + time_limit,
    )
    proof, status = search.run()
    seconds = time.perf_counter() - started
    if proof is None:
        return Bound(
            seconds=trace.ideal_seconds, kind="ideal", status=status, solving_seconds=seconds
        )
    return _bound_of(trace, proof, status, seconds)


def _check_write_budget(budget: Mapping[str, float] | None, hardware: Hardware) -> None:
    names = hardware.ssd_names
    for name, rate in (budget or {}).items():
        if name not in names:
            raise InputError(f"ssd_write_budget: {name!r} is not one of the SSDs {names}")
        if not 0 <= rate < float("inf"):
            raise InputError(
                f"ssd_write_budget: {name} must get 0 or more bytes per second, got {rate}"
            )


def _cut(
    trace: Trace, hardware: Hardware, slot_seconds: float | None
) -> tuple[Slots, SlotTurns | None]:
    """Slots, and their turns where the iteration has some."""
    longest = slot_seconds
    if slot_seconds is None and trace.num_kernels > FINE_KERNELS:
        longest = max(SLOT_SECONDS, SLOT_SHARE * trace.ideal_seconds)
    slowdown = hardware.slowdown
    slows_down = max(slowdown.read, slowdown.write, slowdown.both) > 1
    turns = find_turns(trace.kernels)
    slots = cut_into_slots(
        trace,
        longest,
        runs_may_stretch=slows_down,
        turns=turns,
        max_bytes=SLOT_BYTES_SHARE * hardware.gpu_of_rank(trace.metadata.rank).memory_bytes,
    )
    return slots, None if turns is None else turns_of_slots(slots, turns)


@dataclass(frozen=True, kw_only=True)
class _Search:
    """Programs from coarse to fine, as far as time allows; ``deadline`` is on perf_counter's clock.

    ``make`` builds the program on given slots; ``building_seconds`` is the least that it takes.
    """

    make: Callable[[Slots, SlotTurns | None], Instance | None]
    slots: Slots
    turns: SlotTurns | None
    may_be_coarser: bool
    building_seconds: float
    deadline: float | None

    def run(self) -> tuple[Proof | None, str]:
        """The best proof, None if there is none, and what the solver said of the finest program."""
        best, building_seconds = None, self.building_seconds
        for factor in self._factors():
            left = self._left()
            if left is not None and left < building_seconds:
                return best, "no_solution_found"
            started = time.perf_counter()
            instance = self._instance(factor)
            building_seconds = _FINER * (time.perf_counter() - started)
            if instance is None:
                status = "optimal"
                continue
            left = self._left()
            proof = prove(instance, None if left is None else left - self.building_seconds / 4)
            status = proof.solution.status
            if best is None or proof.stall_seconds >= best.stall_seconds:
                best = proof
        return best, status

    def _factors(self) -> list[int]:
        """How many slots become one, program by program; the last is the finest."""
        num_slots, most = len(self.slots), _COARSE_SLOTS
        if self.turns is not None and self.turns.count > 2:
            num_slots, most = self.turns.length, _COARSE_SLOTS_OF_TURN
        is_limited = self.deadline is not None
        return [-(-num_slots // most), 1] if is_limited and num_slots > 2 * most else [1]

    def _left(self) -> float | None:
        return None if self.deadline is None else self.deadline - time.perf_counter()

    def _instance(self, factor: int) -> Instance | None:
        instance = self.make(*merged(self.slots, self.turns, factor))
        while instance is not None and self.may_be_coarser and is_too_large(instance):
            factor *= 2
            instance = self.make(*merged(self.slots, self.turns, factor))
        return instance


def _bound_of(trace: Trace, proof: Proof, status: str, solving_seconds: float) -> Bound:
    fluid, solution = proof.fluid, proof.solution
    values, found = {}, None
    if solution.status == "optimal" and solution.duals is not None and solution.values is not None:
        found = trace.ideal_seconds + proof.found_seconds
        values = {
            "value_of_gb": prices_of_memory(fluid, solution.duals),
            "value_of_gb_per_second": prices_of_rates(fluid, solution.duals, solution.values),
        }
    kind = "tiled-dual" if proof.is_tiled else "dual"
    return Bound(
        seconds=trace.ideal_seconds + proof.stall_seconds,
        kind=kind if proof.stall_seconds > 0 else "ideal",
        status=status,
        solving_seconds=solving_seconds,
        num_rows=proof.num_rows,
        num_columns=proof.num_columns,
        solver_seconds=found,
        **values,
    )
