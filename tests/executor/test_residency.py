"""The residency alone: failures, overtaken writes, eviction, and its books."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teraio.errors import CapacityError, StoreError
from teraio.executor.eviction_order import EvictionOrder
from teraio.executor.holding import Holding
from teraio.executor.residency import Residency
from teraio.executor.stores import HostStore
from teraio.executor.tiers import Slot, Tiers
from teraio.profiler.storages import StorageRegistry

KIB = 1024


class Gate:
    """Keeps every copy of a store from ending until it is opened, or makes it fail."""

    def __init__(self, store: HostStore) -> None:
        self._move = store._queues._move  # type: ignore[attr-defined]
        store._queues._move = self  # type: ignore[attr-defined]
        self.opened = threading.Event()
        self.opened.set()
        self.fails = False

    def __call__(self, transfer: Any, begin: int, end: int) -> None:
        assert self.opened.wait(30)
        if self.fails:
            raise StoreError("the device is gone")
        self._move(transfer, begin, end)


class Bench:
    """A residency of 64 KiB over a host store of 256 KiB, half of it planned."""

    def __init__(self) -> None:
        self.store = HostStore(256 * KIB)
        self.gate = Gate(self.store)
        self.tiers = Tiers({"host": self.store}, {"host": 128 * KIB})
        self.residency = Residency(self.tiers, 64 * KIB)
        self.registry = StorageRegistry("cpu", self.residency.note_death)
        self.born = 0

    def add(self, kib: int, value: int = 1) -> tuple[torch.Tensor, Holding]:
        tensor = torch.full((kib * KIB,), value, dtype=torch.uint8)
        state, _ = self.registry.find_or_add(tensor, lambda: (0, 0, 0), is_foreign=False)
        assert state is not None
        return tensor, self.residency.adopt(state)

    def slot(self, offset_kib: int, kib: int) -> Slot:
        return Slot(self.store, offset_kib * KIB, kib * KIB, is_overflow=False)

    def assert_books(self) -> None:
        self.residency.bury()
        held = 0
        for holding in self.residency.holdings():
            storage = holding.state.reference()
            assert storage is not None
            assert storage.nbytes() == (holding.state.nbytes if holding.is_resident else 0)
            held += storage.nbytes()
        assert self.residency.used_bytes == held


@pytest.fixture
def bench() -> Iterator[Bench]:
    """One bench, closed afterwards."""
    made = Bench()
    yield made
    made.gate.opened.set()
    made.gate.fails = False
    made.tiers.close()


def test_memory_waits_for_a_write_that_was_overtaken(bench: Bench) -> None:
    """Its bytes are of no use any more, but it still reads the memory that is to go."""
    tensor, holding = bench.add(16)
    bench.gate.opened.clear()
    bench.residency.offload(holding, bench.slot(0, 16))
    bench.residency.written(holding)
    tensor.fill_(2)
    bench.residency.offload(holding, bench.slot(32, 16))
    released = threading.Thread(target=bench.residency.release, args=(holding,))
    released.start()
    released.join(0.05)
    assert tensor.untyped_storage().nbytes() > 0
    bench.gate.opened.set()
    released.join(30)
    assert tensor.untyped_storage().nbytes() == 0
    bench.residency.require((holding,))
    assert bool((tensor == 2).all())
    bench.assert_books()


def test_a_failed_write_keeps_the_data_and_no_copy(bench: Bench) -> None:
    """Hazard S1: an error that says why; the next attempt writes again."""
    tensor, holding = bench.add(16, 7)
    bench.gate.fails = True
    bench.residency.offload(holding, bench.slot(0, 16))
    with pytest.raises(StoreError, match="device is gone"):
        bench.residency.release(holding)
    assert bool((tensor == 7).all())
    assert holding.slot is None
    bench.gate.fails = False
    bench.residency.offload(holding, bench.slot(0, 16))
    bench.residency.release(holding)
    bench.assert_books()
    bench.residency.require((holding,))
    assert bool((tensor == 7).all())


def test_a_failed_read_leaves_no_garbage(bench: Bench) -> None:
    """The storage is away still and can be read later; at the very end it is filled with NaN."""
    (tensor, holding), (other, other_holding) = bench.add(16, 7), bench.add(4, 9)
    for each, offset in ((holding, 0), (other_holding, 32)):
        bench.residency.offload(each, bench.slot(offset, 16))
        bench.residency.release(each)
    bench.gate.fails = True
    with pytest.raises(StoreError):
        bench.residency.require((holding,))
    bench.assert_books()
    bench.gate.fails = False
    bench.residency.require((holding,))
    assert bool((tensor == 7).all())
    bench.gate.fails = True
    with pytest.raises(StoreError):
        bench.residency.end()
    assert bool((other == 0xFF).all())
    assert other.view(torch.float32).isnan().all()


def test_an_impossible_slot_is_no_copy(bench: Bench) -> None:
    """A transfer that could not even be issued leaves things as they were."""
    tensor, holding = bench.add(16, 7)
    with pytest.raises(StoreError, match="outside"):
        bench.residency.offload(holding, bench.slot(250, 16))
    bench.residency.release(holding)
    assert bool((tensor == 7).all())
    bench.assert_books()


def test_memory_from_elsewhere_pushes_others_out(bench: Bench) -> None:
    """Nothing is needed beside it, yet the budget is exceeded: the next kernel makes it good."""
    tensors = [bench.add(20, value) for value in range(4)]
    assert bench.residency.used_bytes > bench.residency.capacity_bytes
    bench.residency.require((tensors[-1][1],))
    assert bench.residency.used_bytes <= bench.residency.capacity_bytes
    bench.assert_books()
    for value, (tensor, holding) in enumerate(tensors):
        bench.residency.require((holding,))
        assert bool((tensor == value).all())


def test_what_cannot_leave_is_said(bench: Bench) -> None:
    """Bytes needed, in use and fixed; a guess is not insisted on."""
    (kept, one), (kept_too, other) = bench.add(30), bench.add(20)
    other.is_fixed = True
    with pytest.raises(CapacityError, match=r"20\.5 kB pinned"):
        bench.residency.require((one,), 40 * KIB)
    bench.residency.require((one,), 40 * KIB, is_guess=True)
    assert kept.sum() > kept_too.sum()


def test_no_tier_has_room(bench: Bench) -> None:
    """The overflow area is full: the error names what is left, and the data stays."""
    kept = [bench.add(50, value) for value in range(4)]
    with pytest.raises(CapacityError, match="no tier has room"):
        bench.residency.make_room(64 * KIB, ())
    for value, (tensor, holding) in enumerate(kept):
        if holding.is_resident:
            assert bool((tensor == value).all())


def test_what_found_no_place_keeps_nothing_alive(bench: Bench) -> None:
    """The next one left instead: the error that was overcome holds no frame, nor its callers'."""
    large, small = bench.add(48), bench.add(8)
    find_slot = bench.residency.find_slot

    def find_for_small_ones(holding: Holding) -> Slot:
        if holding is large[1]:
            raise CapacityError("no room")
        return find_slot(holding)

    bench.residency.find_slot = find_for_small_ones
    bench.residency.victim_key = lambda holding: holding.allocated_bytes

    def operator() -> weakref.ref[torch.Tensor]:
        temporary = torch.ones(1)
        bench.residency.make_room(16 * KIB, ())
        return weakref.ref(temporary)

    gc.disable()
    try:
        assert operator()() is None
    finally:
        gc.enable()
    assert (large[1].is_resident, small[1].is_resident) == (True, False)


