"""The account of the GPU's holes under random events, most of which nobody has told it of.

Whatever happens, training goes on: nothing is raised, no block of no storage is left behind, and a
storage has one block of its size.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tests.executor.allocator_chaos import ROWS, Chaos

from teraio.executor import storage_memory
from teraio.executor.gpu_memory import can_move
from teraio.executor.holding import Holding
from teraio.simulator.caching_allocator import LARGE_PAGE_BYTES as PAGE
from teraio.simulator.caching_allocator import MIB
from teraio.simulator.holes import Holes


def check(holes: Holes) -> None:
    """Its tables agree, and no two holes touch."""
    spans = list(holes)
    assert sorted((size, begin) for begin, size in spans) == holes._by_size
    assert {begin + size: begin for begin, size in spans} == holes._begin_of_end
    assert all(b + n < next_b for (b, n), (next_b, _) in itertools.pairwise(spans))


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_training_goes_on(seed: int) -> None:
    chaos = Chaos(seed, surprises=True)
    for _ in range(250):
        chaos.random.choice(chaos.events)()
        check(chaos.memory.holes)


def test_without_surprises_the_account_is_true() -> None:
    """And it is kept for most of the time, by few looks; some storages are moved."""
    num_known = moved_bytes = 0
    for seed in range(8):
        chaos = Chaos(seed, surprises=False)
        for _ in range(250):
            chaos.random.choice(chaos.events)()
            if chaos.memory._is_known and not chaos.books.dead:
                num_known += 1
                assert list(chaos.memory.holes) == chaos.allocator.holes()
        moved_bytes += chaos.books.traffic.relocated_bytes
    assert num_known > 100
    assert moved_bytes > 0


@pytest.fixture
def known() -> Chaos:
    """Blocks of 20 MiB that fill the budget, half of them gone: an account that is kept."""
    chaos = Chaos(0, surprises=False)
    chaos.may_move = [True] * ROWS
    chaos.random = Unchanging(20 * MIB)
    for _ in range(60):
        chaos.birth()
    assert chaos.memory._look()
    for holding in sorted(chaos.books.alive, key=lambda h: h.stamp)[::2]:
        die(chaos, holding)
    chaos.books.bury()
    chaos.allocator.num_looks = 0
    return chaos


class Unchanging:
    """Random numbers for births one by one, all of one size."""

    def __init__(self, size: int) -> None:
        self.size = size

    def choices(self, sizes: list[int], k: int) -> list[int]:
        return [self.size]

    def choice(self, counts: tuple[int, ...]) -> int:
        return counts[0]

    def randrange(self, begin: int, end: int) -> int:
        return 0


def die(chaos: Chaos, holding: Holding) -> None:
    holding.is_dead = True
    chaos.allocator.free(chaos.allocator.address_of.pop(id(chaos.storages[holding])))
    chaos.books.dead.append(holding)


def test_what_moves_is_waited_for(known: Chaos) -> None:
    """By other streams, as for a transfer that has brought it."""
    known.prepare(40 * MIB)
    moved = [h for h in known.books.alive if h.arrived is not None]
    assert moved
    assert all(str(h.arrived).startswith("copy") for h in moved)


def test_the_place_of_what_has_just_died(known: Chaos) -> None:
    """Is free, though nobody has been told of the death: a birth there needs no look."""
    known.may_move = [False] * ROWS
    known.random = Unchanging(60 * MIB)
    holding = min(known.books.alive, key=lambda h: h.stamp)
    place = holding.address
    die(known, holding)
    known.birth()
    assert any(h.address < place < h.address + h.allocated_bytes for h in known.books.alive)
    assert known.memory._is_known
    assert known.allocator.num_looks == 0


def test_what_has_died_since_it_was_listed_does_not_move(known: Chaos) -> None:
    """Garbage may be collected at any moment."""
    one, other = sorted(known.books.alive, key=lambda h: h.stamp)[:2]
    places = [one.address, other.address]
    die(known, one)
    known.books.bury()
    other.is_dead = True
    assert [known.memory.move(place) for place in places] == [False, False]


def test_a_place_that_is_free_already(known: Chaos) -> None:
    """Does not become free twice: the account is wrong, so it is given up."""
    holding = min(known.books.alive, key=lambda h: h.stamp)
    assert known.memory.holes.put_back(holding.address, holding.allocated_bytes)
    known.memory.forget(holding)
    assert not known.memory._is_known


def test_the_hole_at_the_end_of_the_pages(known: Chaos) -> None:
    """Is known as such: it could grow, so PyTorch takes it last."""
    assert known.memory.holes.growth == known.allocator.growth() != {}


def test_memory_of_another_stream(known: Chaos) -> None:
    """Is none of the pool that account is kept of."""
    holding = min(known.books.alive, key=lambda h: h.stamp)
    known.memory.forget(holding)
    known.allocator.address_of[id(known.storages[holding])] = 10**6 * PAGE
    known.allocator.stream_is_ours = False
    known.memory.note(holding)
    assert known.memory._is_known
    known.allocator.stream_is_ours = True
    known.memory.note(holding)
    assert not known.memory._is_known


def test_used_on_another_stream(known: Chaos) -> None:
    """It stays; its place is not counted as free when it dies, until the next look."""
    one, other, third = sorted(known.books.alive, key=lambda h: h.stamp)[:3]
    known.memory.note_uses([one], ("tensor", torch.Stream("cpu")))
    known.memory.note_uses([third], ("tensor", 1))
    known.allocator.stream_is_ours = False
    known.memory.note_uses([other])
    known.allocator.stream_is_ours = True
    assert [can_move(h) for h in (one, other, third)] == [False, False, True]
    assert not other.is_fixed
    place, free_bytes = one.address, sum(n for _, n in known.memory.holes)
    die(known, one)
    known.books.bury()
    assert sum(n for _, n in known.memory.holes) == free_bytes
    assert place in known.memory._others
    known.memory.end_iteration()
    assert not known.memory._is_known


def test_what_fails_again_and_again_is_given_up(known: Chaos) -> None:
    """Until the next iteration: looking for room costs time at each kernel."""
    known.may_move = [False] * ROWS
    for _ in range(200):
        known.memory.prepare((50 * MIB,), known.may_move)
    failed = known.books.traffic.homeless_requests
    assert 0 < failed < 100
    known.memory.end_iteration()
    known.memory.prepare((50 * MIB,), known.may_move)
    assert known.books.traffic.homeless_requests == failed + 1


def test_all_streams_that_use_a_storage_are_waited_for(
    known: Chaos, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is noticed later does not replace one that is known already."""
    recorded: list[Any] = []

    class Bytes:
        def record_stream(self, stream: Any) -> None:
            recorded.append(stream)

    monkeypatch.setattr(storage_memory, "bytes_of", lambda storage: Bytes())
    monkeypatch.setattr(storage_memory, "original_resize", lambda storage, nbytes: None)
    holding = min(known.books.alive, key=lambda h: h.stamp)
    compute: Any = "compute"
    holding.shared_with = frozenset([compute])
    known.allocator.stream_is_ours = False
    known.memory.note_uses([holding])
    known.allocator.stream_is_ours = True
    known.memory.give_back(holding, known.storages[holding])
    assert sorted(recorded) == ["another", "compute"]
    assert not holding.shared_with


