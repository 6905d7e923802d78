"""Free ranges of an address space, found by size or by address and merged with their neighbours."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator


class Holes:
    """Ranges in bytes that nobody uses; adjacent ones are one."""

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int]] = []
        self._begins: list[int] = []
        self._size_at: dict[int, int] = {}
        self._begin_of_end: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._by_size)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(begin, size) in the order of addresses."""
        return ((begin, self._size_at[begin]) for begin in self._begins)

    @property
    def largest_bytes(self) -> int:
        """Size of the largest, 0 if there is none."""
        return self._by_size[-1][0] if self._by_size else 0

    def ending_at(self, end: int) -> int:
        """Size of the hole that ends there, 0 if none does."""
        return end - self._begin_of_end.get(end, end)

    def beginning_at(self, begin: int) -> int:
        """Size of the hole that begins there, 0 if none does."""
        return self._size_at.get(begin, 0)

    def best_fit(self, nbytes: int) -> tuple[int, int] | None:
        """(begin, size) of the smallest that holds ``nbytes``, the lowest of equal ones."""
        index = bisect_left(self._by_size, (nbytes, -1))
        if index == len(self._by_size):
            return None
        size, begin = self._by_size[index]
        return begin, size

    def take(self, nbytes: int) -> int | None:
        """Cut ``nbytes`` off the beginning of the best fit: their address; None if none fits."""
        hole = self.best_fit(nbytes)
        if hole is None:
            return None
        begin, size = hole
        self._remove(begin, size)
        if size > nbytes:
            self._insert(begin + nbytes, size - nbytes)
        return begin

    def take_at(self, begin: int, nbytes: int) -> bool:
        """Cut ``nbytes`` out at an address; False, and nothing is cut, if not all are free."""
        index = bisect_right(self._begins, begin) - 1
        if index < 0:
            return False
        hole = self._begins[index]
        size = self._size_at[hole]
        if begin + nbytes > hole + size:
            return False
        self._remove(hole, size)
        if begin > hole:
            self._insert(hole, begin - hole)
        if begin + nbytes < hole + size:
            self._insert(begin + nbytes, hole + size - begin - nbytes)
        return True

    def put_back(self, begin: int, nbytes: int) -> None:
        """A range is free again, one with the holes beside it."""
        end = begin + nbytes
        before_bytes = self.ending_at(begin)
        if before_bytes:
            begin -= before_bytes
            self._remove(begin, before_bytes)
        after_bytes = self._size_at.get(end)
        if after_bytes is not None:
            self._remove(end, after_bytes)
            end += after_bytes
        self._insert(begin, end - begin)

    def _insert(self, begin: int, nbytes: int) -> None:
        insort(self._by_size, (nbytes, begin))
        insort(self._begins, begin)
        self._size_at[begin] = nbytes
        self._begin_of_end[begin + nbytes] = begin

    def _remove(self, begin: int, nbytes: int) -> None:
        del self._by_size[bisect_left(self._by_size, (nbytes, begin))]
        del self._begins[bisect_left(self._begins, begin)]
        del self._size_at[begin]
        del self._begin_of_end[begin + nbytes]
