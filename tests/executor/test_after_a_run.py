"""When a run is over: what it has been told of is let go, what it knows of itself stays."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import teraio
from teraio.contracts.plan import Plan
from teraio.errors import InputError
from teraio.executor.execution import Execution
from teraio.executor.mode import ExecutorMode
from teraio.planner import evict_everything

PLANS: list[Plan] = []
"""Of every test here, made by the first."""


def plan_of(training: Any, machine: Any) -> Plan:
    """Within 70 % of what the training takes."""
    if not PLANS:
        trace = training.trace()
        hardware = machine(gpu_memory=int(0.7 * trace.peak_allocated_bytes))
        PLANS.append(teraio.plan(trace, hardware, planner="greedy"))
    return PLANS[0]


@pytest.fixture
def ended(case: Any, machine: Any) -> Iterator[tuple[Execution, list[weakref.ref[Any]]]]:
    """A run that is over, and what it held: nothing but counting references frees it here."""
    training = case()
    plan = plan_of(training, machine)
    model, optimizer = training.build()
    first = next(model.parameters())
    held = [weakref.ref(held) for held in (model, optimizer, first, first.untyped_storage())]
    gc.collect()
    gc.disable()
    try:
        with teraio.execute(plan, model, optimizer) as run:
            for number in range(3):
                training.step(model, optimizer, number)
        del model, optimizer, first
        yield run, held
    finally:
        gc.enable()


def test_the_model_and_the_optimizer_are_let_go(ended: Any) -> None:
    """Its memory is for whatever is trained next, also while somebody reads the report."""
    run, held = ended
    assert [reference() for reference in held] == [None, None, None, None]
    assert run.report.steps == 3


def test_what_it_did_is_still_known(ended: Any) -> None:
    run, _ = ended
    assert len(run.iteration_seconds) == run.report.steps == 3
    assert run.report is run.report
    assert run.timeline.iteration_seconds > 0


def test_it_is_over_for_good(ended: Any) -> None:
    run, _ = ended
    run.step()
    run.restore_all()
    assert run.report.steps == 3
    with pytest.raises(InputError, match="entered once"):
        run.__enter__()
    with pytest.raises(InputError, match="inside the"):
        run.save("state")


def test_an_error_of_the_training_is_not_hidden(
    case: Any, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one of the report, which after an error of the GPU nobody can make."""
    training = case()
    plan = plan_of(training, machine)
    model, optimizer = training.build()
    held = weakref.ref(model)

    def fail(*_: Any) -> None:
        raise RuntimeError("the GPU has failed")

    def train(run: Execution, *trained: Any) -> None:
        with run:
            training.step(*trained, 0)
            monkeypatch.setattr(Execution, "_make_report", fail)
            raise ValueError("of the loop")

    run = teraio.execute(plan, model, optimizer)
    with pytest.raises(ValueError, match="of the loop"):
        train(run, model, optimizer)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="ended by an error"):
        _ = run.report
    del model, optimizer
    gc.collect()
    assert held() is None


def test_a_run_that_could_not_begin_keeps_no_model(
    case: Any, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = case()
    plan = plan_of(training, machine)

    def fail(_: Any) -> None:
        raise ValueError("cannot begin")

    monkeypatch.setattr(ExecutorMode, "start", fail)
    run = teraio.execute(plan, device="cpu")
    with pytest.raises(ValueError, match="cannot begin"), run:
        pass
    assert run._mode is None


def test_recent_iterations(ended: Any) -> None:
    """The first is no iteration by the plan. On a CPU nobody is ahead of anybody."""
    run, _ = ended
    recent = run.report.recent
    assert [each.seconds for each in recent] == run.iteration_seconds
    assert [each.is_on_plan for each in recent] == [False, True, True]
    assert {each.host_lead_seconds for each in recent} == {None}
    assert {each.allocator_looks for each in recent} == {0}
    assert run.report.host_lead_seconds is None


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::teraio.errors.OffloadWarning")
def test_the_memory_of_a_gpu_is_free_again() -> None:
    """What is on its way to the host when the run ends does not keep its memory."""

    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(3))).cuda()
        return model, torch.optim.AdamW(model.parameters(), foreach=False)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(256, 512, device="cuda")).pow(2).mean().backward()
        optimizer.step()

    model, optimizer = made()
    with teraio.profile(model, optimizer) as profile:
        while not profile.done:
            step(model, optimizer)
    hardware = teraio.Hardware.preset("h200").with_budgets(gpu_memory="2GB", host_memory="1GB")
    plan = evict_everything(profile.trace, hardware, tiers="host")
    del model, optimizer
    gc.collect()
    before_bytes = torch.cuda.memory_allocated()
    gc.disable()
    try:
        model, optimizer = made()
        with teraio.execute(plan, model, optimizer) as run:
            for _ in range(4):
                step(model, optimizer)
        del model, optimizer
        assert torch.cuda.memory_allocated() == before_bytes
        assert run.report.host_lead_seconds is not None
    finally:
        gc.enable()
