"""Which slots and gaps of different turns correspond."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from teraio.contracts.table import BoolArray, IntArray
from teraio.planner.fluid.classes import GapClasses, Versions, labels_of_versions
from teraio.planner.fluid.sequences import ranges
from teraio.planner.fluid.slots import SlotTurns


class Stays(NamedTuple):
    """Versions that outlast the turns, and the gaps of each that lie in them, [``first``, ``end``).

    ``entry`` is the gap before those, -1 if the version begins with a write in the turns; ``exit``
    the one after, -1 if there is none.
    """

    entry: IntArray
    first: IntArray
    end: IntArray
    exit: IntArray


def labels_of_slots(num_slots: int, turns: SlotTurns) -> IntArray:
    """Equal for slots that correspond, int64 (slots,)."""
    slot = np.arange(num_slots)
    inside = (slot >= turns.first) & (slot < turns.end)
    return np.where(inside, turns.first + (slot - turns.first) % turns.length, slot)


def labels_of_gaps(gaps: GapClasses, num_slots: int, turns: SlotTurns) -> tuple[IntArray, Stays]:
    """Equal for gaps that correspond, int64 (gaps,), and the versions that stay.

    A version that lies in the turns corresponds, gap by gap, to those in its place in other turns.
    Of one that outlasts them, gaps correspond to each other that are whole turns apart.
    """
    index = np.arange(len(gaps))
    is_inside = _is_inside(gaps, num_slots, turns)
    first = np.flatnonzero((gaps.previous < 0) | (gaps.previous >= index))
    num_gaps = np.diff(np.r_[first, len(gaps)])
    num_inside = np.add.reduceat(is_inside, first, dtype=np.int64) if len(first) else num_gaps
    label = index.copy()
    lies_inside = num_inside == num_gaps
    versions = Versions(
        release=gaps.release,
        due=gaps.due,
        is_tail=gaps.is_tail,
        first=first[lies_inside],
        num_gaps=num_gaps[lies_inside],
        num_bytes=np.zeros(int(lies_inside.sum()), dtype=np.int64),
        size_class=np.zeros(int(lies_inside.sum()), dtype=np.int64),
        is_unwritten=np.zeros(int(lies_inside.sum()), dtype=bool),
    )
    _label_versions(label, versions, num_slots, turns)
    outlasts = ~lies_inside & (num_inside > 1)
    member = np.repeat(outlasts, num_gaps) & is_inside
    _label_turns(label, gaps, np.flatnonzero(member), np.repeat(first, num_gaps), turns, num_slots)
    # Where no gap has one alike, (6) is as good, and keeps the copy in its place meanwhile.
    if len(first):
        outlasts &= np.logical_or.reduceat(label != index, first)
    member = np.repeat(outlasts, num_gaps) & is_inside
    return label, _stays(gaps, member, num_inside[outlasts])


def _is_inside(gaps: GapClasses, num_slots: int, turns: SlotTurns) -> BoolArray:
    """Whether a gap begins and ends in the turns of one iteration."""
    begin, end = gaps.release % num_slots, gaps.due % num_slots
    result: BoolArray = (begin >= turns.first) & (end < turns.end)
    result &= gaps.release // num_slots == gaps.due // num_slots
    return result


def _label_versions(label: IntArray, versions: Versions, num_slots: int, turns: SlotTurns) -> None:
    """Versions are alike if they are by slots counted from the turn in which each begins."""
    members = ranges(versions.first, versions.num_gaps)
    begin = versions.release[versions.first]
    turn = (begin % num_slots - turns.first) // turns.length
    start = np.repeat(begin - begin % num_slots + turn * turns.length, versions.num_gaps)
    release, due = versions.release.copy(), versions.due.copy()
    release[members] -= start
    due[members] -= start
    kind = labels_of_versions(versions._replace(release=release, due=due))
    _, example = np.unique(kind, return_index=True)
    label[members] = ranges(versions.first[example][kind], versions.num_gaps)


def _label_turns(
    label: IntArray,
    gaps: GapClasses,
    members: IntArray,
    version: IntArray,
    turns: SlotTurns,
    num_slots: int,
) -> None:
    """Gaps of one ``version`` are alike if they are by slots counted from their own turn."""
    begin = gaps.release[members] % num_slots - turns.first
    place, length = begin % turns.length, (gaps.due - gaps.release)[members]
    keys = np.column_stack((version[members], place, length))
    _, example, kind = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    label[members] = members[example][kind.reshape(-1)]


def _stays(gaps: GapClasses, member: BoolArray, num_inside: IntArray) -> Stays:
    inside = np.flatnonzero(member)
    end = np.cumsum(num_inside)
    first, last = inside[end - num_inside], inside[end - 1]
    following = np.full(len(gaps), -1)
    serves = np.flatnonzero(gaps.previous >= 0)
    following[gaps.previous[serves]] = serves
    return Stays(entry=gaps.previous[first], first=first, end=last + 1, exit=following[last])
