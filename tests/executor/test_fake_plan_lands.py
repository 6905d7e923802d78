"""A plan made from a fake trace lands on a real run: its moves find their storages."""

from __future__ import annotations

import dataclasses
import functools
import gc
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import teraio
from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Plan
from teraio.errors import DriftError, InputError
from teraio.executor.execution import RunReport
from teraio.planner.policies.evict_everything import evict_everything
from teraio.profiler.costs.pricing import price
from teraio.profiler.fake.recording import record
from teraio.profiler.training.loop import build_training
from teraio.profiler.training.setup import TrainingSetup, reference_setup
from teraio.traces.trace import Trace

STEPS = 4
BUCKET_BYTES = 64 * 1024
Tensors = dict[str, torch.Tensor]


def setup_of(model: str, **options: Any) -> TrainingSetup:
    """Two micro-batches, gradients clipped, PyTorch's own choice of attention."""
    given = {"micro_batches": 2, "clip_norm": 1.0, "attention": "sdpa", **options}
    batch = {name: given.pop(name, None) for name in ("sequence", "micro_batch_size")}
    return reference_setup(model, **batch, options=given)


@functools.cache
def fake_trace(setup: TrainingSetup) -> Trace:
    """As the fake recorder makes it, of a GPU; every kernel takes half a millisecond."""
    trace = record(setup, bucket_bytes=BUCKET_BYTES)
    kernels = dataclasses.replace(
        trace.kernels,
        duration_seconds=np.full(trace.num_kernels, 5e-4),
        gap_before_seconds=np.zeros(trace.num_kernels),
    )
    metadata = dataclasses.replace(trace.metadata, device="cuda", allocator_rounding_bytes=512)
    return dataclasses.replace(trace, kernels=kernels, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Landed:
    """A run under a plan, and the plan as it was followed in the end."""

    report: RunReport
    plan: Plan
    followed: Plan

    @property
    def share_found(self) -> float:
        """Of the moves, those that found their storage in a steady iteration."""
        return self.report.moves_found / self.report.moves_planned

    def lost_moves(self) -> Any:
        """Rows of moves of storages that move less often than planned."""
        planned, followed = self.plan.moves.storage, self.followed.moves.storage
        count = len(self.followed.storages)
        fewer = np.bincount(followed, minlength=count) < np.bincount(planned, minlength=count)
        return np.flatnonzero(fewer[planned])


def trained(setup: TrainingSetup, plan: Plan | None, *, on: str = "cpu", **options: Any) -> Any:
    """(final parameters and optimizer state, Landed or None) of a run."""
    torch.manual_seed(0)
    training = build_training(setup, on)
    torch.manual_seed(1)
    result = None
    if plan is None:
        for _ in range(STEPS):
            training.run_iteration()
    else:
        with teraio.execute(plan, training.model, training.optimizer, **options) as run:
            for _ in range(STEPS):
                training.run_iteration()
            mode = run._mode  # The run lets go of it when it is over.
        assert mode is not None
        landing = mode.adaptation.landing
        result = Landed(run.report, plan, plan if landing is None else landing.plan)
    # What stays on a GPU counts in the budget of the run that follows.
    tensors = {name: p.detach().cpu().clone() for name, p in training.model.named_parameters()}
    for index, state in enumerate(training.optimizer.state.values()):
        tensors |= {f"{index}.{key}": value.cpu().clone() for key, value in state.items()}
    del training, state
    if on == "cuda":
        gc.collect()
    return tensors, result


@functools.cache
def plain_tensors(setup: TrainingSetup, on: str) -> Tensors:
    """What a run without a plan ends with; several plans are compared with it."""
    tensors: Tensors = trained(setup, None, on=on)[0]
    return tensors


def landed(setup: TrainingSetup, plan: Plan, **options: Any) -> Landed:
    """A run under the plan, which must give the bits of the plain run and stay in the budget."""
    plain = plain_tensors(setup, options.get("on", "cpu"))
    tensors, result = trained(setup, plan, **options)
    assert plain.keys() == tensors.keys()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in plain.items())
    assert result.report.peak_bytes <= result.report.budget_bytes
    return result  # type: ignore[no-any-return]


