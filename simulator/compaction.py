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
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from teraio.contracts.plan import Plan
from teraio.contracts.table import MISSING
from teraio.simulator.holes import Holes

RESERVED_SHARE = 1.03
"""Of the budget: what is reserved may grow that far before blocks are moved instead."""

_HOLE = -1
"""In the place of an owner."""


class Occupied(NamedTuple):
    """A block in use; ``owner`` is None if it must stay where it is."""

    begin: int
    nbytes: int
    owner: int | None


class Window(NamedTuple):
    """A range that can become one hole: the blocks in it move, the largest first."""

    begin: int
    end: int
    blocks: list[Occupied]

    @property
    def moved_bytes(self) -> int:
        """What has to be copied."""
        return sum(block.nbytes for block in self.blocks)


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

    def blocks(self) -> Iterable[Occupied]:
        """All blocks in use."""
        ...

    def plug(self, nbytes: int) -> int:
        """Allocate a block that nobody uses: its address."""
        ...

    def unplug(self, begin: int) -> None:
        """Free it again."""
        ...

    def move(self, owner: int) -> bool:
        """Allocate the owner's block anew, copy it, free the old one; False if it did not come to
        lie in the best fit.
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
    if memory.holes.largest_bytes >= sum(requests) or _all_fit(requests, memory.holes):
        return Compacted(0, 0)
    plugs: list[int] = []
    moved_bytes = num_failed = 0
    try:
        for nbytes in requests:
            if memory.holes.largest_bytes < nbytes and memory.would_exceed(nbytes):
                copied_bytes = _make_hole(nbytes, memory)
                if copied_bytes is None:
                    num_failed += 1
                    continue
                moved_bytes += copied_bytes
            if len(requests) > 1:
                # In its place while room is made for the others.
                plugs.append(memory.plug(nbytes))
    finally:
        for begin in plugs:
            memory.unplug(begin)
    return Compacted(moved_bytes, num_failed)


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


def _make_hole(nbytes: int, memory: Memory) -> int | None:
    """Move blocks until a hole of ``nbytes`` exists: the bytes copied, None if that cannot be."""
    moved_bytes = 0
    largest_bytes = memory.holes.largest_bytes
    for window in _windows(nbytes, memory.holes, memory.blocks()):
        # Most fail by their largest block, which is found at once.
        fits = not window.blocks or window.blocks[0].nbytes <= largest_bytes
        if fits and _fits_elsewhere(window, memory.holes):
            copied_bytes, is_empty = _evacuate(window, memory)
            moved_bytes += copied_bytes
            if is_empty:
                return moved_bytes
            if copied_bytes:
                # What the other windows were made of has moved.
                break
    return None


def _windows(nbytes: int, holes: Holes, blocks: Iterable[Occupied]) -> Iterator[Window]:
    """Shortest ranges of holes and movable blocks that hold ``nbytes``, cheapest to empty first."""
    items = [*blocks, *(Occupied(begin, size, _HOLE) for begin, size in holes)]
    items.sort(key=lambda item: item.begin)
    windows: list[tuple[int, int, int]] = []
    first = total_bytes = moved_bytes = 0
    end = -1
    for last, (begin, size, owner) in enumerate(items):
        if owner is None or begin != end:
            # A block that stays, or a gap in the address space, ends every window before it.
            first, total_bytes, moved_bytes = last, 0, 0
        if owner is None:
            first, end = last + 1, -1
            continue
        end = begin + size
        total_bytes += size
        moved_bytes += size if owner != _HOLE else 0
        while total_bytes - items[first].nbytes >= nbytes:
            total_bytes -= items[first].nbytes
            moved_bytes -= items[first].nbytes if items[first].owner != _HOLE else 0
            first += 1
        if total_bytes >= nbytes:
            windows.append((moved_bytes, first, last))
    windows.sort()
    return (_window(items[first : last + 1]) for _, first, last in windows)


def _window(items: list[Occupied]) -> Window:
    blocks = [item for item in items if item.owner != _HOLE]
    blocks.sort(key=lambda block: -block.nbytes)
    return Window(items[0].begin, items[-1].begin + items[-1].nbytes, blocks)


def _fits_elsewhere(window: Window, holes: Holes) -> bool:
    sizes = sorted(size for begin, size in holes if not window.begin <= begin < window.end)
    for block in window.blocks:
        index = bisect_left(sizes, block.nbytes)
        if index == len(sizes):
            return False
        rest_bytes = sizes.pop(index) - block.nbytes
        if rest_bytes:
            insort(sizes, rest_bytes)
    return True


def _evacuate(window: Window, memory: Memory) -> tuple[int, bool]:
    """(bytes copied, whether the window is one hole now)."""
    plugs: list[int] = []
    moved_bytes = 0
    try:
        for block in window.blocks:
            hole = memory.holes.best_fit(block.nbytes)
            # A hole may begin before the window and reach into it.
            while hole and hole[0] < window.end and hole[0] + block.nbytes > window.begin:
                if hole[1] > memory.spare_bytes:
                    return moved_bytes, False
                plugs.append(memory.plug(hole[1]))
                hole = memory.holes.best_fit(block.nbytes)
            if hole is None or block.nbytes > memory.spare_bytes or block.owner is None:
                return moved_bytes, False
            is_there = memory.move(block.owner)
            moved_bytes += block.nbytes
            if not is_there:
                return moved_bytes, False
        return moved_bytes, True
    finally:
        for begin in plugs:
            memory.unplug(begin)
