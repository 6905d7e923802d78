"""Room in fragmented memory: hand-drawn layouts, random ones, and what a plan then reserves."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from teraio.simulator.blocks import Blocks
from teraio.simulator.caching_allocator import MIB, Block, CachingAllocator
from teraio.simulator.compaction import Compacted, prepare, relocatable_rows
from teraio.simulator.holes import Holes
from teraio.simulator.reserved_memory import predict_reserved_memory


class Drawn:
    """Blocks of an allocator by number; those in ``stays`` cannot move. Nothing may be added."""

    def __init__(self, spare_bytes: int = 1000 * MIB) -> None:
        self.allocator = CachingAllocator()
        self.by_number: dict[int, Block] = {}
        self.stays: set[int] = set()
        self.plugs: dict[int, Block] = {}
        self.budget_bytes = spare_bytes
        self.most_bytes = 0

    def draw(self, *sizes: int) -> None:
        for size in sizes:
            self.by_number[len(self.by_number)] = self.allocator.allocate(size * MIB)

    def erase(self, *numbers: int) -> None:
        for number in numbers:
            self.allocator.free(self.by_number.pop(number))

    def limit(self, spare: int) -> None:
        self.budget_bytes = self.allocator.allocated_bytes + spare * MIB
        self.most_bytes = self.allocator.allocated_bytes

    @property
    def holes(self) -> Holes:
        return self.allocator.large.holes

    @property
    def spare_bytes(self) -> int:
        return self.budget_bytes - self.allocator.allocated_bytes

    def would_exceed(self, nbytes: int) -> bool:
        return self.allocator.large.missing_bytes(nbytes) > 0

    @property
    def blocks(self) -> Blocks:
        blocks = Blocks()
        for block in self.by_number.values():
            blocks.add(block.address, block.nbytes)
        return blocks

    def can_move(self, begin: int) -> bool:
        return self.number_at(begin) not in self.stays

    def number_at(self, begin: int) -> int:
        return next(n for n, block in self.by_number.items() if block.address == begin)

    def plug(self, nbytes: int) -> int:
        block = self.allocator.allocate(nbytes)
        self.most_bytes = max(self.most_bytes, self.allocator.allocated_bytes)
        self.plugs[block.address] = block
        return block.address

    def unplug(self, begin: int) -> None:
        self.allocator.free(self.plugs.pop(begin))

    def move(self, begin: int) -> bool:
        owner = self.number_at(begin)
        assert owner not in self.stays
        old = self.by_number[owner]
        self.by_number[owner] = self.allocator.allocate(old.nbytes)
        self.most_bytes = max(self.most_bytes, self.allocator.allocated_bytes)
        self.allocator.free(old)
        return True

    def addresses(self) -> list[int]:
        return [block.address // MIB for block in self.by_number.values()]


def test_one_block_moves_and_two_holes_are_one() -> None:
    """|50 free|b 10|50 free|c 20|30 free|: 80 fit once b lies at the beginning; the hole at the end
    is smaller, but could grow.
    """
    memory = Drawn()
    memory.draw(50, 10, 50, 20, 30)
    memory.erase(0, 2, 4)
    memory.limit(spare=110)
    assert prepare([80 * MIB], memory) == Compacted(10 * MIB, 0)
    assert memory.addresses() == [0, 110]
    assert memory.allocator.allocate(80 * MIB).address == 10 * MIB
    assert memory.allocator.reserved_bytes == 160 * MIB


def test_the_cheapest_block_moves() -> None:
    """Either neighbour of the hole in the middle would do; the smaller one is copied."""
    memory = Drawn()
    memory.draw(30, 40, 30, 20, 40, 60)
    # |30 free|40|30 free|20|40 free|60 free: pages end at 220.
    memory.erase(0, 2, 4)
    memory.stays = {5}
    memory.limit(spare=100)
    assert prepare([70 * MIB], memory).moved_bytes == 20 * MIB


def test_what_stays_is_in_the_way() -> None:
    """Free bytes enough, none of them beside each other, nothing may move: no room, no move."""
    memory = Drawn()
    memory.draw(50, 10, 50, 20, 30)
    memory.erase(0, 2, 4)
    memory.stays = {1, 3}
    memory.limit(spare=110)
    assert prepare([80 * MIB], memory) == Compacted(0, 1)
    assert memory.addresses() == [50, 110]


def test_room_is_made_where_there_was_none() -> None:
    """|30 free|2|30 free|2|20|20|36: what is beside both holes stays, so two others move."""
    memory = Drawn()
    memory.draw(30, 2, 30, 2, 20, 20, 36)
    memory.erase(0, 2)
    memory.stays = {1, 3, 6}
    memory.limit(spare=60)
    assert prepare([40 * MIB], memory) == Compacted(40 * MIB, 0)
    assert memory.allocator.allocate(40 * MIB).address == 64 * MIB


def test_blocks_by_both_ends() -> None:
    """What lies before an address, and behind it."""
    blocks = Blocks()
    blocks.add(10, 5)
    blocks.add(15, 2)
    assert (blocks.beginning_at(10), blocks.beginning_at(12), blocks.beginning_at(15)) == (5, 0, 2)
    assert (blocks.ending_at(15), blocks.ending_at(17), blocks.ending_at(10)) == (5, 2, 0)
    blocks.remove(10)
    assert (blocks.beginning_at(10), blocks.ending_at(15), list(blocks)) == (0, 0, [(15, 2)])


def test_a_block_is_kept_from_the_hole_that_is_made() -> None:
    """b's best fit would be the hole of 12 beside it; a plug sends it elsewhere."""
    memory = Drawn()
    memory.draw(12, 10, 50, 20, 30)
    memory.erase(0, 2, 4)
    memory.limit(spare=72)
    assert prepare([70 * MIB], memory) == Compacted(10 * MIB, 0)
    assert memory.addresses() == [92, 72]
    assert memory.holes.largest_bytes == 72 * MIB
    assert memory.plugs == {}


