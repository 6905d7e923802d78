"""The guide: a fluid program whose solution says which bytes should go where, and where to wait.

The bound's program (:mod:`teraio.planner.fluid.formulation`) with the constraints of
:mod:`guide_writer` in place of some; only periods worth moving take part; tails are written and
cost what that costs; traffic has a small price, so that nothing moves without need. Of a folded
trace, the turn that stands for many is weighted by their number, and what enters it must be what
leaves it, so that it can be repeated.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from teraio.contracts.hardware import HOST
from teraio.contracts.table import BoolArray, FloatArray, IntArray
from teraio.planner.fluid.classes import GapClasses, gap_classes
from teraio.planner.fluid.formulation import FluidProgram, ProgramWriter, formulate
from teraio.planner.fluid.linear_program import LinearProgram
from teraio.planner.fluid.slots import Slots
from teraio.planner.fluid.solve import solve
from teraio.planner.optimal.guide_writer import SHARE_OF_TIERS, GuideWriter, LackingWriter
from teraio.planner.optimal.periods import Problem
from teraio.planner.optimal.repetition import Repeated, find_repeated
from teraio.planner.optimal.wear import limit_guide
from teraio.planner.optimal.whole_storages import settle_large
from teraio.traces.folding import Folding
from teraio.units import PICOSECONDS_PER_SECOND

_LEAST_SHARE = 1e-5
"""Of the GPU's memory: smaller storages stay, since all together they are a sliver of it."""

_TRAFFIC_PRICE = 1e-6
_HOST_PRICE = 1.1e-6
"""Cost per byte unit moved, on the scale of seconds: just enough to choose among equals."""

_MAX_SETTLINGS = 2
"""How often large storages are settled: what becomes of the others may divide further ones."""

_LATENCY_SHARE = 0.1
_ISSUE_SECONDS = 1e-4
"""A transfer costs its latency, or what its executor needs to issue it if that is longer. That much
of it counts as a wait: enough to prefer large storages, not enough to wait for them."""

_HASTE_PRICE = 2e-6
_SHORT_SHARE = 0.01
"""Among equals, long gaps are better: they bear late transfers. Gaps below this share of the
iteration are short."""


@dataclass(frozen=True, eq=False)
class Guide:
    """``stretch`` float64 (K,): how much longer each kernel's time becomes with its stalls.
    ``seconds``: the iteration of the folded trace as the program sees it. ``gaps`` are the classes;
    ``wanted_bytes`` float64 (devices, gaps) what goes to each of the machine's devices.
    """

    stretch: FloatArray
    seconds: float
    gaps: GapClasses
    wanted_bytes: FloatArray
    repeated: Repeated | None


def solve_guide(
    problem: Problem,
    slots: Slots,
    folding: Folding | None,
    *,
    spare_bytes: int = 0,
    unhurried: bool = True,
    by_size: bool = False,
    round_trips: float = 1.0,
    whole: bool = False,
    fill_tiers: bool = False,
    time_limit: float | None = None,
) -> Guide | None:
    """Solve the guide; None if no solution was found, or if there is nothing to decide.

    ``spare_bytes`` of the GPU are not to be used; ``unhurried``: among equals, long gaps first.
    ``by_size``: among equals, large storages. Gaps shorter than ``round_trips`` are left out.
    ``whole``: large storages move as a whole or not at all (not for a folded trace).
    ``fill_tiers`` leaves nothing of them for holes.
    Where slots are too coarse, or tiers too small, for all bytes to be away that should be, some
    are not: repair sees to them.
    """
    worth = _worth_moving(problem, round_trips)
    gaps = gap_classes(problem.trace, slots, with_tails=True, only=worth, by_size=by_size)
    if len(gaps) == 0 or problem.machine.capacity_bytes.max() <= 0:
        return None
    repeated = None if folding is None else find_repeated(problem, slots, gaps, folding)
    deadline = None if time_limit is None else time.monotonic() + time_limit
    share = 1.0 if fill_tiers else SHARE_OF_TIERS
    for writer_class in (GuideWriter, LackingWriter):
        writer = functools.partial(writer_class, share_of_tiers=share)
        fluid = _formulate(problem, slots, gaps, spare_bytes, writer)
        fluid = _priced(fluid, _haste(slots, gaps) if unhurried else np.zeros(len(gaps)))
        if by_size:
            fluid = _with_latency(fluid, problem, gaps)
        if repeated is not None:
            fluid = _repeating(fluid, repeated)
        fluid = limit_guide(fluid, problem, slots, repeated)
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        solution = solve(fluid.program, left)
        if solution.values is not None:
            guide = _read(problem, slots, gaps, fluid, solution.values, repeated)
            return _settled(guide, fluid, problem, slots, deadline) if whole else guide
        if solution.status != "infeasible":
            break
    return None


