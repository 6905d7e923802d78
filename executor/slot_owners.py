"""Who lies where on a device: the guard that keeps one storage's only copy from being overwritten.

A checked plan never puts two storages into one place at one time, but a run that has left its plan
(a dropped prefetch, an eviction) may hold a copy longer than planned.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Generic, TypeVar

Owner = TypeVar("Owner")


class SlotOwners(Generic[Owner]):
    """Disjoint byte ranges of one device, each with its owner."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ranges: dict[int, tuple[int, Owner]] = {}

    def __len__(self) -> int:
        return len(self._begins)

    def overlapping(self, begin_bytes: int, end_bytes: int) -> list[tuple[int, Owner]]:
        """(begin, owner) of every range that meets ``begin_bytes`` .. ``end_bytes``."""
        index = bisect_left(self._begins, begin_bytes)
        if index > 0 and self._ranges[self._begins[index - 1]][0] > begin_bytes:
            index -= 1
        found = []
        while index < len(self._begins) and self._begins[index] < end_bytes:
            begin = self._begins[index]
            found.append((begin, self._ranges[begin][1]))
            index += 1
        return found

    def add(self, begin_bytes: int, end_bytes: int, owner: Owner) -> None:
        """Give a range, which must meet no other, to an owner."""
        insort(self._begins, begin_bytes)
        self._ranges[begin_bytes] = (end_bytes, owner)

    def remove(self, begin_bytes: int, owner: Owner) -> None:
        """Take the range that begins there from ``owner``; nothing if it is someone else's."""
        entry = self._ranges.get(begin_bytes)
        if entry is not None and entry[1] is owner:
            del self._ranges[begin_bytes]
            del self._begins[bisect_left(self._begins, begin_bytes)]
