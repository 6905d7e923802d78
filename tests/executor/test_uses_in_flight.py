"""Storages that collectives use stay where they are until those have completed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

import teraio
from teraio.executor import uses_in_flight
from teraio.executor.holding import Holding
from teraio.executor.parallel_mode import ParallelMode
from teraio.executor.planned_moves import PlannedMoves
from teraio.executor.uses_in_flight import UsesInFlight
from teraio.planner import evict_everything
from teraio.profiler.storages import StorageRegistry

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="needs torch.distributed")


class FakeWork:
    """A collective that completes when told."""

    def __init__(self) -> None:
        self.done = False

    def is_completed(self) -> bool:
        return self.done


@pytest.fixture
def in_flight(monkeypatch: pytest.MonkeyPatch) -> UsesInFlight:
    """Uses of a CPU run; an operator's result is the list of its works and tensors."""
    monkeypatch.setattr(
        uses_in_flight,
        "_works_in",
        lambda result: [item for item in result if isinstance(item, FakeWork)],
    )
    residency: Any = SimpleNamespace(order=SimpleNamespace(note_use=lambda _: None))
    return UsesInFlight(residency, threading.RLock(), "cpu")


def collective(name: str = "c10d.allreduce_.default") -> Any:
    return SimpleNamespace(name=name, is_collective=True)


def held(tensor: torch.Tensor) -> Holding:
    registry = StorageRegistry("cpu", lambda _: None)
    state, _ = registry.find_or_add(tensor, lambda: (0, 0, 0), is_foreign=True)
    assert state is not None
    return Holding(state, state.nbytes, is_fixed=False)


def test_it_stays_until_the_last_collective_has_completed(in_flight: UsesInFlight) -> None:
    tensor = torch.ones(8)
    holding, works = held(tensor), [FakeWork(), FakeWork()]
    for work in works:
        in_flight.note(collective(), [holding], [], [work])
    for work in works:
        in_flight.poll()
        assert not holding.can_leave
        assert holding.must_stay
        work.done = True
    in_flight.poll()
    assert holding.can_leave
    assert not holding.must_stay


def test_a_functional_collective_ends_with_the_wait_for_its_result(
    in_flight: UsesInFlight,
) -> None:
    source, result = torch.ones(8), torch.ones(8)
    holdings = [held(source), held(result)]
    name = "_c10d_functional.all_reduce.default"
    in_flight.note(collective(name), holdings, [], [result])
    in_flight.poll()
    assert not any(holding.can_leave for holding in holdings)
    in_flight.note(collective("_c10d_functional.wait_tensor.default"), [holdings[1]], [], [result])
    assert all(holding.can_leave for holding in holdings)


def test_what_nobody_can_tell_the_end_of_stays_for_good(in_flight: UsesInFlight) -> None:
    tensor = torch.ones(8)
    holding = held(tensor)
    in_flight.note(collective("c10d.send.default"), [holding], [], [None])
    assert holding.is_fixed


