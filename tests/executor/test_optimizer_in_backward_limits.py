"""What steps in the backward pass cannot do is an error that says so, never another result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.executor.backward_training import (
    IN_BACKWARD,
    STEPS,
    Training,
    assert_same_bits,
    tensors_of,
    unmoved_plan,
)

import teraio
from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Plan
from teraio.errors import InputError
from teraio.profiler.profiling import Profile
from teraio.profiler.recorder import Recorder

pytestmark = pytest.mark.filterwarnings("ignore:scratch memory inside operators is unknown")

Loop = Callable[[Training, Any, Any, int], None]


def backward(training: Training, model: Any, number: int, passes: int = 2) -> None:
    for micro_batch in range(passes):
        training.loss(model, 10 * number + micro_batch).backward()


def clips(training: Training, model: Any, optimizer: Any, number: int) -> None:
    backward(training, model, number)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def clips_values(training: Training, model: Any, optimizer: Any, number: int) -> None:
    backward(training, model, number)
    torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
    optimizer.step()


def scales(training: Training, model: Any, optimizer: Any, number: int) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(training.loss(model, number)).backward()
    scaler.step(optimizer)


def changes_settings(training: Training, model: Any, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    backward(training, model, number)
    optimizer.param_groups[0]["lr"] *= 0.5
    optimizer.step()


def goes_back_more_often(training: Training, model: Any, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    backward(training, model, number, passes=3)
    optimizer.step()


def leaves_steps_out(training: Training, model: Any, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    backward(training, model, number)
    if number != 1:
        optimizer.step()


def gives_a_closure(training: Training, model: Any, optimizer: Any, number: int) -> None:
    optimizer.step(lambda: training.loss(model, number))


LOOPS: dict[Loop, str] = {
    clips: "gradients cannot be clipped",
    clips_values: "gradients cannot be clipped",
    scales: "before a GradScaler",
    changes_settings: r"a setting of the optimizer \(a learning rate\?\) changed",
    goes_back_more_often: "gets a gradient after it has stepped",
    leaves_steps_out: "gets a gradient after it has stepped",
    gives_a_closure: "was given a closure",
}


@pytest.fixture(scope="module")
def training() -> Training:
    return Training()


@pytest.fixture(scope="module")
def plan(training: Training) -> Plan:
    """Two micro-batches, and nothing between the last of them and the step.

    Every run touches all of its host memory: the preset's share of a large machine takes seconds.
    """
    hardware = Hardware.preset("cpu").with_budgets(host_memory="100MB")
    return unmoved_plan(training.recorded(), lambda: hardware)


def execute(plan: Plan, model: Any, optimizer: Any, step: Callable[[int], Any]) -> None:
    with teraio.execute(plan, model, optimizer):
        for number in range(STEPS):
            step(number)


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loops_that_results_would_depend_on(loop: Loop, training: Training, plan: Plan) -> None:
    """Refused where the loop departs from the trace, not one step later."""
    model, optimizer = training.build()
    with pytest.raises(InputError, match=LOOPS[loop]):
        execute(plan, model, optimizer, lambda n: loop(training, model, optimizer, n))
    groups = optimizer.param_groups
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())


class CountsTogether(torch.optim.SGD):
    """An optimizer with one count of steps for all parameters."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1
        super().step(closure)


def test_an_optimizer_that_counts_for_all_parameters(training: Training, plan: Plan) -> None:
    """Its count would grow with every parameter."""
    model, _ = training.build()
    optimizer = CountsTogether(model.parameters(), momentum=0.9)
    with pytest.raises(InputError, match="CountsTogether counts its steps for all parameters"):
        execute(plan, model, optimizer, lambda n: training.step(model, optimizer, n))


def test_hooks_before_the_step_are_refused(training: Training, plan: Plan) -> None:
    """They might change gradients that are gone by then."""
    model, optimizer = training.build()
    optimizer.register_step_pre_hook(lambda *_: None)
    with (
        pytest.raises(InputError, match="the optimizer has step pre-hooks"),
        teraio.execute(plan, model, optimizer),
    ):
        pass


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A group of one process."""
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_gradients_that_are_reduced_later(training: Training, plan: Plan) -> None:
    """Data parallel training sums gradients over ranks after the hooks on them."""
    model, _ = training.build()
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(parallel.parameters())
    with (
        pytest.raises(InputError, match="DistributedDataParallel reduces gradients"),
        teraio.execute(plan, parallel, optimizer),
    ):
        pass


def test_transforms_that_nobody_can_execute(plan: Plan) -> None:
    """Those of the policies are simulated only."""
    other = replace(plan, metadata=replace(plan.metadata, transform="recompute"))
    with pytest.raises(InputError, match=f"recompute, which is simulated only.*{IN_BACKWARD}"):
        teraio.execute(other)


def test_a_resumed_run_steps_early_at_once(training: Training, plan: Plan) -> None:
    """Its optimizer has a state: the first iteration goes by the plan, to the kernel."""

    def resumed() -> tuple[Any, Any]:
        model, optimizer = training.build()
        training.step(model, optimizer, 99)
        return model, optimizer

    model, optimizer = resumed()
    plain = [training.step(model, optimizer, n) for n in range(3)], tensors_of(model, optimizer)
    model, optimizer = resumed()
    with teraio.execute(plan, model, optimizer) as run:
        losses = [training.step(model, optimizer, n) for n in range(3)]
    assert_same_bits(plain, (losses, tensors_of(model, optimizer)))
    assert (run.report.warm_up_steps, run.report.drift) == (0, 0)


class PipelinedTraining(Training):
    """A pipeline of one stage, whose schedule divides gradients after the last backward pass."""

    factor: float = 2.0

    def step(self, model: Any, optimizer: Any, number: int) -> float:
        from torch.distributed.pipelining.stage import _PipelineStageBase

        class Stage:
            submod = model

        optimizer.zero_grad()
        backward(self, model, number)
        _PipelineStageBase.scale_grads(Stage(), self.factor)  # type: ignore[arg-type]
        optimizer.step()
        return 0.0


def test_a_pipeline_scales_gradients(machine: Any) -> None:
    """In the trace after all backward passes, in the run right before each step."""
    training = PipelinedTraining()
    plain = training.trained()
    model, optimizer = training.build()
    with Profile(Recorder(device_type="cpu")) as profile:
        for number in range(8):
            training.step(model, optimizer, number)
    plan = unmoved_plan(profile.trace, machine)
    *result, report = training.trained(plan)
    assert_same_bits(plain, result)
    assert report.drift == 0, report.first_drift
    training.factor = 4.0
    with pytest.raises(InputError, match="the loop divides gradients by 4"):
        training.trained(plan)
    with pytest.raises(InputError, match="divides no gradients in a pipeline's schedule"):
        training.trained(plan, step=Training.step.__get__(training))
