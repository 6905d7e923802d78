"""Which storage leaves next when memory is short: a heap that is kept only while it is asked."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from teraio.executor.holding import Holding
from teraio.simulator.eviction_rule import NOT_USED_AGAIN, SMALL_BYTES

_SLACK = 256
"""Outdated entries tolerated before the heap is made anew."""


class _Entry(NamedTuple):
    """Ordered as the heap pops; serials are unique, so holdings are never compared."""

    is_small: bool
    negative_key: float
    negative_serial: int
    stamp: int
    holding: Holding


class EvictionOrder:
    """As :mod:`teraio.simulator.eviction_rule` has it: large storages before small ones, largest
    ``key`` first, the youngest first among equals. Keys from NOT_USED_AGAIN on are equal.

    A key may change only when the storage is used (``note_use``), or for all at once (``forget``):
    the position of the next use does, and so does the time of the last. The heap is made when the
    first victim is asked for, so a run that never evicts pays nothing.
    """

    def __init__(self, key: Callable[[Holding], float]) -> None:
        self._key = key
        self._heap: list[_Entry] | None = None

    @property
    def is_kept(self) -> bool:
        """Whether uses have to be noted."""
        return self._heap is not None

    def forget(self) -> None:
        """Keep no order until the next victim is asked for."""
        self._heap = None

    def note_use(self, holding: Holding) -> None:
        """It is resident and has just been used, or has just come back."""
        if self._heap is not None and not holding.is_dead:
            heapq.heappush(self._heap, self._entry(holding))

    def pop(self, holdings: Collection[Holding], protected: Collection[Holding]) -> Holding | None:
        """The next of ``holdings`` to leave, but none of ``protected``; None if there is none."""
        heap = self._heap
        if heap is None or len(heap) > 2 * len(holdings) + _SLACK:
            heap = self._heap = self._made_of(holdings)
        found: Holding | None = None
        passed_over: list[_Entry] = []
        arriving: _Entry | None = None
        while heap and found is None:
            entry = heapq.heappop(heap)
            holding = entry.holding
            if entry.stamp != holding.stamp or not holding.can_leave:
                continue
            if holding in protected:
                passed_over.append(entry)
            elif holding.arriving is not None:
                # What is just arriving was asked for: it leaves last.
                arriving = arriving or entry
                passed_over.append(entry)
            else:
                found = holding
        if found is None and arriving is not None:
            found = arriving.holding
            passed_over.remove(arriving)
        for entry in passed_over:
            heapq.heappush(heap, entry)
        return found

    def _made_of(self, holdings: Iterable[Holding]) -> list[_Entry]:
        heap = [self._entry(holding) for holding in holdings if holding.can_leave]
        heapq.heapify(heap)
        return heap

    def _entry(self, holding: Holding) -> _Entry:
        holding.stamp += 1
        return _Entry(
            holding.allocated_bytes < SMALL_BYTES,
            # Else the position of its last use decided, or when the heap was made.
            -min(self._key(holding), NOT_USED_AGAIN),
            -holding.state.serial,
            holding.stamp,
            holding,
        )


def least_recently_used(holding: Holding) -> float:
    """Eviction key of a run that does not follow its trace."""
    return -holding.last_use
