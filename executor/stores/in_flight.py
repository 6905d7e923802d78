"""Transfers under way on one device, found by the bytes that they touch."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Ranged(Protocol):
    """A transfer's bytes on the device."""

    @property
    def offset_bytes(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


Item = TypeVar("Item", bound=Ranged)


class InFlight(Generic[Item]):
    """Byte ranges that may overlap, each with its transfer.

    A training thread that runs ahead of its GPU has issued hundreds of transfers that have not
    ended: looking at all of them for every new one would cost more than the copies' issue.
    """

    def __init__(self) -> None:
        self._keys: list[tuple[int, int]] = []
        self._items: dict[int, Item] = {}
        self._serials: dict[int, int] = {}
        self._next_serial = 0
        self._longest_bytes = 0

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, item: Item) -> None:
        """A transfer has been issued."""
        serial = self._next_serial
        self._next_serial = serial + 1
        insort(self._keys, (item.offset_bytes, serial))
        self._items[serial] = item
        self._serials[id(item)] = serial
        self._longest_bytes = max(self._longest_bytes, item.nbytes)

    def remove(self, item: Item) -> None:
        """A transfer that was added has ended."""
        serial = self._serials.pop(id(item))
        del self._items[serial]
        del self._keys[bisect_left(self._keys, (item.offset_bytes, serial))]
        if not self._keys:
            self._longest_bytes = 0

    def overlapping(self, offset_bytes: int, nbytes: int) -> Iterator[Item]:
        """Transfers that touch one of these bytes, by their first byte."""
        keys, end = self._keys, offset_bytes + nbytes
        # No range that begins further left reaches this far.
        index = bisect_left(keys, (offset_bytes - self._longest_bytes, -1))
        while index < len(keys) and keys[index][0] < end:
            item = self._items[keys[index][1]]
            if item.offset_bytes + item.nbytes > offset_bytes:
                yield item
            index += 1
