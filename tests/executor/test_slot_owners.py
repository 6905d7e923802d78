"""Disjoint ranges with owners."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from teraio.executor.slot_owners import SlotOwners


def test_overlaps_by_hand() -> None:
    """Ranges are half-open: touching is not overlapping."""
    owners: SlotOwners[str] = SlotOwners()
    owners.add(0, 10, "a")
    owners.add(20, 30, "b")
    assert owners.overlapping(10, 20) == []
    assert owners.overlapping(9, 21) == [(0, "a"), (20, "b")]
    owners.remove(0, "b")
    assert owners.overlapping(0, 1) == [(0, "a")]
    owners.remove(0, "a")
    assert owners.overlapping(0, 100) == [(20, "b")]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), max_size=20))
def test_overlaps_against_a_plain_search(ranges: list[tuple[int, int]]) -> None:
    """Whatever is added where there is room is found by every query that meets it."""
    owners: SlotOwners[int] = SlotOwners()
    placed: list[tuple[int, int, int]] = []
    for owner, (begin, length) in enumerate(ranges):
        end = begin + length
        expected = sorted((b, o) for b, e, o in placed if b < end and begin < e)
        assert owners.overlapping(begin, end) == expected
        if not expected:
            owners.add(begin, end, owner)
            placed.append((begin, end, owner))
