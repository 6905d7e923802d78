"""Which iterations repeat: the smallest period after which segments are the same again.

Two segments are the same if their kernels, signatures, accesses and births are. Storages are
compared by what they are to the iteration: the same one, or born at the same place as many segments
ago. Two kinds of difference are none: a storage left over from an iteration that is not compared
itself (the step before the first steady one), and input data that the script reads from a list.

Where shapes depend on the data (experts, packed sequences) no two segments are equal. Compared
loosely, only operators, their arguments and the places of births count, not shapes and sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from teraio.profiler.segments import Segment, SegmentAccesses

REMEMBERED_SEGMENTS = 16
"""An optimizer that has not stepped for this many segments (or two periods) is out of the game."""


@dataclass(frozen=True, slots=True)
class Steady:
    """Segments ``start .. start + 2 * period - 1`` are two equal iterations."""

    start: int
    period: int


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two segments differ."""

    first: int
    second: int
    kernel: int
    operator: str
    module: str
    what: str

    def __str__(self) -> str:
        place = f"kernel {self.kernel} ({self.operator}"
        place += f" in {self.module})" if self.module else ")"
        return (
            f"optimizer steps {self.first} and {self.second} first differ at {place}: {self.what}"
        )


def find_steady(segments: Sequence[Segment | None], *, is_loose: bool = False) -> Steady | None:
    """The smallest period whose last two groups of segments, aligned to it, are equal."""
    count = len(segments)
    for period in range(1, count // 2 + 1):
        if count % period:
            continue
        start = count - 2 * period
        if not _has_every_optimizer(segments, period):
            continue
        if find_difference(segments, start, start + period, period, is_loose=is_loose) is None:
            return Steady(start, period)
    return None


def _has_every_optimizer(segments: Sequence[Segment | None], period: int) -> bool:
    recent = segments[-max(REMEMBERED_SEGMENTS, 2 * period) :]
    seen = {segment.optimizer for segment in recent if segment is not None}
    return {s.optimizer for s in segments[-period:] if s is not None} == seen


def find_difference(
    segments: Sequence[Segment | None],
    first: int,
    second: int,
    period: int,
    *,
    is_loose: bool = False,
) -> Difference | None:
    """First difference between the iterations of ``period`` segments from ``first`` and ``second``.

    None if they are equal. Segments that are no longer kept differ from everything. ``is_loose``:
    shapes and sizes do not count.
    """
    pairs = list(zip(segments[first : first + period], segments[second:], strict=False))
    for a, b in pairs:
        if a is None or b is None:
            return Difference(first, second, 0, "", "", "no longer recorded")
        if a.operators != b.operators or not (is_loose or a.signatures == b.signatures):
            return _compare_kernels(a, b)
    for a, b in pairs:
        assert a is not None
        assert b is not None
        difference = _compare_births(a, b, is_loose=is_loose) or _compare_accesses(
            a, b, first, second, is_loose=is_loose
        )
        if difference is not None:
            return difference
    return None


def _compare_kernels(a: Segment, b: Segment) -> Difference:
    shorter = min(len(a), len(b))
    pairs = zip(a.signatures, b.signatures, strict=False)
    kernel = next((k for k, (x, y) in enumerate(pairs) if x != y), shorter)
    if kernel == shorter:
        return _difference(a, b, kernel, f"{len(a)} kernels against {len(b)}")
    if a.operators[kernel] != b.operators[kernel]:
        return _difference(a, b, kernel, f"{a.operators[kernel]} against {b.operators[kernel]}")
    return _difference(a, b, kernel, "other shapes or dtypes")


def _difference(a: Segment, b: Segment, kernel: int, what: str) -> Difference:
    source = a if kernel < len(a) else b
    known = kernel < len(source)
    operator = source.operators[kernel] if known else "end"
    module = source.modules[kernel] if known else ""
    return Difference(a.index, b.index, kernel, operator, module, what)


def _compare_births(a: Segment, b: Segment, *, is_loose: bool) -> Difference | None:
    for x, y in zip(a.births, b.births, strict=False):
        place_x = (x.birth_kernel, x.birth_ordinal, is_loose or x.nbytes)
        place_y = (y.birth_kernel, y.birth_ordinal, is_loose or y.nbytes)
        if place_x != place_y:
            kernel = min(x.birth_kernel, y.birth_kernel)
            return _difference(a, b, kernel, "other storages are created")
    if len(a.births) != len(b.births):
        longer = max(a.births, b.births, key=len)
        kernel = longer[min(len(a.births), len(b.births))].birth_kernel
        return _difference(a, b, kernel, "other storages are created")
    return None


def _compare_accesses(
    a: Segment, b: Segment, first: int, second: int, *, is_loose: bool
) -> Difference | None:
    x, y = a.accesses, b.accesses
    assert x is not None
    assert y is not None
    if not (np.array_equal(x.kernel, y.kernel) and np.array_equal(x.flags, y.flags)):
        shorter = min(len(x.kernel), len(y.kernel))
        unequal = (x.kernel[:shorter] != y.kernel[:shorter]) | (
            x.flags[:shorter] != y.flags[:shorter]
        )
        row = int(np.argmax(unequal)) if unequal.any() else shorter
        longer = x if len(x.kernel) > row else y
        return _difference(a, b, int(longer.kernel[row]), "other arguments are read or written")
    same = (x.serial == y.serial) | (
        (a.index - x.birth_segment == b.index - y.birth_segment)
        & (x.birth_kernel == y.birth_kernel)
        & (x.birth_ordinal == y.birth_ordinal)
    )
    for row in np.flatnonzero(~same).tolist():
        if not _is_excused(x, y, row, first, second, is_loose=is_loose):
            return _difference(a, b, int(x.kernel[row]), "it touches storages of another origin")
    return None


def _is_excused(
    x: SegmentAccesses, y: SegmentAccesses, row: int, first: int, second: int, *, is_loose: bool
) -> bool:
    a, b = x.records[row], y.records[row]
    if a.nbytes != b.nbytes and not is_loose:
        return False
    if a.is_foreign and b.is_foreign:
        return not a.name and not b.name
    return a.birth_segment < first <= b.birth_segment < second