def test_a_resized_storage_is_another(bench: Bench) -> None:
    """The old generation can be neither moved nor counted, though its storage lives."""
    tensor, holding = bench.add(16)
    tensor.untyped_storage().resize_(8 * KIB)
    reborn = bench.registry.rebirth(holding.state, (0, 1, 0))
    assert reborn is not None
    new = bench.residency.adopt(reborn)
    bench.residency.offload(holding, bench.slot(0, 16))
    bench.residency.release(holding)
    assert bench.residency.order.pop(bench.residency.holdings(), ()) is new
    bench.assert_books()


def test_nothing_leaves_during_a_save(bench: Bench) -> None:
    """Saves nest; what was away before goes again at no cost."""
    kept = [bench.add(20, value) for value in range(4)]
    bench.residency.make_room(40 * KIB, ())
    away = [holding for _, holding in kept if not holding.is_resident]
    assert away
    outer = bench.residency.bring_back()
    inner = bench.residency.bring_back()
    inner()
    bench.residency.require((kept[0][1],), 60 * KIB)
    assert all(holding.is_resident for _, holding in kept)
    outer()
    assert [holding for _, holding in kept if not holding.is_resident] == away
    bench.assert_books()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), min_size=1, max_size=60))
def test_the_order_of_eviction(uses: list[tuple[int, int]]) -> None:
    """Against a sort of all by the key that each had when it was used last."""
    key: dict[Holding, float] = {}
    bench = _Storages()
    holdings = [bench.holding((1 + i % 3) * 3000) for i in range(10)]
    key.update(dict.fromkeys(holdings, 0.0))
    order = EvictionOrder(key.__getitem__)
    for step, (index, value) in enumerate(uses):
        key[holdings[index]] = value
        order.note_use(holdings[index])
        if step % 7 == 6:
            protected = {holdings[value % 10]}
            expected = max(
                (h for h in holdings if h not in protected),
                key=lambda h: (h.allocated_bytes >= 4096, key[h], h.state.serial),
            )
            assert order.pop(holdings, protected) is expected
            order.note_use(expected)


class _Storages:
    """Holdings without a residency; the tensors are kept."""

    def __init__(self) -> None:
        self._registry = StorageRegistry("cpu", lambda state: None)
        self._tensors: list[torch.Tensor] = []

    def holding(self, nbytes: int) -> Holding:
        tensor = torch.zeros(nbytes, dtype=torch.uint8)
        self._tensors.append(tensor)
        birth: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0)  # noqa: E731
        state, _ = self._registry.find_or_add(tensor, birth, is_foreign=False)
        assert state is not None
        return Holding(state, nbytes, is_fixed=False)


def test_the_dead_hold_no_place(bench: Bench) -> None:
    """Also before their burial: a planned offload into a dead storage's slot is not refused."""
    tensor, holding = bench.add(16)
    bench.residency.offload(holding, bench.slot(0, 16))
    bench.residency.release(holding)
    other, successor = bench.add(16, 5)
    assert not bench.residency.can_take(bench.slot(0, 16), successor)
    del tensor
    assert bench.residency.can_take(bench.slot(0, 16), successor)
    bench.residency.offload(successor, bench.slot(0, 16))
    bench.residency.bury()
    bench.residency.release(successor)
    bench.residency.require((successor,))
    assert bool((other == 5).all())