@pytest.fixture
def lands(machine: Callable[..., Hardware]) -> Callable[..., tuple[Landed, Landed]]:
    """Run under a greedy plan for 60 % of the peak, and under one in which all moves that may."""

    def land(planned: TrainingSetup, run: TrainingSetup) -> tuple[Landed, Landed]:
        trace = fake_trace(planned)
        tight = machine(gpu_memory=trace.peak_allocated_bytes * 6 // 10)
        greedy = teraio.plan(trace, tight, planner="greedy")
        assert len(greedy.moves) > 10
        everything = evict_everything(trace, machine(), tiers="host")
        return landed(run, greedy), landed(run, everything)

    return land


def options_of(model: str) -> dict[str, Any]:
    """Without dropout PyTorch has one kernel for attention on a CPU too."""
    return {"dropout": 0.0} if model == "tiny-gpt2" else {}


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gpt2", "tiny-t5"])
def test_same_kernels(model: str, lands: Any) -> None:
    """Nothing differs, and nothing has to be learnt."""
    for result in lands(setup_of(model), setup_of(model)):
        report = result.report
        assert result.share_found == 1
        assert (report.substituted_kernels, report.drift, report.demand_fetches) == (0, 0, 0)


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gpt2"])
def test_another_attention_kernel(model: str, lands: Any) -> None:
    """The GPU's attention has outputs of its own: sizes of statistics, seed and offset."""
    planned = setup_of(model, attention="efficient", **options_of(model))
    run = setup_of(model, **options_of(model))
    for result in lands(planned, run):
        report = result.report
        assert result.share_found >= 0.99
        assert (report.drift, report.demand_fetches) == (0, 0)
        # Three layers, forward and backward, two micro-batches.
        assert report.substituted_kernels == 12
        assert "flash_attention_for_cpu" in report.first_substituted
        assert "efficient_attention" in report.first_substituted


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gpt2", "tiny-t5"])
def test_another_number_of_attention_kernels(model: str, lands: Any) -> None:
    """One kernel for many, or many for one (T5 has a bias, for which a CPU has none). All is found
    but what the other attention does not have: explicit probabilities, copies of queries and keys.
    """
    options = options_of(model)
    attention = "efficient" if model == "tiny-t5" else "math"
    run = setup_of(model, **options)
    greedy, everything = lands(setup_of(model, attention=attention, **options), run)
    assert greedy.share_found >= 0.99
    assert greedy.report.substituted_kernels > 12
    plan = everything.plan
    where = r"attention" if model != "tiny-gpt2" else r"blocks\.\d+(\.query_key_value)?$"
    in_attention = [bool(re.search(where, name)) for name in plan.kernels.module]
    touched = plan.accesses.storage[np.array(in_attention)[plan.accesses.kernel]]
    lost = everything.lost_moves()
    assert len(lost) < 0.2 * len(plan.moves)
    assert np.isin(plan.moves.storage[lost], touched).all()
    assert everything.report.moves_found == len(everything.followed.moves)
    assert everything.report.demand_fetches < 0.2 * len(plan.moves)


@pytest.mark.parametrize(("planned", "run"), [("foreach", "for-loop"), ("for-loop", "foreach")])
def test_another_optimizer_implementation(planned: str, run: str, lands: Any) -> None:
    """Forward and backward are as planned. The optimizer is learnt, and what it updates has names;
    only between its own kernels, and those that clip, storages may lie idle otherwise.
    """
    results = lands(
        setup_of("tiny-llama", optimizer_implementation=planned),
        setup_of("tiny-llama", optimizer_implementation=run),
    )
    for result in results:
        moves, phase = result.plan.moves, result.plan.kernels.phase
        in_update = np.isin(phase, ["optimizer", "other"])
        is_elsewhere = ~(in_update[moves.after_kernel] & in_update[moves.before_kernel])
        followed = result.followed
        in_update = np.isin(followed.kernels.phase, ["optimizer", "other"])
        ends = followed.moves.after_kernel, followed.moves.before_kernel
        found_elsewhere = ~(in_update[ends[0]] & in_update[ends[1]])
        assert found_elsewhere.sum() >= 0.99 * is_elsewhere.sum() > 0
        assert result.report.moves_found >= 0.95 * len(followed.moves)
        assert result.report.substituted_kernels > 100
        assert result.report.drift > 0


def test_another_number_of_micro_batches(machine: Any) -> None:
    """Another training: counted as drift in every iteration, right all the same."""
    trace = fake_trace(setup_of("tiny-llama"))
    tight = machine(gpu_memory=trace.peak_allocated_bytes * 6 // 10)
    plan = teraio.plan(trace, tight, planner="greedy")
    report = landed(setup_of("tiny-llama", micro_batches=3), plan).report
    assert report.substituted_kernels == 0
    # Until the kernels of the third micro-batch are recognised as those of an earlier one.
    assert report.drift > (STEPS - 1) * 32
    assert report.demand_fetches > 0


def test_stop_on_drift_lets_other_kernels_pass(machine: Any) -> None:
    """Another attention kernel and optimizer are the planned training, more micro-batches not."""
    planned = setup_of("tiny-llama", attention="efficient", optimizer_implementation="foreach")
    plan = evict_everything(fake_trace(planned), machine(), tiers="host")
    result = landed(setup_of("tiny-llama"), plan, on_drift="stop")
    assert result.report.steps == STEPS
    assert result.report.substituted_kernels > 12
    with pytest.raises(DriftError, match="no longer follows its trace"):
        trained(setup_of("tiny-llama", micro_batches=1), plan, on_drift="stop")


def test_stop_on_drift_at_once_after_an_iteration_on_plan(machine: Any) -> None:
    """The first kernel that differs then stops the run, in the iteration in which it runs."""
    setup = setup_of("tiny-llama")
    plan = evict_everything(fake_trace(setup), machine(), tiers="host")
    training = build_training(setup)
    with teraio.execute(plan, training.model, training.optimizer, on_drift="stop") as run:
        for _ in range(2):
            training.run_iteration()
        assert run.report.drift == 0
        with pytest.raises(DriftError, match=r"aten\.ones\.default instead of"):
            torch.ones(3)


def test_messages_now_and_then(machine: Any) -> None:
    """Kernels of the first iteration that do not come again are not waited for."""
    setup = setup_of("tiny-llama", attention="efficient")
    plan = evict_everything(fake_trace(setup), machine(), tiers="host")
    training = build_training(setup_of("tiny-llama"))
    with teraio.execute(plan, training.model, training.optimizer) as run:
        for number in range(5):
            training.run_iteration()
            if number in (0, 3):
                next(training.model.parameters()).detach().norm()
    assert run.report.drift <= 2, run.report.first_drift
    assert run.report.moves_found >= 0.99 * run.report.moves_planned


def test_a_plan_for_a_gpu_where_there_is_none(machine: Any, monkeypatch: Any) -> None:
    """The model or the caller say that the CPU plays the GPU; nobody else does."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    planned = setup_of("tiny-llama", attention="efficient")
    plan = evict_everything(fake_trace(planned), machine(), tiers="host")
    with pytest.raises(InputError, match="--device cpu"):
        teraio.execute(plan)
    with teraio.execute(plan, device="cpu", on_drift="stop") as run:
        # As in a script: what makes the model comes before the first iteration.
        training = build_training(setup_of("tiny-llama"))
        for _ in range(3):
            training.run_iteration()
    assert (run.report.drift, run.report.substituted_kernels) == (0, 12)
    assert run.report.moves_found >= 0.99 * run.report.moves_planned


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize("attention", ["flash", "efficient"])
def test_lands_on_a_gpu(attention: Any) -> None:
    """Planned without a GPU for one attention kernel, run on a GPU with the one PyTorch takes.

    Strictly: with warn_only PyTorch takes cuDNN's attention, which strict runs leave out.
    """
    torch.use_deterministic_algorithms(True)
    try:
        sizes = {"layers": 3, "sequence": 512, "micro_batch_size": 4, "dtype": "bf16"}
        recorded = fake_trace(setup_of("bench-0.7b", attention=attention, **sizes))
        trace = price(recorded, gpu="h200", precision="bf16")
        budget_bytes = trace.peak_allocated_bytes * 6 // 10
        hardware = Hardware.preset("h200").with_budgets(gpu_memory=budget_bytes, host_memory="16GB")
        plan = teraio.plan(trace, hardware)
        result = landed(setup_of("bench-0.7b", **sizes), plan, on="cuda")
    finally:
        torch.use_deterministic_algorithms(False)
    assert result.share_found >= 0.99
    assert result.report.moves_planned > 20
