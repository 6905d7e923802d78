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

RESERVED_SHARE = 1.02
"""Of the budget: what is reserved may grow that far before blocks are moved instead."""

_ATTEMPTS = 3

_WINDOWS = 100
"""Looked at closely for one request, some 50 us each; if one will do it is among the first."""

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
        """Allocate the owner's block anew, in new pages if no hole fits, copy it and free the old
        one; False if it did not come to lie where that was to be expected.
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
    movable = [block for block in memory.blocks() if block.owner is not None]
    # First where most becomes of little: large holes on both sides of a small block.
    movable.sort(key=lambda b: -min(holes.ending_at(b.begin), _hole_behind(b, holes)) / b.nbytes)
    for block in movable:
        before_bytes, behind_bytes = holes.ending_at(block.begin), _hole_behind(block, holes)
        range_bytes = before_bytes + block.nbytes + behind_bytes
        if not before_bytes or not behind_bytes or range_bytes < at_least_bytes:
            continue
        begin = block.begin - before_bytes
        hole = holes.best_fit(block.nbytes)
        if hole is None or _reaches_into(hole, block, Window(begin, begin + range_bytes, [])):
            continue
        if block.nbytes > memory.spare_bytes or block.owner is None:
            continue
        moved_bytes += block.nbytes
        if not memory.move(block.owner):
            return moved_bytes, False
    return moved_bytes, True


def _hole_behind(block: Occupied, holes: Holes) -> int:
    return holes.beginning_at(block.begin + block.nbytes)


def _reaches_into(hole: tuple[int, int], block: Occupied, window: Window) -> bool:
    """Whether the block would come to lie in the window, in a hole that may begin before it."""
    return hole[0] < window.end and hole[0] + block.nbytes > window.begin


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
    most_bytes = min(memory.holes.largest_bytes, memory.spare_bytes)
    num_tried = 0
    for window in _windows(nbytes, memory.holes, memory.blocks()):
        # Most fail by their largest block, which is found at once.
        if window.blocks and window.blocks[0].nbytes > most_bytes:
            continue
        num_tried += 1
        if _fits_elsewhere(window, memory.holes):
            copied_bytes, is_empty = _evacuate(window, memory)
            if is_empty or copied_bytes:
                # Half way, what the other windows were made of has moved too.
                return copied_bytes, is_empty
        if num_tried == _WINDOWS:
            break
    return 0, False


def _grow_well(nbytes: int, memory: Memory) -> int:
    """New pages must come. They take a block from between two holes, if that makes the room and
    takes no more pages than the request: two holes less in the way of others. The bytes copied.
    """
    holes = memory.holes
    best: tuple[int, Occupied] | None = None
    for block in memory.blocks():
        if block.owner is not None and block.nbytes <= min(nbytes, memory.spare_bytes):
            free_bytes = holes.ending_at(block.begin) + _hole_behind(block, holes)
            is_enough = free_bytes + block.nbytes >= nbytes
            if is_enough and (best is None or free_bytes > best[0]):
                best = free_bytes, block
    if best is None or best[1].owner is None:
        return 0
    memory.move(best[1].owner)
    return best[1].nbytes


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
    return (_window(items[first : last + 1], nbytes) for _, first, last in windows)


def _window(items: list[Occupied], nbytes: int) -> Window:
    blocks = [item for item in items if item.owner != _HOLE]
    blocks.sort(key=lambda block: -block.nbytes)
    end = items[-1].begin + items[-1].nbytes
    # What is left of a hole at the beginning is a place for blocks; they come to lie at its start.
    begin = end - nbytes if items[0].owner == _HOLE else items[0].begin
    return Window(begin, end, blocks)


def _fits_elsewhere(window: Window, holes: Holes) -> bool:
    sizes = sorted(
        min(size, window.begin - begin) if begin < window.begin else size
        for begin, size in holes
        if begin < window.begin or begin >= window.end
    )
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
            while hole is not None and _reaches_into(hole, block, window):
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