def test_no_more_than_the_budget_is_in_use_meanwhile() -> None:
    """A block that moves needs its size once more; without that much to spare it does not move."""
    memory = Drawn()
    memory.draw(50, 10, 50, 20, 30)
    memory.erase(0, 2, 4)
    memory.limit(spare=9)
    assert prepare([80 * MIB], memory) == Compacted(0, 1)
    memory.limit(spare=10)
    assert prepare([80 * MIB], memory) == Compacted(10 * MIB, 0)


def test_several_requests_find_holes_of_their_own() -> None:
    """The hole that is made for the second is not made of the first one's."""
    memory = Drawn()
    memory.draw(60, 10, 30, 10, 30, 20, 20)
    memory.erase(0, 2, 4, 6)
    memory.limit(spare=140)
    assert prepare([60 * MIB, 60 * MIB], memory).num_failed == 0
    reserved_bytes = memory.allocator.reserved_bytes
    memory.draw(60, 60)
    assert memory.allocator.reserved_bytes == reserved_bytes


def random_layout(seed: int) -> tuple[Drawn, list[int]]:
    """A third of the memory is free, in pieces; a few blocks cannot move. And requests in bytes."""
    generator = random.Random(seed)
    memory = Drawn()
    memory.draw(*(generator.choice((2, 3, 5, 8, 13, 20)) for _ in range(120)))
    memory.erase(*generator.sample(range(120), 40))
    memory.stays = set(generator.sample(sorted(memory.by_number), 6))
    memory.limit(spare=generator.choice((70, 150)))
    requests = [generator.choice((40, 60)) * MIB for _ in range(generator.choice((1, 1, 2)))]
    while sum(requests) > memory.spare_bytes:
        requests.pop()
    return memory, requests


@pytest.mark.parametrize("seed", range(60))
def test_random_layouts(seed: int) -> None:
    """Requests that it says will fit do; nothing grows, nothing that stays moves, no budget breaks,
    and as many bytes are in use as before.
    """
    memory, requests = random_layout(seed)
    before = dict(memory.by_number)
    in_use, reserved_bytes = memory.allocator.allocated_bytes, memory.allocator.reserved_bytes
    done = prepare(requests, memory)
    assert memory.allocator.allocated_bytes == in_use
    assert memory.most_bytes <= memory.budget_bytes
    assert all(memory.by_number[n] is before[n] for n in memory.stays)
    moved = [n for n, block in memory.by_number.items() if block is not before[n]]
    assert done.moved_bytes >= sum(before[n].nbytes for n in moved)
    spans = sorted((begin, begin + nbytes) for begin, nbytes in memory.blocks)
    assert memory.plugs == {}
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
    if not done.num_failed:
        for nbytes in requests:
            memory.allocator.allocate(nbytes)
        assert memory.allocator.reserved_bytes == reserved_bytes