def test_what_a_graph_has_captured_stays(known: Chaos) -> None:
    """For good: the graph is replayed with the addresses of its capture."""
    one, other = sorted(known.books.alive, key=lambda h: h.stamp)[:2]
    known.allocator.stream_is_ours, known.allocator.is_captured = False, True
    known.memory.note_uses([one])
    known.allocator.stream_is_ours, known.allocator.is_captured = True, False
    assert one.is_fixed
    assert not one.can_leave
    assert not other.is_fixed


def test_runs_that_never_follow_their_plan_look_seldom(known: Chaos) -> None:
    """Each such iteration begins anew."""
    for _ in range(100):
        known.memory.end_iteration()
        known.memory.begin()
    assert known.memory._looks_left <= 100


def test_what_is_taken_again_is_given_back_ever_more_seldom(
    known: Chaos, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 4 iterations, 8 more, 16 more...: 5 times in 100, not 100 times."""
    trims: list[int] = []
    ended: list[int] = []
    monkeypatch.setattr(known.allocator, "books", lambda: (0, 10**15))
    monkeypatch.setattr(known.allocator, "trim", lambda: trims.append(len(ended)))
    while len(ended) < 100:
        known.memory.end_iteration()
        known.memory.begin()
        ended.append(1)
    assert trims == [0, 4, 12, 28, 60]
