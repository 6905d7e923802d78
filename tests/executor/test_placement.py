"""Storages find their places although others lie there and no memory is free."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from teraio.contracts.plan import Plan
from teraio.executor.holding import Holding
from teraio.executor.placement import Placement
from teraio.executor.residency import Residency
from teraio.executor.stores import HostStore
from teraio.executor.tiers import Slot, Tiers
from teraio.profiler.storages import StorageRegistry

KIB = 1024
PLACES_KIB = [0, 16, 32]
"""Where the plan has its first three storages in host memory; the fourth rests on the GPU."""


class Crowd:
    """Four storages of 16 KiB, one on a GPU of 16 KiB, the others away; 32 KiB of host are free."""

    def __init__(self, plan: Plan) -> None:
        self.store = HostStore(80 * KIB)
        self.tiers = Tiers({"host": self.store}, {"host": 48 * KIB})
        self.residency = Residency(self.tiers, 64 * KIB)
        registry = StorageRegistry("cpu", self.residency.note_death)
        self.tensors = [torch.full((16 * KIB,), i, dtype=torch.uint8) for i in range(4)]
        self.holdings: list[Holding | None] = []
        for row, tensor in enumerate(self.tensors):
            state, _ = registry.find_or_add(tensor, lambda: (0, 0, 0), is_foreign=False)
            assert state is not None
            holding = self.residency.adopt(state)
            holding.row = row
            self.holdings.append(holding)
        self.placement = Placement(_planned(plan))

    def put(self, row: int, offset_kib: int) -> None:
        """Have a storage lie at a place, and not on the GPU."""
        holding = self.holdings[row]
        assert holding is not None
        self.residency.offload(
            holding, Slot(self.store, offset_kib * KIB, 16 * KIB, is_overflow=False)
        )
        self.residency.release(holding)


def _planned(plan: Plan) -> Plan:
    """A plan of four storages of which three are away when kernel 0 begins."""
    storages = plan.storages
    four = {
        field.name: getattr(storages, field.name)[:4].copy()
        for field in dataclasses.fields(storages)
    }
    four["nbytes"] = np.full(4, 16 * KIB)
    four["placement"] = np.array(["host"] * 3 + ["gpu"], dtype=object)
    four["device"] = np.array(["host"] * 3 + [""], dtype=object)
    four["tier_offset_bytes"] = np.array([place * KIB for place in PLACES_KIB] + [-1])
    no_copies = type(plan.copies).from_rows([])
    return dataclasses.replace(
        plan, storages=dataclasses.replace(storages, **four), copies=no_copies
    )


@pytest.fixture
def crowd(small_plan: Plan) -> Iterator[Crowd]:
    """Closed afterwards."""
    made = Crowd(small_plan)
    yield made
    made.tiers.close()


@pytest.mark.parametrize("places", [(16, 0, 32), (16, 32, 0), (32, 16, 0), (0, 16, 32)])
def test_each_lies_in_anothers_place(crowd: Crowd, places: Any) -> None:
    """Two in each other's, three in a circle; the GPU has room for the resting one only."""
    for row, place in enumerate(places):
        crowd.put(row, place)
    crowd.residency.capacity_bytes = 16 * KIB
    crowd.placement.establish(crowd.residency, crowd.holdings)
    for row, place in enumerate(PLACES_KIB):
        holding = crowd.holdings[row]
        assert holding is not None
        assert holding.slot is not None
        assert (holding.is_resident, holding.slot.offset_bytes) == (False, place * KIB)
    resting = crowd.holdings[3]
    assert resting is not None
    assert resting.is_resident
    assert crowd.residency.used_bytes == 16 * KIB
    crowd.residency.end()
    for value, tensor in enumerate(crowd.tensors):
        assert bool((tensor == value).all())


def test_a_stranger_leaves_a_place_that_others_have(crowd: Crowd) -> None:
    """In the first step it went where there was room, which the plan has for another."""
    stranger = crowd.holdings[0]
    assert stranger is not None
    stranger.row = -1
    crowd.put(0, PLACES_KIB[1])
    crowd.residency.capacity_bytes = 48 * KIB
    holdings = [None, *crowd.holdings[1:]]
    crowd.placement.establish(crowd.residency, holdings)
    assert crowd.placement.is_unsettled
    crowd.placement.establish_by_force(crowd.residency, holdings)
    assert not crowd.placement.is_unsettled
    for row in (1, 2):
        holding = crowd.holdings[row]
        assert holding is not None
        assert holding.slot is not None
        assert (holding.is_resident, holding.slot.offset_bytes) == (False, PLACES_KIB[row] * KIB)
    crowd.residency.end()
    for value, tensor in enumerate(crowd.tensors):
        assert bool((tensor == value).all())
