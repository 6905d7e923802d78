"""Plans that are wrong, stale, halved or for something else: training stays right, in budget."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

import teraio
from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Moves, Plan
from teraio.errors import CapacityError, DriftError, InputError, OffloadWarning
from teraio.planner.plan_building import build_plan, rebuild_plan
from teraio.planner.policies.evict_everything import evict_everything
from teraio.traces.trace import Trace


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> Any:
    """The tiny Llama's case, its plain outcome and its trace, made once."""
    return {}


@pytest.fixture
def llama(trained: dict[str, Any], case: Any) -> tuple[Any, Any, Trace]:
    """(case, plain outcome, trace)."""
    if not trained:
        training = case(optimizer_options={"foreach": True})
        trained["llama"] = (training, training.plain(), training.trace())
    return trained["llama"]  # type: ignore[no-any-return]


def test_on_demand_alone_stays_within_the_budget(llama: Any, machine: Any) -> None:
    """A plan without moves under half of the memory: all traffic is on demand."""
    training, plain, trace = llama
    budget_bytes = trace.peak_allocated_bytes // 2
    plan = build_plan(trace, Moves.empty(), machine(gpu_memory=budget_bytes), planner="on-demand")
    for options in ({}, {"host_memory": 0}):
        with pytest.warns(OffloadWarning, match="does not fit"):
            outcome, report = training.executed(plan, **options)
        plain.assert_same(outcome)
        assert report.demand_fetches > 0
        assert report.evictions > 0
        assert report.drift == 0
        assert report.peak_bytes <= budget_bytes


def test_random_valid_moves(llama: Any, machine: Any) -> None:
    """Moves with random windows and tiers, whatever they are good for."""
    training, plain, trace = llama
    plan = _with_random_windows(evict_everything(trace, machine(), tiers="both"), seed=3)
    outcome, report = training.executed(plan)
    plain.assert_same(outcome)
    assert report.drift == 0
    assert report.demand_fetches == 0


def test_plan_for_another_bandwidth(llama: Any, machine: Any) -> None:
    """Made for a hundredth and for a hundred times of the real rates: late, never wrong."""
    training, plain, trace = llama
    budget_bytes = trace.peak_allocated_bytes * 6 // 10
    real = machine(gpu_memory=budget_bytes)
    for factor in (0.01, 0.5, 100.0):
        plan = teraio.plan(trace, _scaled(real, factor), planner="greedy")
        assert len(plan.moves) > 0
        outcome, report = training.executed(plan)
        plain.assert_same(outcome)
        assert report.drift == report.demand_fetches == 0
        assert report.peak_bytes <= budget_bytes


def test_half_of_the_rows_deleted(llama: Any, machine: Any) -> None:
    """Recomputed it runs, on demand where rows are missing; left inconsistent it is refused."""
    training, plain, trace = llama
    budget_bytes = trace.peak_allocated_bytes // 2
    whole = evict_everything(trace, machine(gpu_memory=budget_bytes), tiers="both")
    moves = whole.moves.take(np.random.default_rng(0).random(len(whole.moves)) < 0.5)
    half = rebuild_plan(whole, moves)
    with pytest.warns(OffloadWarning, match="does not fit"):
        outcome, report = training.executed(half)
    plain.assert_same(outcome)
    assert report.demand_fetches > 0
    assert report.peak_bytes <= budget_bytes
    inconsistent = dataclasses.replace(whole, moves=moves)
    with pytest.raises(InputError, match="not executed") as error:
        training.executed(inconsistent)
    assert error.value.exit_code == 2


def test_plan_of_another_model(llama: Any, case: Any, machine: Any) -> None:
    """The run drifts from the first kernels on and is counted; results and budget hold."""
    _, _, trace = llama
    other = case(model="tiny-gpt2", optimizer_options={"foreach": True})
    plain = other.plain()
    budget_bytes = other.trace().peak_allocated_bytes // 2
    plan = evict_everything(trace, machine(gpu_memory=budget_bytes), tiers="both")
    outcome, report = other.executed(plan)
    plain.assert_same(outcome)
    assert report.drift > 0
    assert "instead of" in report.first_drift
    assert report.demand_fetches > 0
    assert report.peak_bytes <= budget_bytes


