"""Room in fragmented memory: a few blocks move to holes elsewhere, so that one large hole remains.

What a plan needs fits into its budget, but not always in one piece: blocks come and go in another
order than they lie, and a request that finds no hole makes the allocator reserve more. Copying a
few blocks within the GPU, at its memory's speed, makes the hole instead.

The allocator decides where a block lies (best fit), and a block that moves is allocated anew before
its old place is free. So holes in the range that is to become free are plugged while blocks move
out of it, as far as one of them would attract a block.

Shared by the executor, which does it, and by the simulator, which predicts what comes of it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from teraio.contracts.plan import Plan
from teraio.contracts.table import MISSING
from teraio.simulator.blocks import Blocks
from teraio.simulator.holes import Holes

RESERVED_SHARE = 1.02
"""Of the budget: what is reserved may grow that far before blocks are moved instead."""

_ATTEMPTS = 3

_WINDOWS = 100
"""Looked at closely for one request, some 50 us each; if one will do it is among the first."""


class Window(NamedTuple):
    """A range that can become one hole: the blocks (begin, bytes) in it move, the largest first."""

    begin: int
    end: int
    blocks: list[tuple[int, int]]

    @property
    def moved_bytes(self) -> int:
        """What has to be copied."""
        return sum(nbytes for _, nbytes in self.blocks)


class Compacted(NamedTuple):
    """What was done: bytes copied, requests for which no room could be made."""

    moved_bytes: int
    num_failed: int


class Memory(Protocol):
    """An allocator with best fit, and what can be moved in it. Sizes are multiples of its unit."""

    @property
    def holes(self) -> Holes:
        """What is reserved and free."""
        ...

    @property
    def spare_bytes(self) -> int:
        """What may be allocated now without exceeding the budget."""
        ...

    def would_exceed(self, nbytes: int) -> bool:
        """Whether reserving more for a block of ``nbytes`` would be too much."""
        ...

    @property
    def blocks(self) -> Blocks:
        """Those in use that may be movable."""
        ...

    def can_move(self, begin: int) -> bool:
        """Whether the block that begins there can be moved now."""
        ...

    def plug(self, nbytes: int) -> int:
        """Allocate a block that nobody uses: its address."""
        ...

    def unplug(self, begin: int) -> None:
        """Free it again."""
        ...

    def move(self, begin: int) -> bool:
        """Allocate the block anew, in new pages if no hole fits, copy it and free the old one;
        False if it did not come to lie where that was to be expected.
        """
        ...


def relocatable_rows(plan: Plan) -> list[bool]:
    """Whether each storage may be moved within the GPU: what an iteration makes, and of what lives
    on the kinds that the plan offloads anyway. A pointer to another, kept somewhere, stays good.
    """
    storages = plan.storages
    kinds = {storages.kind[row] for row in plan.moves.storage}
    return [
        birth != MISSING or kind in kinds
        for birth, kind in zip(storages.birth.tolist(), storages.kind.tolist(), strict=True)
    ]


def prepare(requests: Sequence[int], memory: Memory) -> Compacted:
    """See to it that blocks of these sizes, allocated in this order, find holes."""
    moved_bytes = 0
    for _ in range(_ATTEMPTS):
        if memory.holes.largest_bytes >= sum(requests) or _all_fit(requests, memory.holes):
            break
        done = _prepare_once(requests, memory)
        moved_bytes += done.moved_bytes
        if done.num_failed or len(requests) == 1:
            return Compacted(moved_bytes, done.num_failed)
        # The room made for one of them may attract one before it, if its own is at the end.
    return Compacted(moved_bytes, 0)


def _prepare_once(requests: Sequence[int], memory: Memory) -> Compacted:
    plugs: list[int] = []
    moved_bytes = num_failed = 0
    try:
        for nbytes in requests:
            if memory.holes.largest_bytes < nbytes and memory.would_exceed(nbytes):
                copied_bytes, is_there = _make_hole(nbytes, memory)
                moved_bytes += copied_bytes
                if not is_there:
                    num_failed += 1
                    moved_bytes += _grow_well(nbytes, memory)
                    if memory.holes.largest_bytes >= nbytes:
                        # Room at last, so what failed just now is made less likely to fail again.
                        moved_bytes += tidy(memory, nbytes)
                    return Compacted(moved_bytes, num_failed)
            if len(requests) > 1:
                # In its place while room is made for the others.
                plugs.append(memory.plug(nbytes))
    finally:
        for begin in plugs:
            memory.unplug(begin)
    return Compacted(moved_bytes, num_failed)


def tidy(memory: Memory, at_least_bytes: int = 0) -> int:
    """Make one hole of two, of ``at_least_bytes`` with what was between them, wherever a block lies
    between them that fits into a third: the bytes copied.

    For a time at which much is free: what is in pieces then is in pieces for long.
    """
    moved_bytes = 0
    while True:
        copied_bytes, is_going_on = _tidy_once(memory, at_least_bytes)
        moved_bytes += copied_bytes
        if not copied_bytes or not is_going_on:
            return moved_bytes


def _tidy_once(memory: Memory, at_least_bytes: int) -> tuple[int, bool]:
    """(bytes copied, whether all came to lie where they were to)."""
    holes, moved_bytes = memory.holes, 0
    # First where most becomes of little: large holes on both sides of a small block.
    for _, block in sorted(_between_holes(memory)):
        nbytes = memory.blocks.beginning_at(block)
        before_bytes, behind_bytes = holes.ending_at(block), holes.beginning_at(block + nbytes)
        range_bytes = before_bytes + nbytes + behind_bytes
        if not before_bytes or not behind_bytes or range_bytes < at_least_bytes:
            continue
        begin = block - before_bytes
        hole = holes.best_fit(nbytes)
        if hole is None or _reaches_into(hole, nbytes, Window(begin, begin + range_bytes, [])):
            continue
        if nbytes > memory.spare_bytes or not memory.can_move(block):
            continue
        moved_bytes += nbytes
        if not memory.move(block):
            return moved_bytes, False
    return moved_bytes, True


def _between_holes(memory: Memory) -> Iterator[tuple[float, int]]:
    """Blocks with holes on both sides: (the more negative, the more is gained; begin)."""
    for begin, before_bytes in memory.holes:
        block = begin + before_bytes
        nbytes = memory.blocks.beginning_at(block)
        behind_bytes = memory.holes.beginning_at(block + nbytes) if nbytes else 0
        if behind_bytes:
            yield -min(before_bytes, behind_bytes) / nbytes, block


def _reaches_into(hole: tuple[int, int], nbytes: int, window: Window) -> bool:
    """Whether a block would come to lie in the window, in a hole that may begin before it."""
    return hole[0] < window.end and hole[0] + nbytes > window.begin


def _all_fit(requests: Sequence[int], holes: Holes) -> bool:
    taken: list[tuple[int, int]] = []
    for nbytes in requests:
        begin = holes.take(nbytes)
        if begin is None:
            break
        taken.append((begin, nbytes))
    for begin, nbytes in taken:
        holes.put_back(begin, nbytes)
    return len(taken) == len(requests)


def _make_hole(nbytes: int, memory: Memory) -> tuple[int, bool]:
    """Move blocks until a hole of ``nbytes`` exists: (bytes copied, whether it does)."""
    for window in islice(_candidates(nbytes, memory), _WINDOWS):
        if _fits_elsewhere(window, memory.holes):
            copied_bytes, is_empty = _evacuate(window, memory)
            if is_empty or copied_bytes:
                # Half way, what the other windows were made of has moved too.
                return copied_bytes, is_empty
    return 0, False


def _candidates(nbytes: int, memory: Memory) -> Iterator[Window]:
    """Shortest ranges of holes and movable blocks that hold ``nbytes``, cheapest to empty first."""
    most_bytes = min(memory.holes.largest_bytes, memory.spare_bytes)
    blocks = {begin: size for begin, size in memory.blocks if size <= most_bytes}
    items = sorted([*blocks.items(), *memory.holes])
    known: dict[int, bool] = {}

    def can_move(begin: int) -> bool:
        if begin not in known:
            known[begin] = begin not in blocks or memory.can_move(begin)
        return known[begin]

    for _, first, last in _cheapest(nbytes, items, blocks):
        found = items[first : last + 1]
        # Asked only now, and once for each: of most blocks nobody needs to know.
        if all(can_move(begin) for begin, _ in found):
            yield _window(found, nbytes, blocks)


def _grow_well(nbytes: int, memory: Memory) -> int:
    """New pages must come. They take a block from between two holes, if that makes the room and
    takes no more pages than the request: two holes less in the way of others. The bytes copied.
    """
    holes, blocks = memory.holes, memory.blocks
    best = most_bytes = 0
    for begin, hole_bytes in holes:
        end = begin + hole_bytes
        for block in (begin - blocks.ending_at(begin), end):
            size = blocks.beginning_at(block)
            free_bytes = holes.ending_at(block) + holes.beginning_at(block + size)
            is_enough = free_bytes + size >= nbytes and 0 < size <= min(nbytes, memory.spare_bytes)
            if is_enough and free_bytes > most_bytes and memory.can_move(block):
                best, most_bytes = block, free_bytes
    if not most_bytes:
        return 0
    size = blocks.beginning_at(best)
    memory.move(best)
    return size


def _cheapest(
    nbytes: int, items: list[tuple[int, int]], blocks: dict[int, int]
) -> list[tuple[int, int, int]]:
    """(bytes to copy, first and last of ``items``) of the shortest ranges of ``nbytes``."""
    windows: list[tuple[int, int, int]] = []
    first = total_bytes = moved_bytes = 0
    end = -1
    for last, (begin, size) in enumerate(items):
        if begin != end:
            # A block that stays, or a gap in the address space, ends every window before it.
            first, total_bytes, moved_bytes = last, 0, 0
        end = begin + size
        total_bytes += size
        if begin in blocks:
            moved_bytes += size
        while total_bytes - items[first][1] >= nbytes:
            total_bytes -= items[first][1]
            if items[first][0] in blocks:
                moved_bytes -= items[first][1]
            first += 1
        if total_bytes >= nbytes:
            windows.append((moved_bytes, first, last))
    windows.sort()
    return windows


def _window(items: list[tuple[int, int]], nbytes: int, blocks: dict[int, int]) -> Window:
    moving = [item for item in items if item[0] in blocks]
    moving.sort(key=lambda block: -block[1])
    begin, end = items[0][0], items[-1][0] + items[-1][1]
    # What is left of a hole at the beginning is a place for blocks; they come to lie at its start.
    return Window(begin if begin in blocks else end - nbytes, end, moving)


def _fits_elsewhere(window: Window, holes: Holes) -> bool:
    sizes = sorted(
        min(size, window.begin - begin) if begin < window.begin else size
        for begin, size in holes
        if begin < window.begin or begin >= window.end
    )
    for _, nbytes in window.blocks:
        index = bisect_left(sizes, nbytes)
        if index == len(sizes):
            return False
        rest_bytes = sizes.pop(index) - nbytes
        if rest_bytes:
            insort(sizes, rest_bytes)
    return True


def _evacuate(window: Window, memory: Memory) -> tuple[int, bool]:
    """(bytes copied, whether the window is one hole now)."""
    plugs: list[int] = []
    moved_bytes = 0
    try:
        for begin, nbytes in window.blocks:
            hole = memory.holes.best_fit(nbytes)
            while hole is not None and _reaches_into(hole, nbytes, window):
                if hole[1] > memory.spare_bytes:
                    return moved_bytes, False
                plugs.append(memory.plug(hole[1]))
                hole = memory.holes.best_fit(nbytes)
            if hole is None or nbytes > memory.spare_bytes:
                return moved_bytes, False
            is_there = memory.move(begin)
            moved_bytes += nbytes
            if not is_there:
                return moved_bytes, False
        return moved_bytes, True
    finally:
        for begin in plugs:
            memory.unplug(begin)
