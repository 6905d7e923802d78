"""Whatever reads memory without an operator finds it there: saves, copies, NumPy, pointers."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

import teraio
from teraio.planner.policies.evict_everything import evict_everything


@pytest.fixture(scope="module")
def shared() -> dict[str, Any]:
    """Filled by the first test that needs the plan."""
    return {}


@pytest.fixture
def planned(shared: dict[str, Any], case: Any, machine: Any) -> tuple[Any, Any]:
    """(case, plan that keeps nothing on the GPU between its uses)."""
    if not shared:
        training = case(optimizer_options={"fused": True})
        trace = training.trace()
        budget = trace.peak_allocated_bytes * 2 // 3
        plan = evict_everything(trace, machine(gpu_memory=budget), tiers="both")
        shared["planned"] = (training, plan)
    return shared["planned"]  # type: ignore[no-any-return]


def test_saving_inside_the_run(planned: Any) -> None:
    """``torch.save`` between two steps writes what a run without offloading would have written."""
    training, plan = planned
    model, optimizer = training.build()
    with teraio.execute(plan, model, optimizer) as run:
        losses = [training.step(model, optimizer, i) for i in range(3)]
        saved = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
        losses += [training.step(model, optimizer, i) for i in range(3, 5)]
    training.plain().assert_same(training.outcome(model, optimizer, losses))
    assert run.report.drift == 0

    reference, reference_optimizer = training.build()
    for i in range(3):
        training.step(reference, reference_optimizer, i)
    saved.seek(0)
    loaded = torch.load(saved)
    for name, tensor in reference.state_dict().items():
        assert torch.equal(tensor, loaded["model"][name]), name
    states = reference_optimizer.state_dict()["state"]
    for index, state in states.items():
        for key, tensor in state.items():
            assert torch.equal(tensor, loaded["optimizer"]["state"][index][key])


def test_direct_reads_inside_the_run(planned: Any) -> None:
    """deepcopy, numpy(), tolist() and data_ptr() see the bytes, and training goes on right."""
    training, plan = planned
    reference, reference_optimizer = training.build()
    for i in range(3):
        training.step(reference, reference_optimizer, i)
    model, optimizer = training.build()
    with teraio.execute(plan, model, optimizer):
        losses = [training.step(model, optimizer, i) for i in range(3)]
        twin = copy.deepcopy(model)
        for (name, parameter), expected in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            assert parameter.tolist() == expected.tolist(), name
            assert (parameter.detach().numpy() == expected.detach().numpy()).all(), name
            assert parameter.data_ptr() != 0
        losses += [training.step(model, optimizer, i) for i in range(3, 5)]
    for parameter, expected in zip(twin.parameters(), reference.parameters(), strict=True):
        assert torch.equal(parameter, expected)
    training.plain().assert_same(training.outcome(model, optimizer, losses))


def test_leaving_by_an_exception_loses_nothing(planned: Any) -> None:
    """The model is whole after an error in the loop, and nothing stays patched."""
    training, plan = planned
    reference, reference_optimizer = training.build()
    for i in range(3):
        training.step(reference, reference_optimizer, i)
    save, numpy = torch.save, torch.Tensor.numpy
    model, optimizer = training.build()

    def interrupted() -> None:
        with teraio.execute(plan, model, optimizer):
            for i in range(3):
                training.step(model, optimizer, i)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(parameter, expected)
    assert torch.save is save
    assert torch.Tensor.numpy is numpy


def test_restore_all(planned: Any) -> None:
    """Afterwards nothing is away; the run goes on."""
    training, plan = planned
    model, optimizer = training.build()
    with teraio.execute(plan, model, optimizer) as run:
        losses = [training.step(model, optimizer, i) for i in range(2)]
        holdings = run._mode.residency.holdings()  # type: ignore[union-attr]
        assert not all(holding.is_resident for holding in holdings)
        assert all(p.untyped_storage().nbytes() > 0 for p in model.parameters())
        run.restore_all()
        assert all(holding.is_resident for holding in holdings)
        losses += [training.step(model, optimizer, i) for i in range(2, 5)]
    training.plain().assert_same(training.outcome(model, optimizer, losses))
