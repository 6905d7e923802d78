"""A smaller program of the turns that an iteration repeats: alike rows averaged, columns merged.

Any weighted sum of rows holds for whatever satisfies the rows, so the average of the rows that
different turns have in common is implied by them; and where variables then have the same
coefficients everywhere, only their average counts. The small program is therefore a relaxation of
the whole one, and its duals, shared out among the rows that were averaged, are duals of the whole.

One kind of row needs more than an average. A copy that is written once serves every later turn, and
the average of q_g <= q_p + delta_p over all turns would let it serve without ever being written. So
(6) of :mod:`formulation` is first replaced, for versions that outlast the turns, by what it implies
for gaps g in them and for the gap after them, where e is the version's last gap before:

    (6') q_g <= q_e + delta_e + sum of delta over the version's gaps in the turns.

And the average over a whole turn joins its end to its beginning, so that levels would float as they
would in an iteration without (4). (4) holds at the start of every slot, because (1) to (3) do:

    (4') A_s + O_s + P_s = sum of (delta_g + kappa_g) over gaps that span the start of s,

here averaged over the first slots of the turns; and likewise for K.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from teraio.contracts.table import FloatArray, IntArray
from teraio.planner.fluid.alike import Stays, labels_of_gaps, labels_of_slots
from teraio.planner.fluid.classes import GapClasses
from teraio.planner.fluid.formulation import FluidProgram, TierColumns
from teraio.planner.fluid.linear_program import Entries, LinearProgram, add_up
from teraio.planner.fluid.merging import merge_columns
from teraio.planner.fluid.sequences import ranges
from teraio.planner.fluid.slots import SlotTurns
from teraio.planner.fluid.structure import Anchor, RowBlock


class _Chains(NamedTuple):
    """Rows (6) of one tier that gave way to (6'): by version, then in the order of time.

    ``version`` counts the versions of :class:`Stays`; ``gap`` is what each row is about.
    """

    rows: IntArray
    gap: IntArray
    version: IntArray
    order: IntArray


class _TurnAnchor(NamedTuple):
    """(4'): its row of the small program, and the rows of the whole one that imply it.

    ``share_after`` float64 (slots,): the share of the turns that begin after each slot.
    """

    row: int
    whole: Anchor
    share_after: FloatArray


@dataclass(frozen=True)
class Aggregate:
    """``program`` and the way back: the row and column of it that each of the whole one became.

    ``share`` is the part of the small row's dual that each row gets, float64 (whole rows,).
    """

    program: LinearProgram
    row: IntArray
    column: IntArray
    share: FloatArray
    chains: list[_Chains]
    anchors: list[_TurnAnchor]

    def values(self, values: FloatArray) -> FloatArray:
        """The whole program's values, every turn alike."""
        result: FloatArray = values[self.column]
        return result

    def duals(self, duals: FloatArray) -> FloatArray:
        """The whole program's duals; those of (6') and (4') go to every row that implies them."""
        result: FloatArray = duals[self.row] * self.share
        for anchor in self.anchors:
            result[anchor.whole.row] += duals[anchor.row]
            for rows in anchor.whole.balances:
                result[rows] += duals[anchor.row] * anchor.share_after
        for chains in self.chains:
            for order in range(int(chains.order.max(initial=0)), 0, -1):
                later = np.flatnonzero(chains.order == order)
                result[chains.rows[later - 1]] += result[chains.rows[later]]
        return result


def aggregate(fluid: FluidProgram, gaps: GapClasses, num_slots: int, turns: SlotTurns) -> Aggregate:
    """The small program in which ``turns`` are one."""
    program = fluid.program
    of_gap, stays = labels_of_gaps(gaps, num_slots, turns)
    row = _groups(fluid, of_gap, labels_of_slots(num_slots, turns))
    size = np.bincount(row)
    share = 1.0 / size[row]
    chains = [_chains(block, stays, gaps) for block in fluid.copy_blocks]
    is_replaced = np.zeros(len(row), dtype=bool)
    for part in chains:
        is_replaced[part.rows] = True
    keeps = ~is_replaced[program.rows]
    whole = program.rows[keeps]
    entries = [Entries(row[whole], program.columns[keeps], program.values[keeps] * share[whole])]
    for part, columns in zip(chains, fluid.tier_columns, strict=True):
        entries += _served_by_all(part, columns, stays, fluid.serves, row, share)
    anchors = _turn_anchors(fluid.anchors, num_slots, turns, len(size))
    for anchor in anchors:
        entries += _entries_of_anchor(anchor, num_slots, turns)
    none = np.zeros(len(anchors))
    averaged = LinearProgram(
        cost=program.cost,
        column_upper=program.column_upper,
        row_lower=np.r_[np.bincount(row, weights=program.row_lower) / size, none],
        row_upper=np.r_[np.bincount(row, weights=program.row_upper) / size, none],
        **add_up(entries, len(program.cost))._asdict(),
    )
    small, column = merge_columns(averaged)
    return Aggregate(small, row, column, share, chains, anchors)


def _groups(fluid: FluidProgram, of_gap: IntArray, of_slot: IntArray) -> IntArray:
    """The small program's row for each row, int64 (rows,)."""
    num_rows = len(fluid.program.row_lower)
    label = np.arange(num_rows)
    stride = max(len(of_gap), len(of_slot))
    start = num_rows
    for blocks, labels in (
        (fluid.slot_blocks, of_slot),
        (fluid.gap_blocks, of_gap),
        (fluid.copy_blocks, of_gap),
    ):
        for block in blocks:
            label[block.rows] = start + labels[block.about]
            start += stride
    result: IntArray = np.unique(label, return_inverse=True)[1].reshape(-1)
    return result


def _chains(block: RowBlock, stays: Stays, gaps: GapClasses) -> _Chains:
    """The rows of (6) for gaps in the turns and after them; gaps that nothing serves have none."""
    row_of_gap = np.full(len(gaps) + 1, -1)
    row_of_gap[block.about] = block.rows
    count = stays.end - stays.first + 1
    version = np.repeat(np.arange(len(count)), count)
    gap = ranges(stays.first, count)
    order = gap - stays.first[version]
    gap = np.where(gap == stays.end[version], stays.exit[version], gap)
    rows = row_of_gap[gap]  # exit -1: the spare last place.
    has = rows >= 0
    return _Chains(rows[has], gap[has], version[has], order[has] - (stays.entry < 0)[version[has]])


def _served_by_all(
    chains: _Chains,
    columns: TierColumns,
    stays: Stays,
    serves: IntArray,
    row: IntArray,
    share: FloatArray,
) -> list[Entries]:
    """(6'), averaged."""
    place = np.full(int(serves.max(initial=-1)) + 1, -1)
    place[serves] = np.arange(len(serves))
    own = Entries(row[chains.rows], columns.copy[place[chains.gap]], share[chains.rows])
    pairs = np.unique(np.column_stack((row[chains.rows], chains.version)), axis=0)
    group, version = pairs[:, 0], pairs[:, 1]
    entry = stays.entry[version]
    has_entry = entry >= 0
    is_served = has_entry & (place[entry] >= 0)
    count = (stays.end - stays.first)[version]
    copies = ranges(stays.first[version], count)
    return [
        own,
        Entries.minus(group[is_served], columns.copy[place[entry[is_served]]]),
        Entries.minus(group[has_entry], columns.delta[entry[has_entry]]),
        Entries.minus(np.repeat(group, count), columns.delta[copies]),
    ]


def _turn_anchors(
    anchors: list[Anchor], num_slots: int, turns: SlotTurns, first_row: int
) -> list[_TurnAnchor]:
    begun = _turns_begun(np.arange(num_slots), num_slots, turns)
    share_after = (turns.count - begun) / turns.count
    return [_TurnAnchor(first_row + i, whole, share_after) for i, whole in enumerate(anchors)]


def _entries_of_anchor(anchor: _TurnAnchor, num_slots: int, turns: SlotTurns) -> list[Entries]:
    """(4'), averaged."""
    starts = turns.first + turns.length * np.arange(turns.count)
    entries = []
    for level in anchor.whole.levels:
        weights = np.full(turns.count, 1 / turns.count)
        entries.append(Entries(np.full(turns.count, anchor.row), level[starts], weights))
    for span in anchor.whole.spans:
        spanned = _turns_begun(span.last, num_slots, turns)
        spanned -= _turns_begun(span.first, num_slots, turns)
        rows = np.full(len(spanned), anchor.row)
        entries.append(Entries(rows, span.columns, -spanned / turns.count))
    return entries


def _turns_begun(slot: IntArray, num_slots: int, turns: SlotTurns) -> IntArray:
    """How many turns have begun when a slot begins, its own included; unrolled."""
    cycle, within = np.divmod(slot, num_slots)
    begun = np.clip((within - turns.first) // turns.length + 1, 0, turns.count)
    result: IntArray = cycle * turns.count + begun
    return result
