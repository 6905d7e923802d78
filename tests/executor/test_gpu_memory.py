"""Storages moved within the GPU: by a modelled allocator that lays them out as a GPU's does.

Every move is a real one (new memory, a copy, the old memory back), so that training shows whether
anything kept the old address.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import teraio
from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Plan
from teraio.executor import execution, gpu_memory, planned_moves, schedule
from teraio.executor.gpu_allocator import GpuAllocator, Layout
from teraio.executor.gpu_memory import CompactMemory, can_move
from teraio.executor.holding import Holding
from teraio.executor.residency import Residency
from teraio.profiler.storages import original_resize
from teraio.simulator import caching_allocator
from teraio.simulator.caching_allocator import Block, CachingAllocator
from teraio.simulator.reserved_memory import predict_reserved_memory

PAGE = 4096
STEPS = 3
PLANS: list[Plan] = []
"""The plan of all tests here, made by the first."""


class ModelledAllocator:
    """:class:`GpuAllocator` over a model; told by :class:`ToldMemory` what comes and goes."""

    def __init__(self) -> None:
        self.model = CachingAllocator()
        self.blocks: dict[int, Block] = {}
        self.serial_at: dict[int, int] = {}
        self.plugs: dict[int, Block] = {}
        self.looks = self.moves = 0

    def born(self, holding: Holding) -> None:
        state = holding.state
        if state.serial not in self.blocks:
            self.blocks[state.serial] = self.model.allocate(holding.allocated_bytes)
            self.serial_at[state.address] = state.serial

    def freed(self, holding: Holding) -> None:
        block = self.blocks.pop(holding.state.serial, None)
        if block is not None:
            self.model.free(block)

    def is_usable(self) -> bool:
        return True

    def is_on_stream(self) -> bool:
        return True

    def look(self) -> Layout:
        self.looks += 1
        blocks = [*self.blocks.values(), *self.plugs.values()]
        lying = [(block.address, block.nbytes) for block in blocks]
        large = self.model.large
        return Layout(list(large.holes), lying, self.model.reserved_bytes, large.holes.growth)

    def address(self, storage: torch.UntypedStorage) -> int:
        return self.blocks[self.serial_at[storage._cdata]].address

    def move(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        self.moves += 1
        before = GpuAllocator.address(storage)
        original_resize(storage, nbytes)
        assert GpuAllocator.address(storage) != before
        serial = self.serial_at[storage._cdata]
        old = self.blocks[serial]
        self.blocks[serial] = self.model.allocate(old.nbytes)
        self.model.free(old)

    def allocate(self, nbytes: int) -> int:
        block = self.model.allocate(nbytes)
        self.plugs[block.address] = block
        return block.address

    def free(self, address: int) -> None:
        self.model.free(self.plugs.pop(address))

    def trim(self) -> None:
        """As if all that is in use had been allocated one after the other."""
        self.model = CachingAllocator()
        self.blocks = {key: self.model.allocate(b.nbytes) for key, b in self.blocks.items()}

    def books(self) -> tuple[int, int]:
        return self.model.allocated_bytes, self.model.reserved_bytes


class ToldMemory(CompactMemory):
    """Tells the modelled allocator what PyTorch would have told its own."""

    _allocator: Any

    reserved_at_start = 0
    """Of the newest iteration."""

    def note(self, holding: Holding) -> None:
        self._allocator.born(holding)
        super().note(holding)

    def tidy(self, may_move: Sequence[bool]) -> None:
        self.reserved_at_start = self._allocator.model.reserved_bytes
        super().tidy(may_move)

    def forget(self, holding: Holding) -> None:
        self._allocator.freed(holding)
        super().forget(holding)


class Restless(ToldMemory):
    """Moves two storages at random before every kernel, needed or not."""

    def prepare(self, requests: Sequence[int], may_move: Sequence[bool]) -> None:
        super().prepare(requests, may_move)
        if not self._is_known:
            self._look()
        self._may_move = may_move
        movable = [begin for begin, _ in self.blocks if self.can_move(begin)]
        for begin in random.Random(len(self._lying_at)).sample(movable, min(2, len(movable))):
            if begin in self._lying_at:
                self.move(begin)


class Resting(ToldMemory):
    """Leaves all to the allocator: never knows where anything lies."""

    def prepare(self, requests: Sequence[int], may_move: Sequence[bool]) -> None:
        """Nothing."""


KINDS = [ToldMemory]


@pytest.fixture
def memories(monkeypatch: pytest.MonkeyPatch) -> list[ToldMemory]:
    """Of the runs made: CPU storages of any size count, in pages of 4 KiB and blocks of a byte."""
    made: list[ToldMemory] = []

    def memory_for(plan: Plan, residency: Residency, device_type: str) -> ToldMemory:
        kind = KINDS[-1]
        allocator: Any = ModelledAllocator()
        made.append(kind(residency, allocator))
        return made[-1]

    for module in (gpu_memory, planned_moves, schedule):
        monkeypatch.setattr(module, "MIB", 0)
    monkeypatch.setattr(gpu_memory, "LARGE_PAGE_BYTES", PAGE)
    monkeypatch.setattr(caching_allocator, "_SMALL_REQUEST_BYTES", 0)
    monkeypatch.setattr(caching_allocator, "_PAGE_BYTES", {True: PAGE, False: PAGE})
    monkeypatch.setattr(CachingAllocator, "block_bytes", 1)
    monkeypatch.setattr(execution, "memory_for", memory_for)
    return made


@pytest.fixture
def crowded(case: Any, machine: Any) -> Callable[[], Plan]:
    """A plan that fills its budget."""

    def make() -> Plan:
        if not PLANS:
            trace = case().trace()
            budget_bytes = int(0.6 * trace.peak_allocated_bytes)
            PLANS.append(teraio.plan(trace, machine(gpu_memory=budget_bytes), planner="greedy"))
        return PLANS[0]

    return make


@pytest.mark.parametrize("share", [0.0, 0.6])
def test_training_is_the_same_to_the_bit(
    share: float,
    case: Any,
    crowded: Callable[[], Plan],
    memories: list[ToldMemory],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wherever storages are moved to, at every kernel that finds no hole."""
    plan = crowded()
    monkeypatch.setattr(gpu_memory, "RESERVED_SHARE", share)
    outcome, report = case().executed(plan, STEPS)
    outcome.assert_same(case().plain(STEPS))
    allocator: Any = memories[-1]._allocator
    assert allocator.moves > 20
    assert report.evictions == report.demand_fetches == 0
    assert allocator.plugs == {}