def _settled(
    guide: Guide, fluid: FluidProgram, problem: Problem, slots: Slots, deadline: float | None
) -> Guide:
    """The guide with large storages settled, as far as that succeeds in time."""
    for _ in range(_MAX_SETTLINGS):
        settled = settle_large(fluid, problem, guide.gaps, guide.wanted_bytes)
        left = None if deadline is None else deadline - time.monotonic()
        if settled is None or (left is not None and left <= 0):
            break
        solution = solve(settled.program, left)
        if solution.values is None:
            break
        fluid = settled
        guide = _read(problem, slots, guide.gaps, fluid, solution.values, None)
    return guide


def _formulate(
    problem: Problem,
    slots: Slots,
    gaps: GapClasses,
    spare_bytes: int,
    writer_class: Callable[..., ProgramWriter],
) -> FluidProgram:
    trace = problem.trace
    return formulate(
        problem.hardware,
        trace.metadata.rank,
        slots,
        gaps,
        problem.resident_bytes - problem.capacity_bytes + spare_bytes,
        trace.peak_live_bytes,
        writer_class=writer_class,
    )


def _worth_moving(problem: Problem, round_trips: float) -> BoolArray:
    """Periods that are large and long enough for round trips, bool (inactive periods,)."""
    rates = problem.machine.solo_rate
    seconds = problem.num_bytes * (1 / rates[0::2].max() + 1 / rates[1::2].max())
    seconds = round_trips * seconds
    result = np.zeros(len(problem.all_periods), dtype=bool)
    least_bytes = _LEAST_SHARE * problem.capacity_bytes
    worth = (problem.num_bytes >= least_bytes) & (problem.seconds >= seconds)
    result[problem.period] = worth
    return result


def _haste(slots: Slots, gaps: GapClasses) -> FloatArray:
    """Near 1 for gaps that leave little time, near 0 for long ones, float64 (gaps,)."""
    ends = np.r_[0.0, np.cumsum(slots.seconds)]
    lap, slot = np.divmod(np.stack((gaps.release, gaps.due)), len(slots))
    begin, end = ends[slot] + lap * ends[-1]
    result: FloatArray = 1 / (1 + np.maximum(end - begin, 0.0) / (_SHORT_SHARE * ends[-1]))
    return result


def _priced(fluid: FluidProgram, haste: FloatArray) -> FluidProgram:
    """With small prices on traffic and haste, and copies without the limit of those that residency
    keeps.
    """
    cost, upper = fluid.program.cost.copy(), fluid.program.column_upper.copy()
    for tier, columns in zip(fluid.tiers, fluid.tier_columns, strict=True):
        price = _HOST_PRICE if tier.name == HOST else _TRAFFIC_PRICE
        cost[columns.written] += price
        cost[columns.read] += price
        cost[columns.delta] += _HASTE_PRICE * haste
        cost[columns.kappa] += _HASTE_PRICE * haste[fluid.serves]
        upper[columns.kept] = np.inf
    return replace(fluid, program=replace(fluid.program, cost=cost, column_upper=upper))