def test_out_of_memory_waits_for_a_use_to_end(
    in_flight: UsesInFlight, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uses_in_flight, "PATIENCE_SECONDS", 0.2)
    assert not in_flight.wait_for_one()
    tensor = torch.ones(8)
    holding, work = held(tensor), FakeWork()
    in_flight.note(collective(), [holding], [], [work])
    assert not in_flight.wait_for_one()
    monkeypatch.setattr(uses_in_flight, "PATIENCE_SECONDS", 60.0)
    timer = threading.Timer(0.1, lambda: setattr(work, "done", True))
    timer.start()
    began = time.monotonic()
    assert in_flight.wait_for_one()
    assert time.monotonic() - began < 30
    timer.join()
    assert holding.can_leave


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    store = f"file://{tmp_path / 'store'}"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_gradients_leave_again_after_their_collective(loop: Any, batch: Any, machine: Any) -> None:
    """Real collectives of every kind: nothing is pinned down, every planned move is made."""
    from torch.distributed import _functional_collectives as functional

    world = distributed.group.WORLD
    assert world is not None

    def step(model: Any, optimizer: Any, number: int) -> float:
        optimizer.zero_grad()
        loss = model(batch(number)).pow(2).mean()
        loss.backward()
        works = []
        for index, parameter in enumerate(model.parameters()):
            if index % 2:
                works.append(distributed.all_reduce(parameter.grad, async_op=True))
            else:
                distributed.broadcast(parameter.grad, 0)
        for work in works:
            work.wait()
        # Gloo's never say that they have completed.
        distributed.reduce_scatter(torch.empty(64), [model.layers[0].bias.grad])
        total = functional.all_reduce(loss.detach(), "sum", world)
        optimizer.step()
        return float(total)

    training = loop(step)
    (losses, tensors), _ = training.run()
    plan = evict_everything(training.trace(), machine(), tiers="host")
    model, optimizer = training.made()
    torch.manual_seed(1)
    with teraio.execute(plan, model, optimizer) as run:
        assert isinstance(run._mode, ParallelMode)
        assert [step(model, optimizer, number) for number in range(5)] == losses
        holdings = run._mode.residency.holdings()
        assert not any(holding.is_fixed or holding.in_flight for holding in holdings)
    assert run.report.moves_found == run.report.moves_planned
    assert run.report.demand_fetches == 0
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, tensors[name]), name


class SlowWork:
    """A collective that has completed when it is asked for the tenth time."""

    def __init__(self) -> None:
        self._asked = 0

    def is_completed(self) -> bool:
        self._asked += 1
        return self._asked >= 10


@pytest.mark.usefixtures("group")
def test_moves_that_come_due_during_a_collective_are_made_after_it(
    loop: Any, batch: Any, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that could not be given back in time is given back as soon as it can be."""
    made: list[SlowWork] = []

    def works_in(_: Any) -> list[SlowWork]:
        made.append(SlowWork())
        return made[-1:]

    def step(model: Any, optimizer: Any, number: int) -> float:
        optimizer.zero_grad()
        loss = model(batch(number)).pow(2).mean()
        loss.backward()
        for parameter in model.parameters():
            distributed.all_reduce(parameter.grad)
        optimizer.step()
        return float(loss.detach())

    training = loop(step)
    (losses, tensors), _ = training.run()
    plan = evict_everything(training.trace(), machine(), tiers="host")
    monkeypatch.setattr(uses_in_flight, "_works_in", works_in)
    late = []
    release_late = PlannedMoves.release_late

    def released(moves: PlannedMoves) -> None:
        before = len(moves.late_frees)
        release_late(moves)
        late.append(before - len(moves.late_frees))

    monkeypatch.setattr(PlannedMoves, "release_late", released)
    (executed, found), report = training.run(plan=plan)
    assert executed == losses
    for name, tensor in tensors.items():
        assert torch.equal(tensor, found[name]), name
    assert len(made) == 5 * 6
    assert sum(late) > 0
    assert report.moves_found == report.moves_planned
    assert report.evictions == 0


class FakeStream:
    """A stream that is not the compute stream; its events end when told."""

    def __init__(self) -> None:
        self.is_through = False

    def record_event(self) -> Any:
        return SimpleNamespace(query=lambda: self.is_through)


def test_a_kernel_on_another_stream_holds_what_it_uses(
    in_flight: UsesInFlight, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, waits = FakeStream(), []
    monkeypatch.setattr(UsesInFlight, "is_elsewhere", property(lambda _: True))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    tensors = torch.ones(8), torch.ones(8)
    used, made = held(tensors[0]), held(tensors[1])
    used.arrived = SimpleNamespace(
        make_stream_wait=lambda: waits.append("for what was brought back")
    )
    in_flight.make_visible([used, made])
    assert waits == ["for what was brought back"]
    in_flight.note(SimpleNamespace(is_collective=False), [used, made], [made], None)
    in_flight.poll()
    assert not used.can_leave
    assert not made.can_leave
    stream.is_through = True
    in_flight.poll()
    assert used.can_leave
    assert made.can_leave
