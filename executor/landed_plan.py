"""A plan rewritten in the kernels that a run really has.

Kernels that both have keep what the plan says of them. Between them, where the run has others, a
move keeps its share of the way. Every move lies between the last use before it and the next use
after it that the run has; one without room there is left out, as is one whose storage the run does
not have.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from teraio.contracts.plan import Accesses, Moves, Plan, PlanKernels, PlanStorages, UnrolledMoves
from teraio.contracts.table import MISSING
from teraio.executor.alignment import Block
from teraio.executor.observation import ObservedKernel
from teraio.profiler.dispatch import READ, WRITE
from teraio.profiler.storages import StorageState


class Entry(NamedTuple):
    """A kernel of the rewritten plan: the planned one, an observed one, or both if they agree."""

    planned: int
    observed: int


@dataclass(frozen=True)
class Match:
    """Kernels of the rewritten plan, and the blocks of them that stand for other planned ones."""

    entries: list[Entry]
    blocks: list[Block]


def rewrite(
    plan: Plan, observed: list[ObservedKernel], match: Match, row_of: dict[StorageState, int]
) -> Plan:
    """The plan in the kernels of ``match``; storages that it does not know get rows at the end."""
    rows = _Rows(plan, observed, match, row_of)
    moves = _moves(plan, _Places(plan, match), rows)
    return replace(
        plan,
        moves=moves,
        kernels=_kernels(plan, observed, match),
        storages=rows.storages(moves),
        accesses=rows.accesses(),
    )


def rows_per_kernel(plan: Plan) -> list[list[int]]:
    """Rows that each planned kernel touches, in order of appearance."""
    rows: list[list[int]] = [[] for _ in range(len(plan.kernels))]
    accesses = plan.accesses
    for kernel, row in zip(accesses.kernel.tolist(), accesses.storage.tolist(), strict=True):
        rows[kernel].append(row)
    return rows


def births_per_kernel(plan: Plan) -> list[list[tuple[int, int]]]:
    """(ordinal, row) of the storages that each planned kernel creates and some kernel uses."""
    births: list[list[tuple[int, int]]] = [[] for _ in range(len(plan.kernels))]
    storages, used = plan.storages, set(plan.accesses.storage.tolist())
    for row, (birth, ordinal) in enumerate(
        zip(storages.birth.tolist(), storages.birth_ordinal.tolist(), strict=True)
    ):
        if birth != MISSING and row in used:
            births[birth].append((ordinal, row))
    return [sorted(pairs) for pairs in births]


# Kernels


def _kernels(plan: Plan, observed: list[ObservedKernel], match: Match) -> PlanKernels:
    planned = plan.kernels
    rows = []
    for number, (kernel, other) in enumerate(match.entries):
        if kernel >= 0:
            columns = (planned.op, planned.signature, planned.phase, planned.module)
            described = tuple(column[kernel] for column in columns)
            rows.append((number, *described, planned.workspace_bytes[kernel]))
        else:
            run = observed[other]
            rows.append((number, run.op, run.signature, run.phase, None, 0))
    kernels = PlanKernels.from_rows(rows)
    workspace_bytes = kernels.workspace_bytes.copy()
    for block in match.blocks:
        # What stands for them needs as much scratch, as far as anyone knows.
        scratch = planned.workspace_bytes[block.planned_start : block.planned_stop]
        workspace_bytes[block.run_start : block.run_stop] = scratch.max(initial=0)
    return replace(kernels, workspace_bytes=workspace_bytes)


class _Places:
    """Where planned kernels lie among those of the rewritten plan, also in later iterations."""

    def __init__(self, plan: Plan, match: Match) -> None:
        self._num_planned = len(plan.kernels)
        self.num_kernels = len(match.entries)
        self._before = [0] * self._num_planned
        self._after = [0] * self._num_planned
        self.past = [0] * self._num_planned
        for number, entry in enumerate(match.entries):
            if entry.planned >= 0:
                self._before[entry.planned] = number
                self._after[entry.planned] = self.past[entry.planned] = number + 1
        for start, stop, run_start, run_stop in match.blocks:
            for planned in range(start, stop):
                length, share = run_stop - run_start, planned - start
                self._before[planned] = run_start + share * length // (stop - start)
                self._after[planned] = run_start + (share + 1) * length // (stop - start)
                self.past[planned] = run_stop

    def before(self, planned: int) -> int:
        """Boundary before a planned kernel, whose number is unrolled, as is the boundary."""
        iteration, kernel = divmod(planned, self._num_planned)
        return self._before[kernel] + iteration * self.num_kernels

    def after(self, planned: int) -> int:
        """Boundary after a planned kernel; ``past``: after all that stand for it."""
        iteration, kernel = divmod(planned, self._num_planned)
        return self._after[kernel] + iteration * self.num_kernels


# Moves


def _moves(plan: Plan, places: _Places, rows: _Rows) -> Moves:
    moves = plan.moves
    columns = (moves.storage, *moves.unrolled(len(plan.kernels)))
    kept, placed = [], []
    for number, (row, *kernels) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        place = _place_of_move(kernels, places, rows.uses[row], may_wrap=rows.lives_on[row])
        if place is not None:
            kept.append(number)
            placed.append(place)
    table = np.array(placed, dtype=np.int64).reshape(-1, len(UnrolledMoves._fields))
    landed = UnrolledMoves(*table.T)
    return replace(moves.take(np.array(kept, dtype=np.int64)), **landed._asdict())


def _place_of_move(
    kernels: list[int], places: _Places, uses: list[int], *, may_wrap: bool
) -> tuple[int, ...] | None:
    """A move's kernels among the run's; None if the run has no such inactive period, or too short
    a one. ``kernels``: as UnrolledMoves has them; ``uses``: the run's kernels that use the storage.
    """
    after_kernel, offload_start, free_by, prefetch_start, before_kernel = kernels
    num_kernels = places.num_kernels
    index = bisect_left(uses, places.past[after_kernel]) - 1
    if not uses or (index < 0 and not may_wrap):
        return None
    last = uses[index] if index >= 0 else uses[-1] - num_kernels
    is_tail = before_kernel == MISSING
    if not is_tail and index + 1 < len(uses):
        next_use = uses[index + 1]
    elif is_tail or may_wrap:
        next_use = uses[0] + num_kernels
    else:
        return None
    offload = min(max(places.after(offload_start), last + 1), next_use)
    free = min(max(places.before(free_by), offload), next_use)
    prefetch = next_use if is_tail else min(max(places.before(prefetch_start), free), next_use)
    if prefetch == free:
        return None
    place = [kernel % num_kernels for kernel in (last, offload - 1, free, prefetch, next_use)]
    return (*place[:3], MISSING, MISSING) if is_tail else tuple(place)


# Storages


class _Rows:
    """Storages of the rewritten plan: its own rows, and one for each that only the run has.

    ``uses``: kernels by row; ``lives_on``: whether a row outlives the iteration.
    """

    def __init__(
        self,
        plan: Plan,
        observed: list[ObservedKernel],
        match: Match,
        row_of: dict[StorageState, int],
    ) -> None:
        storages = plan.storages
        self._plan = plan
        self._row_of = dict(row_of)
        self._is_persistent: list[bool] = (storages.birth == MISSING).tolist()
        self._nbytes: list[int] = storages.nbytes.tolist()
        self._births: dict[int, tuple[int, int]] = {}
        self._accesses: list[tuple[int, int, bool, bool]] = []
        lives_on = (storages.birth == MISSING) | (storages.death < storages.birth)
        self.lives_on: list[bool] = lives_on.tolist()
        accesses, births = _accesses_per_kernel(plan), births_per_kernel(plan)
        for number, (planned, other) in enumerate(match.entries):
            for ordinal, row in births[planned] if planned >= 0 else ():
                self._births.setdefault(row, (number, ordinal))
            if other >= 0:
                self._add_observed(number, observed[other])
            else:
                self._accesses += [(number, *access) for access in accesses[planned]]
        self.uses: list[list[int]] = [[] for _ in self._nbytes]
        for number, row, _, _ in self._accesses:
            self.uses[row].append(number)

    def _add_observed(self, number: int, kernel: ObservedKernel) -> None:
        for state in kernel.born:
            row = self._row_of.get(state)
            if row is None:
                row = self._row_of[state] = len(self._nbytes)
                self._nbytes.append(state.nbytes)
                self._is_persistent.append(False)
                self.lives_on.append(False)
            if not self._is_persistent[row]:
                self._births[row] = number, state.birth_ordinal
                is_dead = state.attachment is not None and state.attachment.is_dead
                self.lives_on[row] = state.reference() is not None and not is_dead
        for state, flags in kernel.touched:
            row = self._row_of.get(state)
            if row is not None:
                self._accesses.append((number, row, bool(flags & READ), bool(flags & WRITE)))

    def accesses(self) -> Accesses:
        """Every use that is known."""
        return Accesses.from_rows(self._accesses)

    def storages(self, moves: Moves) -> PlanStorages:
        """All rows, with births among the run's kernels; one without uses is never looked for."""
        planned, count = self._plan.storages, len(self._nbytes)
        num_more = count - len(planned)
        places = [self._place_of(row) for row in range(count)]
        rounding = self._plan.metadata.allocator_rounding_bytes
        more_bytes = np.array(self._nbytes[len(planned) :], dtype=np.int64)
        placement = planned.placement.copy()
        for row in _no_longer_away(planned, moves):
            placement[row] = "gpu"

        def padded(column: Any, value: Any) -> Any:
            return np.append(column, np.full(num_more, value, dtype=column.dtype))

        return PlanStorages(
            storage=np.arange(count),
            name=padded(planned.name, ""),
            kind=padded(planned.kind, "temporary"),
            birth=np.array([birth for birth, _, _ in places]),
            birth_ordinal=np.array([ordinal for _, ordinal, _ in places]),
            death=np.array([death for _, _, death in places]),
            nbytes=np.append(planned.nbytes, more_bytes),
            allocated_bytes=np.append(
                planned.allocated_bytes, -(-more_bytes // rounding) * rounding
            ),
            placement=padded(placement, ""),
            device=padded(planned.device, ""),
            tier_offset_bytes=padded(planned.tier_offset_bytes, MISSING),
        )

    def _place_of(self, row: int) -> tuple[int, int, int]:
        """Birth, ordinal and death; that lies before the birth if the storage lives on."""
        if self._is_persistent[row]:
            return MISSING, MISSING, MISSING
        birth, ordinal = self._births.get(row, (0, MISSING))
        death = MISSING if self.lives_on[row] else max([birth, *self.uses[row][-1:]])
        return birth, ordinal, death


def _accesses_per_kernel(plan: Plan) -> list[list[tuple[int, bool, bool]]]:
    table: list[list[tuple[int, bool, bool]]] = [[] for _ in range(len(plan.kernels))]
    accesses = plan.accesses
    columns = (accesses.kernel, accesses.storage, accesses.reads, accesses.writes)
    for kernel, *access in zip(*(column.tolist() for column in columns), strict=True):
        table[kernel].append(tuple(access))
    return table


def _no_longer_away(planned: PlanStorages, moves: Moves) -> set[int]:
    """Rows that the plan has away at the cut, and that no move takes there any more."""
    away = set(np.flatnonzero((planned.placement != "") & (planned.placement != "gpu")).tolist())
    wraps = moves.prefetch_start < moves.free_by
    is_tail = moves.before_kernel == MISSING
    starts_at_cut = (moves.free_by == 0) & (moves.prefetch_start > 0)
    return away - set(moves.storage[wraps | is_tail | starts_at_cut].tolist())