def test_moves_at_every_kernel(
    case: Any, crowded: Callable[[], Plan], memories: list[ToldMemory], monkeypatch: Any
) -> None:
    """Thousands of moves in three steps: nothing keeps an address from one kernel to the next."""
    monkeypatch.setattr(sys.modules[__name__], "KINDS", [Restless])
    outcome, report = case().executed(crowded(), STEPS)
    outcome.assert_same(case().plain(STEPS))
    allocator: Any = memories[-1]._allocator
    assert allocator.moves > 2000
    assert report.evictions == report.demand_fetches == 0


def test_less_is_reserved(
    case: Any, crowded: Callable[[], Plan], memories: list[ToldMemory], monkeypatch: Any
) -> None:
    """Than without moving anything, by the same allocator under the same plan."""
    plan = crowded()
    for kind in (ToldMemory, Resting):
        monkeypatch.setattr(sys.modules[__name__], "KINDS", [kind])
        case().executed(plan, 2 * STEPS)
    together, apart = (memory.reserved_at_start for memory in memories)
    # What has a transfer under way cannot move, and how much that is depends on the machine.
    assert together < apart
    assert together < 1.16 * plan.metadata.gpu_memory_bytes


def test_pointers_that_were_given_away_stay_good(
    case: Any, crowded: Callable[[], Plan], memories: list[ToldMemory], monkeypatch: Any
) -> None:
    """A parameter that somebody sees through numpy lies where it lay, and is the same numbers."""
    plan = crowded()
    monkeypatch.setattr(gpu_memory, "RESERVED_SHARE", 0.0)
    model, optimizer = case().build()
    with teraio.execute(plan, model, optimizer):
        seen = {name: p.detach().numpy() for name, p in list(model.named_parameters())[:6]}
        for number in range(STEPS):
            case().step(model, optimizer, number)
        allocator: Any = memories[-1]._allocator
        assert allocator.moves > 20
        for name, parameter in model.named_parameters():
            if name in seen:
                assert parameter.data_ptr() == seen[name].ctypes.data
                assert bool((torch.from_numpy(seen[name]) == parameter).all())


