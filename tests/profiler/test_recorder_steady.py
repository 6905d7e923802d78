"""Which iteration becomes the trace: never the first, never a skipped or an irregular one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from teraio.errors import InputError, OffloadWarning
from teraio.profiler import profile
from teraio.traces.trace import Trace

ADAMW_STATE = {"step", "exp_avg", "exp_avg_sq"}


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def record(iteration: Callable[[int], Any], iterations: int, *known: Any) -> Trace:
    with profile(*known) as session:
        for index in range(iterations):
            iteration(index)
    return session.trace


def state_names(trace: Trace) -> set[str]:
    names = trace.storages.name[trace.storages.kind == "optimizer_state"]
    return {name.rpartition(".")[2] for name in names}


class Skipping:
    """Trains like a GradScaler that skips the optimizer step of the given iterations."""

    def __init__(self, skipped: set[int]) -> None:
        self.model = perceptron()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.skipped = skipped

    def __call__(self, index: int) -> None:
        self.model(torch.randn(4, 8)).mean().backward()
        if index not in self.skipped:
            self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture
def plain_trace() -> Trace:
    training = Skipping(set())
    return record(training, 6, training.model, training.optimizer)


def test_first_step_is_never_the_template(plain_trace: Trace) -> None:
    """Step 0 creates the optimizer's state; in the trace the state exists from the start."""
    persistent = plain_trace.is_persistent
    kinds = plain_trace.storages.kind
    assert (kinds[persistent] == "optimizer_state").sum() == 3 * 4
    assert state_names(plain_trace) == ADAMW_STATE
    assert persistent[kinds == "optimizer_state"].all()


@pytest.mark.parametrize("skipped", [{0}, {1}, {2}, {0, 3}, {2, 4}])
def test_skipped_steps_do_not_change_the_trace(plain_trace: Trace, skipped: set[int]) -> None:
    training = Skipping(skipped)
    trace = record(training, 12, training.model, training.optimizer)
    assert trace.kernels.op.tolist() == plain_trace.kernels.op.tolist()
    assert trace.storages.equals(plain_trace.storages)
    assert trace.accesses.equals(plain_trace.accesses)


def test_the_real_gradient_scaler_skips_its_first_step() -> None:
    """Its scale is too large at first: gradients overflow, the step is skipped, the scale falls."""
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1e38, backoff_factor=1e-30)

    def iteration(_: int) -> None:
        scaler.scale(1e3 * model(torch.randn(4, 8)).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    trace = record(iteration, 12, model, optimizer)
    assert (trace.kernels.op == "aten.randn.default").sum() == 1
    assert state_names(trace) == ADAMW_STATE
    assert "aten._amp_foreach_non_finite_check_and_unscale_.default" in trace.kernels.op


def test_two_optimizers_that_step_back_to_back_make_one_iteration() -> None:
    first, second = perceptron(), perceptron()
    optimizers = [
        torch.optim.AdamW(first.parameters()),
        torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9),
    ]

    def iteration(_: int) -> None:
        second(first(torch.randn(4, 8))).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()

    trace = record(iteration, 7)
    assert trace.metadata.optimizer_steps == 2
    assert trace.metadata.optimizer == "AdamW, SGD"
    assert (trace.kernels.op == "aten.randn.default").sum() == 1
    assert state_names(trace) == ADAMW_STATE | {"momentum_buffer"}


class Adversarial:
    """A generator's step after every ``critic_steps`` steps of the discriminator."""

    def __init__(self, critic_steps: int) -> None:
        self.generator, self.discriminator = perceptron(), perceptron()
        self.generator_optimizer = torch.optim.AdamW(self.generator.parameters())
        self.discriminator_optimizer = torch.optim.AdamW(self.discriminator.parameters())
        self.critic_steps = critic_steps

    def __call__(self, index: int) -> None:
        data = torch.randn(4, 8)
        if index % (self.critic_steps + 1) < self.critic_steps:
            self.discriminator_optimizer.zero_grad()
            fake = self.discriminator(self.generator(data).detach())
            (self.discriminator(data).mean() - fake.mean()).backward()
            self.discriminator_optimizer.step()
        else:
            self.generator_optimizer.zero_grad()
            (-self.discriminator(self.generator(data)).mean()).backward()
            self.generator_optimizer.step()