def test_random_layouts_are_worth_trying() -> None:
    """Of the layouts above most have no hole to begin with, and one can be made."""
    done = [prepare(requests, memory) for memory, requests in map(random_layout, range(60))]
    assert sum(one.moved_bytes > 0 and not one.num_failed for one in done) > 30


def test_holes_by_address() -> None:
    """A range is cut out of the hole that holds all of it, or not at all."""
    holes = Holes()
    holes.put_back(100, 50)
    assert not holes.take_at(90, 20)
    assert not holes.take_at(140, 20)
    assert not Holes().take_at(0, 1)
    assert holes.take_at(110, 20)
    assert list(holes) == [(100, 10), (130, 20)]
    holes.put_back(110, 20)
    assert list(holes) == [(100, 50)]
    assert (len(holes), holes.largest_bytes, holes.ending_at(150)) == (1, 50, 50)


def test_nothing_is_free_twice() -> None:
    """A range that overlaps a hole is refused, and nothing has changed."""
    holes = Holes()
    assert holes.put_back(10, 10)
    assert holes.put_back(30, 10)
    for begin, nbytes in ((10, 10), (5, 10), (15, 2), (15, 10), (5, 50), (35, 10), (20, 0)):
        assert not holes.put_back(begin, nbytes), (begin, nbytes)
    assert list(holes) == [(10, 10), (30, 10)]
    assert holes.put_back(20, 10)
    assert list(holes) == [(10, 30)]


@pytest.fixture
def crowded(case: Callable[..., Any]) -> Callable[[int], Any]:
    """Plans that fill the budget: storages of many sizes leave, others are born in their place."""

    def make(seed: int) -> Any:
        generator = random.Random(seed)
        c = case(gpu_bytes=900 * MIB)
        names = [f"state {i}" for i in range(24)]
        for name in names:
            c.storage(name, generator.choice((12, 36, 72, 96)) * MIB)
        for i in range(24):
            c.storage(f"made {i}", generator.choice((24, 36, 64)) * MIB, birth=i, death=i + 8)
        for i in range(24):
            c.kernel(names[i], writes=[f"made {i}"])
        for _ in range(24):
            c.kernel()
        for i, name in enumerate(names):
            if generator.random() < 0.8:
                c.move(name, i, i, offload=i, free=i + 1, prefetch=i + 24, device="host")
        return c

    return make


def test_a_plan_reserves_less_where_storages_are_kept_together(
    crowded: Callable[[int], Any],
) -> None:
    """What is allocated is the same, and much of what was reserved besides is not."""
    apart_bytes = together_bytes = 0
    for seed in range(40):
        c = crowded(seed)
        allocated_bytes = predict_reserved_memory(c.plan, keeps_together=False).allocated_bytes
        c.gpu_bytes = allocated_bytes
        apart = predict_reserved_memory(c.plan, keeps_together=False)
        together = predict_reserved_memory(c.plan)
        assert together.allocated_bytes == apart.allocated_bytes == allocated_bytes
        assert apart.moved_bytes == 0
        apart_bytes += apart.reserved_bytes - allocated_bytes
        together_bytes += together.reserved_bytes - allocated_bytes
    assert together_bytes < 0.85 * apart_bytes


def test_only_kinds_that_the_plan_offloads_may_move(crowded: Callable[[int], Any]) -> None:
    """And what the iteration makes; a buffer to which somebody keeps a pointer stays."""
    plan = crowded(0).plan
    kinds = np.array(plan.storages.kind, dtype=object)
    kinds[np.setdiff1d(np.arange(len(kinds)), plan.moves.storage)] = "buffer"
    rows = relocatable_rows(replace(plan, storages=replace(plan.storages, kind=kinds)))
    moved = set(plan.moves.storage.tolist())
    expected = [row in moved or birth >= 0 for row, birth in enumerate(plan.storages.birth)]
    assert rows == expected
    assert not all(rows)
