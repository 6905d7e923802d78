"""Packing of slots: disjoint in time and space on a cycle, and tight where that is possible."""

from __future__ import annotations

import random

import numpy as np
import pytest

from teraio.planner.slot_packing import align_up, pack_by_time, pack_slots


def taken_kernels(first: int, end: int, num_kernels: int) -> set[int]:
    return {kernel % num_kernels for kernel in range(first, min(end, first + num_kernels))}


def peak_bytes(first: list[int], end: list[int], size: list[int], num_kernels: int) -> int:
    taken = [taken_kernels(f, e, num_kernels) for f, e in zip(first, end, strict=True)]
    return max(
        sum(s for s, t in zip(size, taken, strict=True) if k in t) for k in range(num_kernels)
    )


@pytest.mark.parametrize("seed", range(200))
def test_slots_that_meet_in_time_are_disjoint(seed: int) -> None:
    """Random slots, wrapping and permanent ones among them, checked pair by pair."""
    chance = random.Random(seed)
    num_kernels = chance.randint(2, 15)
    count = chance.randint(1, 14)
    first = [chance.randrange(2 * num_kernels) for _ in range(count)]
    end = [f + chance.randint(1, num_kernels) for f in first]
    size = [chance.randint(1, 9) for _ in range(count)]
    offset = pack_slots(np.array(first), np.array(end), np.array(size), num_kernels).tolist()
    for i in range(count):
        for j in range(i):
            if taken_kernels(first[i], end[i], num_kernels) & taken_kernels(
                first[j], end[j], num_kernels
            ):
                assert offset[i] + size[i] <= offset[j] or offset[j] + size[j] <= offset[i]
    arena_bytes = max(o + s for o, s in zip(offset, size, strict=True))
    assert peak_bytes(first, end, size, num_kernels) <= arena_bytes <= sum(size)


def test_bytes_are_used_again_as_soon_as_they_are_given_back() -> None:
    """Optimum 10: [0, 3), [3, 6) and [6, 10) of one size follow each other on the same bytes."""
    offset = pack_slots(np.array([0, 3, 6]), np.array([3, 6, 10]), np.array([10, 10, 10]), 10)
    assert offset.tolist() == [0, 0, 0]


def test_wrapping_slot_keeps_its_place_from_both_sides_of_the_cut() -> None:
    """A is taken in 8, 9, 0 and 1, B in 1..8: they meet, so the arena is 12, whatever the cut."""
    offset = pack_slots(np.array([8, 1]), np.array([12, 9]), np.array([5, 7]), 10)
    assert sorted([(offset[0], offset[0] + 5), (offset[1], offset[1] + 7)]) in (
        [(0, 5), (5, 12)],
        [(0, 7), (7, 12)],
    )


def test_no_slots_need_no_bytes() -> None:
    """An empty plan packs to an empty array."""
    empty = np.empty(0, dtype=np.int64)
    assert len(pack_slots(empty, empty, empty, 5)) == 0


def test_alignment_rounds_up() -> None:
    """0, 1, 512 and 513 bytes in blocks of 512."""
    assert align_up(np.array([0, 1, 512, 513]), 512).tolist() == [0, 512, 512, 1024]


@pytest.mark.parametrize("seed", range(50))
def test_slots_that_do_not_wrap_go_to_the_lowest_free_bytes(seed: int) -> None:
    """By definition: in order of first kernel, larger ones first, below all that is in the way.

    Nothing is taken over kernel 0, so that the cycle is cut there. Some slots hold no bytes.
    """
    chance = random.Random(seed)
    num_kernels, count = 30, chance.randint(1, 60)
    first = [chance.randrange(1, num_kernels - 1) for _ in range(count)]
    end = [chance.randint(f + 1, num_kernels) for f in first]
    size = [chance.choice([0, 1, 2, 3, 5, 8]) for _ in range(count)]
    length = np.array(end) - np.array(first)
    offset = pack_by_time(np.array(first), length, np.array(size), num_kernels).tolist()
    placed: list[int] = []
    for slot in sorted(range(count), key=lambda i: (first[i], -size[i], i)):
        lowest = 0
        for other in sorted(placed, key=lambda i: offset[i]):
            if end[other] > first[slot] and size[other] and offset[other] < lowest + size[slot]:
                lowest = max(lowest, offset[other] + size[other])
        assert offset[slot] == (lowest if size[slot] else 0)
        placed.append(slot)


def test_large_slots_find_room_that_a_small_one_would_take_before_them() -> None:
    """In kernels 7 and 8, 8 B are taken. In order of time 1 B lies at the bottom until kernel 6, so
    that what comes at 5 lies above it, and its hole is too small for what comes at 7.
    """
    first, size = np.array([1, 5, 7, 7]), np.array([1, 3, 3, 2])
    length = np.array([5, 4, 2, 2])
    offset = pack_slots(first, first + length, size, 10)
    assert (offset + size).max() == 8
    assert (pack_by_time(first, length, size, 10) + size).max() == 9


@pytest.mark.parametrize("seed", range(50))
def test_packing_is_never_looser_than_in_order_of_time(seed: int) -> None:
    """Slots of few sizes, as models have them."""
    chance = random.Random(seed)
    count, num_kernels = 40, 50
    first = np.array([chance.randrange(num_kernels) for _ in range(count)])
    length = np.array([chance.randint(1, num_kernels) for _ in range(count)])
    size = np.array([chance.choice([2, 7, 20]) for _ in range(count)])
    tight = pack_slots(first, first + length, size, num_kernels)
    in_time = pack_by_time(first, length, size, num_kernels)
    assert (tight + size).max() <= (in_time + size).max()
