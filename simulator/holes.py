"""Free ranges of an address space, found by size or by address and merged with their neighbours."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator


class Holes:
    """Ranges in bytes that nobody uses; adjacent ones are one.

    ``growth``: bytes by which the hole that ends at an address could grow, because nothing is
    mapped behind it. PyTorch counts them as the hole's own where it looks for the best fit.
    """

    def __init__(self) -> None:
        self.growth: dict[int, int] = {}
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
        by_size = self._by_size
        index = bisect_left(by_size, (nbytes, -1))
        if index == len(by_size):
            return None
        size, begin = by_size[index]
        growth = self.growth
        while begin + size in growth and index + 1 < len(by_size):
            index += 1
            other_size, other = by_size[index]
            grown = other_size + growth.get(other + other_size, 0)
            if grown >= size + growth[begin + size]:
                break
            size, begin = other_size, other
        return begin, size

    def take(self, nbytes: int) -> int | None:
        """Cut ``nbytes`` off the beginning of the best fit: their address; None if none fits."""
        hole = self.best_fit(nbytes)
        if hole is None:
            return None
        self.take_at(hole[0], nbytes)
        return hole[0]

    def take_at(self, begin: int, nbytes: int) -> bool:
        """Cut ``nbytes`` out at an address; False, and nothing is cut, if not all are free."""
        index = bisect_right(self._begins, begin) - 1
        if index < 0 or nbytes <= 0:
            return False
        hole = self._begins[index]
        size = self._size_at[hole]
        end, hole_end = begin + nbytes, hole + size
        if end > hole_end:
            return False
        self._unlist(hole, size)
        if begin > hole:
            self._list(hole, begin - hole)
            if end < hole_end:
                self._begins.insert(index + 1, end)
        elif end < hole_end:
            self._begins[index] = end
        else:
            del self._begins[index]
        if end < hole_end:
            self._list(end, hole_end - end)
        return True

    def put_back(self, begin: int, nbytes: int) -> bool:
        """A range is free again, one with the holes beside it; False, and nothing has changed, if
        a part of it was free already.
        """
        begins, end = self._begins, begin + nbytes
        index = bisect_right(begins, begin)
        before = begins[index - 1] if index else begin
        before_end = before + self._size_at[before] if index else begin - 1
        after = begins[index] if index < len(begins) else end + 1
        if before_end > begin or after < end or nbytes <= 0:
            return False
        if after == end:
            end += self._size_at[after]
            self._unlist(after, end - after)
            del begins[index]
        if before_end == begin:
            begin = before
            self._unlist(before, before_end - before)
        else:
            begins.insert(index, begin)
        self._list(begin, end - begin)
        return True

    def _list(self, begin: int, nbytes: int) -> None:
        insort(self._by_size, (nbytes, begin))
        self._size_at[begin] = nbytes
        self._begin_of_end[begin + nbytes] = begin

    def _unlist(self, begin: int, nbytes: int) -> None:
        del self._by_size[bisect_left(self._by_size, (nbytes, begin))]
        del self._size_at[begin]
        del self._begin_of_end[begin + nbytes]
