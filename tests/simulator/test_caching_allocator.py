"""The allocator's model: hand-drawn layouts, and what a plan makes it reserve."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

from teraio.simulator.caching_allocator import MIB, Block, CachingAllocator
from teraio.simulator.reserved_memory import predict_reserved_memory

PAGE = 20 * MIB


def test_a_hole_of_the_right_size_is_used_again() -> None:
    """Best fit: 30 goes into the hole of 30, not into the larger one before it."""
    allocator = CachingAllocator()
    sizes = (50, 10, 30, 10)
    large, _, small, _ = (allocator.allocate(n * MIB) for n in sizes)
    assert allocator.reserved_bytes == 100 * MIB
    allocator.free(large)
    allocator.free(small)
    again = allocator.allocate(30 * MIB)
    assert (again.address, allocator.reserved_bytes) == (60 * MIB, 100 * MIB)


def test_holes_that_are_not_neighbours_do_not_make_one() -> None:
    """|a|b|c| without a and c: 100 MiB are free, but nothing of 60 fits; pages come behind."""
    allocator = CachingAllocator()
    a, _, c = (allocator.allocate(n * MIB) for n in (50, 10, 50))
    # 110 MiB in use, in 6 pages: 10 MiB are left at the end.
    allocator.free(a)
    allocator.free(c)
    # The hole at the end is now 60 MiB: c and what was left.
    assert allocator.allocate(60 * MIB).address == 60 * MIB
    assert allocator.allocate(60 * MIB).address == 120 * MIB
    assert allocator.reserved_bytes == 9 * PAGE
    # 50 (a's hole) + 10 (b) + 60 + 60.
    assert allocator.allocated_bytes == 130 * MIB


def test_neighbours_merge() -> None:
    """Three holes side by side hold one block of their sum."""
    allocator = CachingAllocator()
    blocks = [allocator.allocate(20 * MIB) for _ in range(3)]
    for block in (blocks[1], blocks[0], blocks[2]):
        allocator.free(block)
    assert allocator.allocate(60 * MIB).address == 0
    assert allocator.reserved_bytes == allocator.reserved_peak_bytes == 3 * PAGE


def test_small_requests_have_pages_of_their_own() -> None:
    """Up to 1 MiB from a pool of 2 MiB pages; blocks are multiples of 512 bytes."""
    allocator = CachingAllocator()
    block = allocator.allocate(1)
    assert (block.nbytes, allocator.reserved_bytes) == (512, 2 * MIB)
    allocator.allocate(MIB + 1)
    assert allocator.reserved_bytes == 2 * MIB + PAGE


def test_blocks_never_overlap() -> None:
    """Random requests: blocks in use are disjoint and inside what is mapped."""
    generator = random.Random(0)
    allocator = CachingAllocator()
    blocks: list[Block] = []
    for _ in range(2000):
        if blocks and generator.random() < 0.5:
            allocator.free(blocks.pop(generator.randrange(len(blocks))))
        else:
            blocks.append(allocator.allocate(generator.randrange(1, 60 * MIB)))
        spans = sorted((b.is_small, b.address, b.address + b.nbytes) for b in blocks)
        assert all(
            one[2] <= other[1] or one[0] != other[0] for one, other in itertools.pairwise(spans)
        )
    assert allocator.allocated_bytes == sum(b.nbytes for b in blocks) <= allocator.reserved_bytes
    for block in blocks:
        allocator.free(block)
    assert allocator.allocated_bytes == 0


def test_what_a_plan_reserves(case: Callable[..., Any]) -> None:
    """x leaves, y and z take parts of its place, and x comes back to the end of the segment."""
    c = case().storage("x", 100 * MIB).storage("y", 60 * MIB, birth=1, death=3)
    c.storage("z", 60 * MIB, birth=2, death=4)
    c.kernel("x").kernel(writes=["y"]).kernel(writes=["z"]).kernel("y").kernel("x", "z")
    plain = predict_reserved_memory(c.plan)
    assert plain.allocated_bytes == plain.reserved_bytes == 220 * MIB
    c.move("x", 0, 4, offload=0, free=1, prefetch=4, device="host")
    # Kernels 1 to 3 hold y and z, kernel 4 x and z: y's hole of 60 is too small for x.
    # |y........|z........|            behind x's hole of 100, which y has taken a part of:
    # 0        60   100  120           z maps one page more
    # kernel 4: y's 60 are free, z lies at 60: x maps what is missing behind z.
    planned = predict_reserved_memory(c.plan, iterations=1)
    assert planned.allocated_bytes == 160 * MIB
    assert planned.reserved_bytes == 220 * MIB
    assert planned.fragmentation == 220 / 160 - 1