@pytest.mark.parametrize("critic_steps", [1, 2, 5])
def test_alternating_optimizers_make_one_iteration(critic_steps: int) -> None:
    """Also where one optimizer steps often enough in a row to look steady by itself."""
    trace = record(Adversarial(critic_steps), 4 * (critic_steps + 1) + 1)
    assert trace.metadata.optimizer_steps == critic_steps + 1
    assert (trace.kernels.op == "aten.randn.default").sum() == critic_steps + 1


def test_gradient_accumulation_makes_one_iteration_of_several_micro_batches() -> None:
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters())

    def iteration(_: int) -> None:
        for _ in range(3):
            loss = model(torch.randn(4, 8)).mean() / 3
            loss.backward()
            loss.item()
        optimizer.step()
        optimizer.zero_grad()

    trace = record(iteration, 6, model, optimizer)
    kernels = trace.kernels
    assert trace.metadata.micro_batches == 3
    assert trace.metadata.optimizer_steps == 1
    forward = kernels.phase == "forward"
    assert set(kernels.micro_batch[forward].tolist()) == {0, 1, 2}
    assert set(kernels.micro_batch[kernels.phase == "optimizer"].tolist()) == {-1}
    assert (kernels.op[forward] == "aten.relu.default").sum() == 3


def test_optimizer_in_backward_makes_one_iteration_of_all_its_steps() -> None:
    model = perceptron()
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    with pytest.warns(OffloadWarning, match="inside the backward pass"):
        trace = record(lambda _: model(torch.randn(4, 8)).mean().backward(), 8, model)
    assert trace.metadata.optimizer_steps == 4
    assert (trace.kernels.op == "aten.randn.default").sum() == 1


def test_loops_without_optimizer_end_their_iterations_by_step() -> None:
    model = perceptron()
    with profile(model) as session:
        for _ in range(6):
            model(torch.randn(4, 8)).sum()
            session.step()
    assert session.trace.metadata.optimizer_steps == 0
    assert session.trace.kernels.op.tolist().count("aten.addmm.default") == 2


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_too_few_steps_are_refused_with_the_number_needed(steps: int) -> None:
    training = Skipping(set())
    with pytest.raises(InputError, match=rf"{steps} optimizer steps? recorded.* at least 3"):
        record(training, steps, training.model, training.optimizer)


def test_three_steps_suffice_but_scratch_memory_stays_unknown() -> None:
    training = Skipping(set())
    with pytest.warns(OffloadWarning, match="too few iterations"):
        trace = record(training, 3, training.model, training.optimizer)
    assert trace.kernels.workspace_bytes.sum() == 0


def test_a_loop_that_never_repeats_is_refused_with_the_first_difference() -> None:
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters())

    def iteration(index: int) -> None:
        model(torch.zeros(4 + index, 8)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    message = r"steps 4 and 5 first differ at kernel 1 \(aten.addmm.default in 0\): other shapes"
    with pytest.raises(InputError, match=message):
        record(iteration, 6, model, optimizer)


def test_a_leak_is_refused_and_named() -> None:
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU())
    optimizer = torch.optim.AdamW(model.parameters())
    kept = []

    def iteration(_: int) -> None:
        output = model(torch.randn(600, 64))
        kept.append(output.detach())
        output.mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with pytest.raises(InputError, match=r"leaves 2.46 MB .* \(aten.relu.default in 1\)"):
        record(iteration, 6, model, optimizer)


def test_done_comes_early_and_further_iterations_run_unwatched() -> None:
    training = Skipping(set())
    lines: list[str] = []
    with profile(training.model, training.optimizer, progress=lines.append) as session:
        done_after = next(i for i in endless(training) if session.done)
        trace = session.trace
        assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
        training(0)
    assert done_after == 7
    assert len(lines) == 5
    assert session.trace is trace


def endless(training: Skipping) -> Iterator[int]:
    for index in range(100):
        training(index)
        yield index


def test_the_trace_is_not_there_while_recording() -> None:
    with profile() as session, pytest.raises(InputError, match="still recording"):
        _ = session.trace