def _with_latency(fluid: FluidProgram, problem: Problem, gaps: GapClasses) -> FluidProgram:
    """With a price on each byte: its part of what its storage's transfers cost beside their bytes,
    of which a fluid knows nothing.
    """
    row = gaps.row_of_period[problem.period]
    members = np.bincount(row[row >= 0], minlength=len(gaps))
    transfers_per_byte = members / gaps.num_bytes * fluid.byte_unit
    cost = fluid.program.cost.copy()
    serves, machine = fluid.serves, problem.machine
    for tier, columns in zip(fluid.tiers, fluid.tier_columns, strict=True):
        device = machine.devices.index(tier.name)
        latency = machine.latency[2 * device : 2 * device + 2] / PICOSECONDS_PER_SECOND
        read, write = np.maximum(latency, _ISSUE_SECONDS)
        reads = np.where(gaps.is_tail, 0.0, read)
        price = _LATENCY_SHARE * transfers_per_byte / fluid.second_unit
        cost[columns.delta] += price * (write + reads)
        cost[columns.kappa] += (price * reads)[serves]
    return replace(fluid, program=replace(fluid.program, cost=cost))


def _repeating(fluid: FluidProgram, repeated: Repeated) -> FluidProgram:
    """With the repeated turn counted as often as it stands for, and leaving what it found."""
    first, last = repeated.first_slot, repeated.end_slot
    cost = fluid.program.cost.copy()
    equal: list[tuple[IntArray, IntArray]] = []
    inside = slice(first, last)
    weighted = [fluid.stalls]
    place = np.full(len(repeated.serves), -1)
    place[repeated.serves] = np.arange(int(repeated.serves.sum()))
    early, late = repeated.gaps_in, repeated.gaps_out
    has_copy = repeated.serves[early] & repeated.serves[late]
    for c in fluid.tier_columns:
        weighted += [c.written, c.read]
        levels = [c.awaiting, c.out, c.back] + ([c.kept] if len(c.kept) else [])
        equal += [(level[first : first + 1], level[last : last + 1]) for level in levels]
        equal.append((c.delta[early], c.delta[late]))
        for columns in (c.kappa, c.copy):
            equal.append((columns[place[early[has_copy]]], columns[place[late[has_copy]]]))
    for columns in weighted:
        cost[columns[inside]] *= repeated.times
    pairs = [np.concatenate([pair[side] for pair in equal]) for side in range(2)]
    return replace(fluid, program=_with_equal(replace(fluid.program, cost=cost), *pairs))


def _with_equal(program: LinearProgram, left: IntArray, right: IntArray) -> LinearProgram:
    """The program with further rows: column ``left`` = column ``right``."""
    different = left != right
    # Entries are in order of rows, then columns.
    pairs = np.sort(np.stack((left[different], right[different]), axis=1), axis=1)
    rows = len(program.row_lower) + np.arange(len(pairs))
    zeros = np.zeros(len(pairs))
    return replace(
        program,
        row_lower=np.r_[program.row_lower, zeros],
        row_upper=np.r_[program.row_upper, zeros],
        rows=np.r_[program.rows, np.repeat(rows, 2)],
        columns=np.r_[program.columns, pairs.reshape(-1)],
        values=np.r_[program.values, np.tile([1.0, -1.0], len(pairs))],
    )


def _read(
    problem: Problem,
    slots: Slots,
    gaps: GapClasses,
    fluid: FluidProgram,
    values: FloatArray,
    repeated: Repeated | None,
) -> Guide:
    stalls = np.maximum(values[fluid.stalls], 0.0) * fluid.second_unit
    stretch = np.ones(len(slots))
    lasts = slots.seconds > 0
    stretch[lasts] += stalls[lasts] / slots.seconds[lasts]
    wanted = np.zeros((len(problem.machine.devices), len(gaps)))
    serves = np.flatnonzero(gaps.previous >= 0)
    for tier, columns in zip(fluid.tiers, fluid.tier_columns, strict=True):
        row = wanted[problem.machine.devices.index(tier.name)]
        row += values[columns.delta] * fluid.byte_unit
        row[serves] += values[columns.kappa] * fluid.byte_unit
    return Guide(
        stretch=stretch[slots.of_piece[0::2]],
        seconds=float(slots.seconds.sum() + stalls.sum()),
        gaps=gaps,
        wanted_bytes=wanted,
        repeated=repeated,
    )