def test_stop_on_drift(llama: Any, case: Any, machine: Any) -> None:
    """``on_drift="stop"`` names the first kernel that differs."""
    _, _, trace = llama
    plan = evict_everything(trace, machine(), tiers="host")
    with pytest.raises(DriftError, match="no longer follows its trace"):
        case(model="tiny-gpt2").executed(plan, on_drift="stop")


def test_one_kernel_that_does_not_fit(llama: Any, machine: Any) -> None:
    """A budget below a single kernel's need is a clear error, and the model survives it."""
    training, _, trace = llama
    plan = evict_everything(trace, machine(), tiers="host")
    model, optimizer = training.build()
    before = [p.detach().clone() for p in model.parameters()]
    with (
        pytest.raises(CapacityError, match="raise --gpu-memory"),
        teraio.execute(plan, model, optimizer, gpu_memory=20_000),
    ):
        training.step(model, optimizer, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_other_shapes_in_some_steps(llama: Any, machine: Any, monkeypatch: Any) -> None:
    """A shorter batch now and then (hazard I4) changes nothing but the counters."""
    training, _, trace = llama
    plan = evict_everything(trace, machine(), tiers="both")

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for number in range(5):
            generator = torch.Generator().manual_seed(number)
            tokens = torch.randint(0, 64, (2, 9 + number % 3), generator=generator)
            optimizer.zero_grad()
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    model, optimizer = training.build()
    plain = training.outcome(model, optimizer, train(model, optimizer))
    model, optimizer = training.build()
    with teraio.execute(plan, model, optimizer) as run:
        losses = train(model, optimizer)
    plain.assert_same(training.outcome(model, optimizer, losses))
    assert run.report.drift > 0


def test_skipped_optimizer_step(llama: Any, machine: Any) -> None:
    """An iteration whose step is skipped (hazard I2) hangs nothing, and the next is on plan."""
    training, _, trace = llama
    plan = evict_everything(trace, machine(), tiers="both")

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for number in range(6):
            if number == 3:
                loss = model(*_tokens(number))
                loss.backward()
                losses.append(loss.item())
            else:
                losses.append(training.step(model, optimizer, number))
        return losses

    model, optimizer = training.build()
    plain = training.outcome(model, optimizer, train(model, optimizer))
    model, optimizer = training.build()
    with teraio.execute(plan, model, optimizer) as run:
        losses = train(model, optimizer)
    plain.assert_same(training.outcome(model, optimizer, losses))
    assert run.report.drift > 0
    assert run.report.timeline.metadata.demand_fetches == 0


def _scaled(hardware: Hardware, factor: float) -> Hardware:
    """The same machine with every rate multiplied."""

    def scale(part: Any) -> Any:
        names = ("read_rate", "write_rate", "duplex_read_rate", "duplex_write_rate")
        return dataclasses.replace(part, **{n: getattr(part, n) * factor for n in names})

    return dataclasses.replace(
        hardware,
        link=tuple(scale(link) for link in hardware.link),
        host=scale(hardware.host),
        ssd=tuple(scale(ssd) for ssd in hardware.ssd),
    )


def _tokens(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def _with_random_windows(plan: Plan, seed: int) -> Plan:
    """The same periods with offload, release and prefetch anywhere that is valid."""
    rng = np.random.default_rng(seed)
    moves, num_kernels = plan.moves, len(plan.kernels)
    unrolled = moves.unrolled(num_kernels)
    rows = []
    for row in range(len(moves)):
        after, before = int(unrolled.after_kernel[row]), int(unrolled.before_kernel[row])
        end = before if before >= 0 else int(unrolled.free_by[row])
        inside = np.sort(rng.integers(after, max(end - 1, after + 1), size=2))
        offload, free = int(inside[0]), int(inside[1]) + 1
        prefetch = int(rng.integers(free + 1, end + 1)) if before >= 0 and free < end else before
        if before >= 0 and free >= end:
            offload, free, prefetch = after, after + 1, end
        rows.append(
            (
                moves.storage[row],
                after,
                moves.before_kernel[row],
                offload % num_kernels,
                (free if before >= 0 else end) % num_kernels,
                prefetch % num_kernels if before >= 0 else None,
                moves.tier[row],
                moves.device[row],
                0,
                moves.nbytes[row],
                True,
            )
        )
    return rebuild_plan(plan, Moves.from_rows(rows))