def test_another_program_takes_the_memory_meanwhile(
    case: Any, crowded: Callable[[], Plan], memories: list[ToldMemory], monkeypatch: Any
) -> None:
    """No room can be made then, the training goes on as it would have."""
    plan = crowded()
    monkeypatch.setattr(gpu_memory, "RESERVED_SHARE", 0.0)
    refused: list[int] = []

    def refuse(allocator: ModelledAllocator, *arguments: Any) -> Any:
        refused.append(1)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(ModelledAllocator, "move", refuse)
    outcome, report = case().executed(plan, STEPS)
    outcome.assert_same(case().plain(STEPS))
    assert refused
    assert report.evictions == report.demand_fetches == report.relocated_bytes == 0


def test_what_may_move(case: Any, crowded: Callable[[], Plan], memories: Any) -> None:
    """Nothing that a transfer, another stream or a pointer uses."""
    model, optimizer = case().build()
    with teraio.execute(crowded(), model, optimizer):
        case().step(model, optimizer, 0)
        residency = memories[-1]._residency
        holding = next(h for h in residency.holdings() if h.row >= 0 and can_move(h))
        for name, value in (
            ("is_fixed", True),
            ("is_held", True),
            ("is_dead", True),
            ("in_flight", 1),
            ("is_resident", False),
            ("shared_with", frozenset([object()])),
            ("arriving", object()),
            ("leaving", Unfinished()),
            ("superseded", [Unfinished()]),
        ):
            before = getattr(holding, name)
            setattr(holding, name, value)
            assert not can_move(holding), name
            setattr(holding, name, before)
        assert can_move(holding)
        # Resized by what nobody sees: the size that is known would cut it off.
        holding.state.nbytes -= 1
        assert not can_move(holding)
        holding.state.nbytes += 1


class Unfinished:
    """A transfer under way."""

    done = False


@pytest.mark.gpu
def test_training_on_a_gpu(machine: Any) -> None:
    """The same losses, and as much reserved as predicted: blocks of a tenth of the budget each, as
    here, find fewer holes than those of a large model.
    """
    trained = GpuTraining()
    with teraio.profile(*trained.made()) as profile:
        losses = trained.run(profile, 6)
    trace = profile.trace
    del profile  # It keeps the model.
    budget_bytes = int(0.6 * trace.peak_allocated_bytes)
    plan = teraio.plan(trace, Hardware.preset("h200"), gpu_memory=budget_bytes, host_memory="4GB")
    torch.cuda.empty_cache()
    with teraio.execute(plan, *trained.made()) as run:
        assert trained.run(run, 6) == losses
    assert run.report.demand_fetches == 0
    apart = predict_reserved_memory(plan, keeps_together=False).reserved_bytes
    together = predict_reserved_memory(plan).reserved_bytes
    assert run.report.reserved_bytes <= 1.05 * together < apart


class GpuTraining:
    """Layers of different widths, so that blocks have many sizes; 0.5 GB of weights."""

    def made(self) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        widths = [2048, 4096, 3072, 6144, 2048, 8192, 1024, 4096, 2048]
        layers: list[torch.nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [torch.nn.Linear(before, after, device="cuda"), torch.nn.GELU()]
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        return self.model, self.optimizer

    def run(self, stepped: Any, steps: int) -> list[float]:
        losses = []
        for number in range(steps):
            generator = torch.Generator("cuda").manual_seed(number)
            batch = torch.randn(4096, 2048, device="cuda", generator=generator)
            loss = self.model(batch).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
            if hasattr(stepped, "done"):
                stepped.step()
        return losses


def test_the_first_step_is_kept_together_too(
    case: Any, crowded: Callable[[], Plan], memories: list[ToldMemory], monkeypatch: Any
) -> None:
    """Before any plan is followed: what the step itself has made may move."""
    plan = crowded()
    monkeypatch.setattr(gpu_memory, "RESERVED_SHARE", 0.0)
    model, optimizer = case().build()
    plain_model, plain_optimizer = case().build()
    with teraio.execute(plan, model, optimizer) as run:
        loss = case().step(model, optimizer, 0)
        allocator: Any = memories[-1]._allocator
        assert allocator.moves > 0
        assert run.report.warm_up_steps == 1
        assert run._mode is not None
        assert run._mode.log.last.traffic.relocated_bytes > 0
    assert loss == case().step(plain_model, plain_optimizer, 0)
