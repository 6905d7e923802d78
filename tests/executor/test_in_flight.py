"""Transfers under way are found by the bytes that they touch."""

from __future__ import annotations

import random
from dataclasses import dataclass

from teraio.executor.stores.in_flight import InFlight


@dataclass(eq=False)
class Item:
    """Bytes of a transfer."""

    offset_bytes: int
    nbytes: int


def test_against_looking_at_all() -> None:
    """Random ranges come and go; the same are found as by trying every one."""
    generator = random.Random(0)
    in_flight: InFlight[Item] = InFlight()
    alive: list[Item] = []
    for _ in range(3000):
        if alive and generator.random() < 0.45:
            item = alive.pop(generator.randrange(len(alive)))
            in_flight.remove(item)
        else:
            item = Item(generator.randrange(1000), generator.choice([0, 1, 7, 50, 300]))
            alive.append(item)
            in_flight.add(item)
        begin, size = generator.randrange(1000), generator.choice([1, 10, 200])
        expected = {
            id(x)
            for x in alive
            if x.offset_bytes < begin + size and x.offset_bytes + x.nbytes > begin
        }
        assert {id(x) for x in in_flight.overlapping(begin, size)} == expected
        assert len(in_flight) == len(alive)


def test_two_transfers_of_the_same_bytes() -> None:
    """The read of a slot and the write that follows it are two entries."""
    in_flight: InFlight[Item] = InFlight()
    first, second = Item(0, 10), Item(0, 10)
    in_flight.add(first)
    in_flight.add(second)
    in_flight.remove(first)
    assert list(in_flight.overlapping(5, 1)) == [second]
