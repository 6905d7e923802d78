"""Blocks in use in an address space, found by where they begin and by where they end."""

from __future__ import annotations

from collections.abc import Iterator


class Blocks:
    """Ranges in bytes that do not overlap."""

    def __init__(self) -> None:
        self._size_at: dict[int, int] = {}
        self._begin_of_end: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._size_at)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(begin, size) in no order."""
        return iter(self._size_at.items())

    def add(self, begin: int, nbytes: int) -> None:
        """A block is in use from now on."""
        self._size_at[begin] = nbytes
        self._begin_of_end[begin + nbytes] = begin

    def remove(self, begin: int) -> None:
        """It is not any more."""
        del self._begin_of_end[begin + self._size_at.pop(begin)]

    def beginning_at(self, begin: int) -> int:
        """Size of the block that begins there, 0 if none does."""
        return self._size_at.get(begin, 0)

    def ending_at(self, end: int) -> int:
        """Size of the block that ends there, 0 if none does."""
        return end - self._begin_of_end.get(end, end)
