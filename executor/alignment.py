"""Which kernels of a run stand for which of a plan: two sequences laid side by side.

Both are cut into *passes* (forward and backward), what lies *between* the last backward kernel and
the optimizer (clipping), and the *optimizer*. Within each, kernels of the same operator, shapes and
dtypes are matched in order; where they differ, the nearest place is sought from which on both go
the same way again. What lies before it is a *block*: some planned kernels, and some others that the
run has in their place.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from difflib import SequenceMatcher
from itertools import groupby
from typing import NamedTuple

_WINDOW = 4
"""Kernels in a row that must be the same for two sequences to go the same way again."""

_REACH = 64
"""How far ahead that is sought, in either sequence."""

_LONG_WINDOW = 8
"""Kernels in a row by which the beginning of a plan is recognised among anything."""


class Block(NamedTuple):
    """Planned kernels [planned_start, planned_stop) and those of the run in their place."""

    planned_start: int
    planned_stop: int
    run_start: int
    run_stop: int

    @property
    def length(self) -> int:
        """Kernels on the longer side."""
        return max(self.planned_stop - self.planned_start, self.run_stop - self.run_start)

    @property
    def is_one_sided(self) -> bool:
        """Whether kernels are only extra or only left out."""
        return self.planned_start == self.planned_stop or self.run_start == self.run_stop


class Section(NamedTuple):
    """A pass, the optimizer, or what lies between them, in both sequences."""

    kind: str
    whole: Block


_OFFSETS = sorted(
    ((i, j) for i in range(_REACH + 1) for j in range(_REACH + 1) if i + j > 0),
    key=lambda offset: (sum(offset), abs(offset[0] - offset[1])),
)


def paired_sections(planned: Sequence[str], run: Sequence[str]) -> list[Section]:
    """Sections by the phases of both sequences; one pass of everything if they do not pair up."""
    one, other = _sections(planned), _sections(run)
    if [kind for kind, *_ in one] != [kind for kind, *_ in other]:
        return [Section("pass", Block(0, len(planned), 0, len(run)))]
    return [
        Section(kind, Block(start, stop, run_start, run_stop))
        for (kind, start, stop), (_, run_start, run_stop) in zip(one, other, strict=True)
    ]


def differing_blocks(
    planned: Sequence[Hashable], run: Sequence[Hashable], section: Block
) -> list[Block]:
    """Where two stretches differ; in between they are the same, one by one."""
    blocks: list[Block] = []
    i, planned_stop, j, run_stop = section
    while i < planned_stop or j < run_stop:
        if i < planned_stop and j < run_stop and planned[i] == run[j]:
            i, j = i + 1, j + 1
            continue
        next_i, next_j = _meeting_place(planned, run, Block(i, planned_stop, j, run_stop))
        blocks += _refined(planned, run, Block(i, next_i, j, next_j))
        i, j = next_i, next_j
    return blocks


def find_beginning(planned: Sequence[Hashable], run: Sequence[Hashable], section: Block) -> int:
    """The first kernel of a run that is surely of a section that anything may precede; where the
    run's section starts if there is none.
    """
    places: dict[tuple[Hashable, ...], int] = {}
    for place in range(section.run_start, section.run_stop - _LONG_WINDOW + 1):
        places.setdefault(tuple(run[place : place + _LONG_WINDOW]), place)
    first = section.planned_start
    for start in range(first, min(first + _REACH, section.planned_stop)):
        found = places.get(tuple(planned[start : start + _LONG_WINDOW]))
        if found is not None:
            return found
    return section.run_start


def _sections(phases: Sequence[str]) -> list[tuple[str, int, int]]:
    sections: list[tuple[str, int, int]] = []
    start = 0
    for is_optimizer, group in groupby(phases, lambda phase: phase == "optimizer"):
        members = list(group)
        stop = start + len(members)
        if is_optimizer:
            sections.append(("optimizer", start, stop))
        else:
            after_backward = stop
            if stop < len(phases) and "backward" in members:
                after_backward = stop - members[::-1].index("backward")
            sections.append(("pass", start, after_backward))
            sections.append(("between", after_backward, stop))
        start = stop
    return sections


def _meeting_place(
    planned: Sequence[Hashable], run: Sequence[Hashable], rest: Block
) -> tuple[int, int]:
    """The nearest places from which on both go the same way; the ends if they never do."""
    for ahead, run_ahead in _OFFSETS:
        i, j = rest.planned_start + ahead, rest.run_start + run_ahead
        if i > rest.planned_stop or j > rest.run_stop:
            continue
        window = planned[i : min(i + _WINDOW, rest.planned_stop)]
        # At the ends fewer are enough, if both end together.
        if window == run[j : min(j + _WINDOW, rest.run_stop)]:
            return i, j
    return rest.planned_stop, rest.run_stop


def _refined(planned: Sequence[Hashable], run: Sequence[Hashable], block: Block) -> list[Block]:
    """A block without those of its kernels that are the same after all."""
    if block.is_one_sided or block.length > _REACH:
        return [block]
    i, planned_stop, j, run_stop = block
    matcher = SequenceMatcher(None, planned[i:planned_stop], run[j:run_stop], autojunk=False)
    return [
        Block(i + i1, i + i2, j + j1, j + j2)
        for tag, i1, i2, j1, j2 in matcher.get_opcodes()
        if tag != "equal"
    ]
