"""Plans under which parameters step in the backward pass: the same bits, the kernels foreseen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.executor.backward_training import (
    IN_BACKWARD,
    OPTIMIZERS,
    Training,
    assert_same_bits,
    moving_plan,
    unmoved_plan,
)

import teraio
from teraio.executor.stepping_order import SteppingOrder
from teraio.traces.trace import Trace
from teraio.traces.transforms import transform_trace

pytestmark = pytest.mark.filterwarnings("ignore:scratch memory inside operators is unknown")


def identities(trace: Trace) -> list[Any]:
    """What each storage is, however the rows are numbered."""
    storages = trace.storages
    return [
        name if birth < 0 else (int(birth), int(ordinal))
        for name, birth, ordinal in zip(
            storages.name, storages.birth, storages.birth_ordinal, strict=True
        )
    ]


def lifetimes(trace: Trace) -> dict[Any, tuple[int, int]]:
    """Death and size of each storage."""
    storages = trace.storages
    rows = zip(storages.death.tolist(), storages.nbytes.tolist(), strict=True)
    return dict(zip(identities(trace), rows, strict=True))


def accesses(trace: Trace) -> dict[Any, tuple[bool, bool]]:
    """Whether it is read and written, by kernel and storage."""
    rows, identity = trace.accesses, identities(trace)
    return {
        (kernel, trace.kernels.op[kernel], identity[storage]): (reads, writes)
        for kernel, storage, reads, writes in zip(
            rows.kernel.tolist(),
            rows.storage.tolist(),
            rows.reads.tolist(),
            rows.writes.tolist(),
            strict=True,
        )
    }


@pytest.mark.parametrize(
    ("model", "micro_batches", "optimizer"),
    [("tiny-llama", 1, "adamw loop"), ("tiny-gpt2", 1, "adamw foreach")]
    + [("tiny-gpt2", 2, "adamw fused")]
    + [("mixed", count, optimizer) for count in (1, 2) for optimizer in OPTIMIZERS],
)
def test_the_transform_foresees_what_hooks_do(
    model: str, micro_batches: int, optimizer: str, machine: Any
) -> None:
    """Kernels, births, deaths and accesses equal those recorded of a loop with early steps."""
    training = Training(model, optimizer, micro_batches)
    plain = training.recorded()
    foreseen = transform_trace(plain, IN_BACKWARD)
    hooked = training.recorded(SteppingOrder.of_plan(unmoved_plan(plain, machine)))
    assert foreseen.kernels.op.tolist() == hooked.kernels.op.tolist()
    assert foreseen.kernels.op.tolist() != plain.kernels.op.tolist()
    assert foreseen.kernels.signature.tolist() == hooked.kernels.signature.tolist()
    assert lifetimes(foreseen) == lifetimes(hooked)
    assert accesses(foreseen) == accesses(hooked)


def with_counts_on_the_host(trace: Trace) -> Trace:
    """As a GPU's trace has it: no storage is known of an optimizer's scalars."""
    accesses, storages = trace.accesses, trace.storages
    in_step = trace.kernels.phase[accesses.kernel] == "optimizer"
    is_known = np.ones(len(storages), dtype=bool)
    is_known[accesses.storage[in_step]] = storages.nbytes[accesses.storage[in_step]] > 8
    number = np.cumsum(is_known) - 1
    kept = accesses.take(is_known[accesses.storage])
    return replace(
        trace,
        storages=replace(storages.take(is_known), storage=np.arange(is_known.sum())),
        accesses=replace(kept, storage=number[kept.storage]),
    )


@pytest.mark.parametrize("optimizer", ["adamw loop", "adamw foreach"])
@pytest.mark.parametrize("two_groups", [False, True])
def test_counts_of_steps_on_the_host(optimizer: str, two_groups: bool) -> None:
    """Kernels that access nothing in the trace move with those around them."""
    training = Training("mixed", optimizer, 2, two_groups=two_groups)
    trace = training.recorded()
    seen = transform_trace(trace, IN_BACKWARD).kernels
    unseen = transform_trace(with_counts_on_the_host(trace), IN_BACKWARD).kernels
    assert unseen.op.tolist() == seen.op.tolist()
    assert unseen.signature.tolist() == seen.signature.tolist()


@pytest.mark.parametrize(
    ("model", "micro_batches", "optimizer"),
    [("tiny-gpt2", 2, "adamw fused"), ("mixed", 1, "adamw loop")]
    + [("mixed", 2, optimizer) for optimizer in OPTIMIZERS],
)
def test_results_are_those_of_plain_training(
    model: str, micro_batches: int, optimizer: str, machine: Any
) -> None:
    """With everything moved, with a greedy plan, and with none; the plan is met to the kernel."""
    training = Training(model, optimizer, micro_batches)
    plain, trace = training.trained(), training.recorded()
    transformed = transform_trace(trace, IN_BACKWARD)
    everything = moving_plan(trace, machine)
    tight = machine(gpu_memory=transformed.peak_allocated_bytes * 9 // 10)
    for plan in (
        everything,
        teraio.plan(trace, tight, planner="greedy", transform=IN_BACKWARD),
        unmoved_plan(trace, machine),
    ):
        *result, report = training.trained(plan)
        assert_same_bits(plain, result)
        assert report.drift == 0, report.first_drift
        assert report.moves_found == report.moves_planned == len(plan.moves)
        assert report.peak_bytes <= report.budget_bytes
        if plan is everything:
            assert report.demand_fetches == 0


def test_gradients_that_the_loop_keeps(machine: Any) -> None:
    """``zero_grad(set_to_none=False)``: they are not dropped, and no step is taken twice."""
    training = Training(optimizer="adamw foreach", set_to_none=False, two_groups=True)
    plain, trace = training.trained(), training.recorded()
    plan = unmoved_plan(trace, machine)
    assert SteppingOrder.of_plan(plan).kept
    *result, report = training.trained(plan)
    assert_same_bits(plain, result)
    assert report.drift == 0, report.first_drift


def test_an_unmodified_loop_is_noticed(machine: Any) -> None:
    """Without model and optimizer the first step comes at the end, the others early."""
    training = Training()
    plain, trace = training.trained(), training.recorded()
    *result, report = training.trained(unmoved_plan(trace, machine), is_given=False)
    assert_same_bits(plain, result)
    assert report.drift == 0, report.first_drift
    assert report.substituted_kernels == 0


def test_all_hooks_are_gone_afterwards(machine: Any) -> None:
    """Training goes on as ever, and with clipping again."""
    training = Training()
    plan = unmoved_plan(training.recorded(), machine)
    model, optimizer = training.build()
    with teraio.execute(plan, model, optimizer):
        training.step(model, optimizer, 0)
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    training.loss(model, 1).backward()
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 0


def fewer(training: Training) -> Callable[..., float]:
    """Every other iteration has one micro-batch of the two."""

    def step(model: Any, optimizer: Any, number: int) -> float:
        optimizer.zero_grad()
        total = 0.0
        for micro_batch in range(2 - number % 2):
            loss = training.loss(model, 10 * number + micro_batch)
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    return step


def unused(training: Training) -> Callable[..., float]:
    """A layer takes part in the first micro-batch only, or in none."""

    def step(model: Any, optimizer: Any, number: int) -> float:
        optimizer.zero_grad()
        total = 0.0
        for micro_batch in range(2):
            loss = training.loss(model, 10 * number + micro_batch)
            if number > 1 and (micro_batch or number > 3):
                loss = training.loss(model.last, 10 * number + micro_batch).pow(2).mean()
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    return step


def scheduled(training: Training) -> Callable[..., float]:
    """A new learning rate in every iteration, after the step."""

    def step(model: Any, optimizer: Any, number: int) -> float:
        total = training.step(model, optimizer, number)
        optimizer.param_groups[0]["lr"] *= 0.5
        return total

    return step


@pytest.mark.parametrize("habit", [fewer, unused, scheduled])
@pytest.mark.parametrize("optimizer", ["adamw loop", "adamw foreach"])
@pytest.mark.filterwarnings("ignore::teraio.errors.OffloadWarning")
def test_other_iterations_than_the_recorded_ones(habit: Any, optimizer: str, machine: Any) -> None:
    """What did not step early steps with the loop's own call: the same bits."""
    training = Training(optimizer=optimizer)
    step = habit(training)
    plain = training.trained(step=step)
    *result, _ = training.trained(moving_plan(training.recorded(), machine), step=step)
    assert_same_bits(plain, result)


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adamw loop", "adamw foreach", "adamw fused"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_on_a_gpu(optimizer: str, micro_batches: int, machine: Any) -> None:
    """Autograd's own thread steps; counts of steps on the host access nothing in the trace."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    training = Training("mixed", optimizer, micro_batches, device="cuda")
    plain, trace = training.trained(), training.recorded()
    hooked = training.recorded(SteppingOrder.of_plan(unmoved_plan(trace, machine)))
    foreseen = transform_trace(trace, IN_BACKWARD)
    assert foreseen.kernels.op.tolist() == hooked.kernels.op.tolist()
    assert foreseen.kernels.signature.tolist() == hooked.kernels.signature.tolist()
    for plan in (moving_plan(trace, machine), unmoved_plan(trace, machine)):
        *result, report = training.trained(plan)
        assert_same_bits(plain, result)
        assert report.drift == 0, report.first_drift
        assert report.moves_found == report.moves_planned
