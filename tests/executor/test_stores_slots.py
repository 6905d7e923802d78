"""The overflow area's allocator, against a map of bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teraio.errors import InputError
from teraio.executor.stores import SlotAllocator


def test_first_fit_at_the_alignment() -> None:
    """Slots begin at multiples of the alignment, at the lowest address that has room."""
    slots = SlotAllocator(100, 5 * 512 + 300, 512)
    assert [slots.allocate(n) for n in (1, 513, 512, 1)] == [512, 1024, 2048, None]
    slots.free(512)
    assert slots.allocate(513) is None
    assert slots.allocate(512) == 512


def test_neighbours_coalesce() -> None:
    """Freed in any order, the area is one piece again."""
    slots = SlotAllocator(0, 8 * 512, 512)
    offsets = [slots.allocate(512) for _ in range(8)]
    assert slots.free_bytes == 0
    for index in (1, 3, 2, 7, 0, 5, 6, 4):
        offset = offsets[index]
        assert offset is not None
        slots.free(offset)
    assert slots.largest_free_bytes == slots.free_bytes == 8 * 512


def test_extend_joins_the_end() -> None:
    """A grown area has room across its old border."""
    slots = SlotAllocator(0, 1024, 512)
    assert slots.allocate(512) == 0
    assert slots.allocate(1024) is None
    slots.extend(2048)
    assert slots.allocate(1536) == 512
    assert slots.end_bytes == 2048


def test_an_empty_area_has_no_room() -> None:
    """The whole budget may be planned."""
    slots = SlotAllocator(512, 512, 512)
    assert slots.allocate(1) is None
    assert slots.largest_free_bytes == 0


def test_freeing_what_is_not_a_slot() -> None:
    """Freed twice, or in the middle."""
    slots = SlotAllocator(0, 4096, 512)
    slots.allocate(1024)
    with pytest.raises(InputError, match="no slot begins at 512"):
        slots.free(512)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3000)), max_size=60))
def test_slots_never_overlap(steps: list[tuple[bool, int]]) -> None:
    """Any sequence of allocations and frees keeps slots apart and accounts for every byte."""
    slots, used, live = SlotAllocator(0, 16 * 512, 512), np.zeros(16, dtype=bool), {}
    for is_allocation, number in steps:
        if is_allocation:
            offset = slots.allocate(number)
            blocks = max(1, -(-number // 512))
            if offset is None:
                assert slots.largest_free_bytes < blocks * 512
                continue
            assert not used[offset // 512 :][:blocks].any()
            used[offset // 512 :][:blocks] = True
            live[offset] = blocks
        elif live:
            offset = sorted(live)[number % len(live)]
            slots.free(offset)
            used[offset // 512 :][: live.pop(offset)] = False
        assert slots.free_bytes == 512 * (~used).sum()
