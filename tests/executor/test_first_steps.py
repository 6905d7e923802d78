"""Between a run's first step and the first that goes by the plan: all is accounted for, all copies
that the plan counts on are made, and what is fetched on demand lies with the rest.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from tests.executor.allocator_chaos import ROWS, Chaos

from teraio.contracts.plan import Copies, Plan
from teraio.executor import storage_memory
from teraio.executor.gpu_memory import CompactMemory
from teraio.executor.holding import Holding
from teraio.executor.homes import Homes
from teraio.executor.mode import ExecutorMode
from teraio.executor.placement import Placement
from teraio.executor.plan_position import RunState
from teraio.executor.residency import Residency
from teraio.executor.stores import HostStore
from teraio.executor.tiers import Slot, Tiers
from teraio.profiler.storages import StorageRegistry
from teraio.simulator.caching_allocator import MIB

KIB = 1024


def with_one_copy(plan: Plan) -> Plan:
    """Its first storage is on the GPU when kernel 0 begins, and has a clean copy in the host."""
    storages = plan.storages
    one: dict[str, Any] = {
        field.name: getattr(storages, field.name)[:1].copy()
        for field in dataclasses.fields(storages)
    }
    one["nbytes"] = np.array([16 * KIB])
    one["placement"] = np.array(["gpu"], dtype=object)
    one["device"] = np.array([""], dtype=object)
    return dataclasses.replace(
        plan,
        storages=dataclasses.replace(storages, **one),
        copies=Copies.from_rows([(0, "host", "host", 0)]),
    )


def test_a_copy_that_finds_its_place_taken_is_made_later(small_plan: Plan) -> None:
    """Gradients of the first step may lie there until zero_grad, which comes after its end."""
    store = HostStore(64 * KIB)
    tiers = Tiers({"host": store}, {"host": 32 * KIB})
    try:
        residency = Residency(tiers, 64 * KIB)
        registry = StorageRegistry("cpu", residency.note_death)
        tensors = {name: torch.ones(16 * KIB, dtype=torch.uint8) for name in ("weight", "gradient")}
        holdings: dict[str, Holding] = {}
        for name, tensor in tensors.items():
            state, _ = registry.find_or_add(tensor, lambda: (0, 0, 0), is_foreign=False)
            assert state is not None
            holdings[name] = residency.adopt(state)
        weight, gradient = holdings["weight"], holdings["gradient"]
        weight.row = 0
        residency.offload(gradient, Slot(store, 0, 16 * KIB, is_overflow=False))
        residency.release(gradient)
        placement = Placement(with_one_copy(small_plan))
        placement.establish(residency, [weight])
        assert weight.slot is None
        assert placement.is_unsettled
        del tensors["gradient"], tensor
        placement.establish(residency, [weight])
        assert weight.slot is not None
        assert weight.slot.offset_bytes == 0
        assert not placement.is_unsettled
    finally:
        tiers.close()


FULL_HOST = [("host", 0), ("host", 16 * KIB), ("ssd0", 0)]
ONLY_DISK = [("ssd0", 0), ("ssd0", 16 * KIB), ("ssd0", 32 * KIB)]


@pytest.mark.parametrize(
    ("state", "is_aside", "places"),
    [
        (RunState.COLD, False, FULL_HOST),
        (RunState.COLD, True, ONLY_DISK),
        (RunState.ADRIFT, False, ONLY_DISK),
        (RunState.FOLLOWING, False, ONLY_DISK),
    ],
)
def test_host_memory_before_a_disk(
    small_plan: Plan, state: RunState, is_aside: bool, places: list[tuple[str, int]]
) -> None:
    """In the first step, places of a full host are for whoever leaves; later for whom they are
    planned.
    """
    disk: Any = HostStore(64 * KIB)
    disk.name = "ssd0"
    arenas = {"host": 32 * KIB, "ssd0": 0}
    tiers = Tiers({"host": HostStore(32 * KIB), "ssd0": disk}, arenas)
    try:
        residency = Residency(tiers, 64 * KIB)
        registry = StorageRegistry("cpu", residency.note_death)
        mode: Any = SimpleNamespace(
            residency=residency,
            registry=registry,
            position=SimpleNamespace(state=state),
            is_aside=is_aside,
            names=SimpleNamespace(optimizers=[]),
            bind_names=lambda: False,
        )
        homes = Homes(mode, small_plan, arenas)
        tensors = [torch.ones(16 * KIB, dtype=torch.uint8) for _ in places]
        found = []
        for tensor in tensors:
            storage, _ = registry.find_or_add(tensor, lambda: (0, 0, 0), is_foreign=False)
            assert storage is not None
            holding = residency.adopt(storage)
            slot = homes.find_slot(holding)
            residency.offload(holding, slot)
            residency.release(holding)
            found.append((slot.store.name, slot.offset_bytes))
        assert found == places
    finally:
        tiers.close()


class EmptyBooks(storage_memory.StorageMemory):
    """Of an allocator that has nothing but ``in_use_bytes``."""

    in_use_bytes = 0

    def end_iteration(self) -> tuple[int, int]:
        return self.in_use_bytes, self.in_use_bytes


@pytest.mark.parametrize("before_bytes", [0, 10 * MIB])
def test_workspaces_count_before_they_are_there(small_plan: Plan, before_bytes: int) -> None:
    """Libraries take them with the first kernels, when the budget is full already. What an earlier
    training of the process has left counts once.
    """
    residency = Residency(Tiers({}, {}), 100 * MIB, untracked_bytes=4 * MIB)
    memory = residency.memory = EmptyBooks()
    memory.in_use_bytes = before_bytes
    mode = ExecutorMode(small_plan, residency, device_type="cpu")
    mode.registry.device_type = "cuda"
    mode.start()
    assert residency.used_bytes == max(4 * MIB, before_bytes)
    # After a step the allocator knows better.
    memory.in_use_bytes = 3 * MIB
    residency.settle_books()
    assert residency.used_bytes == 3 * MIB


def test_what_comes_on_demand_takes_no_new_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a run's first step too, when no kernel of the plan has said yet what may move."""
    chaos = Chaos(0, surprises=False)
    chaos.may_move = [True] * ROWS
    books, allocator = cast("Any", chaos.books), cast("Any", chaos.allocator)
    memory = CompactMemory(books, allocator, chaos.may_move)
    chaos.memory = chaos.books.memory = memory
    chaos.random = SimpleNamespace(
        choices=lambda sizes, k: [20 * MIB], choice=lambda counts: 1, randrange=lambda *_: 0
    )
    for _ in range(60):
        chaos.birth()
    for holding in sorted(chaos.books.alive, key=lambda h: h.stamp)[::2]:
        holding.is_dead = True
        chaos.allocator.free(chaos.allocator.address_of.pop(id(chaos.storages[holding])))
        chaos.books.dead.append(holding)
    chaos.books.bury()
    num_pages = len(chaos.allocator.pages)
    monkeypatch.setattr(storage_memory, "original_resize", chaos.allocate)
    storage = torch.UntypedStorage(40 * MIB, device="meta")
    state: Any = SimpleNamespace(nbytes=40 * MIB, reference=lambda: storage, is_foreign=False)
    memory.allocate(Holding(state, 40 * MIB, is_fixed=False), storage)
    assert chaos.allocator.address(storage) in chaos.allocator.blocks
    assert len(chaos.allocator.pages) == num_pages
