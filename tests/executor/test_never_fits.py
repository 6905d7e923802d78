"""Models whose state is three times the GPU's budget train from weights made in their tiers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.executor.never_fitting import (
    IMPLEMENTATIONS,
    STEPS,
    adamw,
    assert_same,
    build,
    build_on_meta,
    exactly,
    initialise,
    peaks,
    plan,
    state_bytes,
    step,
    tensors_of,
    trace,
    train_plainly,
)
from torch import nn

import teraio
from teraio.errors import InputError


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_built_inside_the_budget(implementation: str) -> None:
    """The constructor's own random values; the first step stays within the budget too."""
    made = plan(implementation)
    assert state_bytes(trace(implementation)) >= 3 * made.metadata.gpu_memory_bytes
    losses, reference = train_plainly(implementation=implementation)
    with teraio.execute(made) as run:
        torch.manual_seed(0)
        model = run.build(build)
        optimizer = adamw(model, implementation)
        assert [step(model, optimizer, number) for number in range(STEPS)] == losses
        assert max(peaks(run)) <= made.metadata.gpu_memory_bytes
    assert_same(tensors_of(model, optimizer), reference)
    assert run.report.moves_found == run.report.moves_planned
    assert (run.report.first_drift, run.report.demand_fetches) == ("", 0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tiers_that_hold_exactly_what_is_planned(implementation: str) -> None:
    """The first step finds room in the planned arenas: there is no other."""
    options = exactly(plan(implementation))
    losses, reference = train_plainly(implementation=implementation)
    with teraio.execute(**options) as run:
        torch.manual_seed(0)
        model = run.build(build)
        optimizer = adamw(model, implementation)
        assert [step(model, optimizer, number) for number in range(STEPS)] == losses
        assert max(peaks(run)) <= run.budget_bytes
    assert_same(tensors_of(model, optimizer), reference)


def initialised(tied: bool = False) -> nn.Module:
    """A model that fits, initialised as the one on the meta device is."""
    model = build_on_meta(tied=tied).to_empty(device="cpu")
    if tied:  # to_empty gives each module memory of its own.
        model.head.weight = model.embedding.weight  # type: ignore[union-attr]
    for module in model.modules():
        initialise(module)
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_materialised_from_the_meta_device(tied: bool) -> None:
    """Same seed, same bits; parameters stay the objects that the optimizer knows, ties stay."""
    losses, reference = train_plainly(lambda: initialised(tied))
    model = build_on_meta(tied=tied)
    optimizer = adamw(model)
    parameters = list(model.parameters())
    made = plan(tied=tied)
    with teraio.execute(made, model, optimizer) as run:
        torch.manual_seed(0)
        run.materialise(model, initialise=initialise)
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
        assert (model.head.weight is model.embedding.weight) is tied  # type: ignore[union-attr]
        assert [step(model, optimizer, number) for number in range(STEPS)] == losses
        assert max(peaks(run)) <= made.metadata.gpu_memory_bytes
    assert_same(tensors_of(model, optimizer), reference)


def test_parameters_go_to_their_places() -> None:
    """Before the first kernel of training every parameter lies where the plan has it then."""
    made = plan()
    with teraio.execute(made) as run:
        model = build_on_meta()
        run.materialise(model, initialise=initialise)
        mode = run._mode
        assert mode is not None
        num_away = 0
        for name, parameter in model.named_parameters():
            row = mode.schedule.row_of_name[name]
            holding = mode.registry.find(parameter).attachment  # type: ignore[union-attr]
            place = mode.placement.place_of_row(row)
            assert holding.is_resident == (place is None), name
            if place is not None:
                assert (holding.slot.store.name, holding.slot.offset_bytes) == place
                num_away += 1
        assert num_away > 10


class Scaled(nn.Module):
    """A parameter and a buffer that only the constructor can initialise, and a layer that can."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 2.0))
        self.register_buffer("shift", torch.ones(8), persistent=False)
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape."""
        result: torch.Tensor = self.layer(x) * self.scale + self.shift
        return result


def test_modules_that_initialise_themselves() -> None:
    """``reset_parameters`` as without a run; who has none is named, and what to do."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        other = Scaled()
    with teraio.execute(plan()) as run:
        torch.manual_seed(0)
        run.materialise(model)
        with pytest.raises(InputError, match=r"nothing gives values to model1\.scale: Scaled"):
            run.materialise(other)
        assert other.scale.is_meta
    assert_same(model.state_dict(), reference.state_dict())


def test_builds_only_modules_and_only_inside() -> None:
    """Both said in a message."""
    run = teraio.execute(plan())
    with pytest.raises(InputError, match="inside the `with"):
        run.build(build)
    with run, pytest.raises(InputError, match="made a Tensor"):
        run.build(lambda: torch.zeros(3))  # type: ignore[type-var]


def test_leaving_without_bringing_back() -> None:
    """What is away has no memory afterwards, and says so; what is there is still right."""
    made = plan()
    _, reference = train_plainly()
    with teraio.execute(made, on_exit="discard") as run:
        torch.manual_seed(0)
        model = run.build(build)
        optimizer = adamw(model)
        for number in range(STEPS):
            step(model, optimizer, number)
    tensors = dict(model.named_parameters())
    away = [name for name, tensor in tensors.items() if tensor.is_meta]
    assert 0 < len(away) < len(tensors)
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        tensors[away[0]].cpu()
    for name, tensor in tensors.items():
        assert tensor.is_meta or torch.equal(tensor, reference[name])
    with pytest.raises(InputError, match="on_exit"):
        teraio.execute(made, on_exit="keep")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    """The same on a GPU, whose memory is counted by its allocator."""
    made: Any = plan()
    torch.cuda.reset_peak_memory_stats()
    with torch.device("cuda"):
        losses, reference = train_plainly()
    with teraio.execute(made, device="cuda", gpu_memory="200MB") as run:
        torch.manual_seed(0)
        model = run.build(build)
        optimizer = adamw(model)
        assert [step(model, optimizer, number) for number in range(STEPS)] == losses
    assert_same(tensors_of(model, optimizer), reference)
