"""Transforms by name, and optimizer-in-backward on traces made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from tests.traces.optimizer_traces import (
    LISTS,
    LOOP,
    PASSES,
    Kernel,
    described,
    lifetimes,
    training_trace,
)

import teraio
from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Plan
from teraio.contracts.signatures import kernel_signature
from teraio.errors import InputError
from teraio.planner.plan_building import plan_of_original
from teraio.traces.trace import Trace
from teraio.traces.transforms import TRANSFORMS, trace_of_plan, transform_trace

IN_BACKWARD = "optimizer-in-backward"
PASSES_WITHOUT_VIEW: tuple[Kernel, ...] = (
    ("backward", "aten.relu_backward", "back:r further:n"),
    PASSES[4],
)


def moved(trace: Trace) -> Trace:
    return transform_trace(trace, IN_BACKWARD)


def step_of(name: str, first: Kernel, kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
    """The first kernel of a parameter's step, which takes the view along, and the others."""
    count = (first[0], first[1], f"{name}.grad: {name}.step:rw")
    rest = [k for k in kernels if f"{name}.exp_avg" in k[2] or k[2] == f"{name}.step:r"]
    return (count, *rest)


def test_a_loop_over_parameters_steps_each_after_its_gradient() -> None:
    """That of b comes between its gradient and the rest of the backward pass; that of a is last."""
    trace = training_trace(PASSES + LOOP)
    assert described(trace) == list(PASSES + LOOP)
    result = moved(trace)
    expected = PASSES[:3] + step_of("b", LOOP[4], LOOP)
    expected += PASSES_WITHOUT_VIEW + step_of("a", LOOP[0], LOOP)
    assert described(result) == list(expected)
    assert lifetimes(result) == {
        "hidden": (0, 12),
        "loss": (1, 12),
        "back": (2, 12),
        "b.grad": (2, 6),
        "further": (7, 12),
        "a.grad": (8, 12),
    }
    assert result.ideal_seconds == pytest.approx(trace.ideal_seconds)
    assert result.metadata == trace.metadata


def test_lists_over_buckets_are_moved_and_counts_of_steps_divided() -> None:
    """One parameter per bucket; the kernel that counts for both runs once for each."""
    trace = training_trace(PASSES + LISTS)
    result = moved(trace)
    expected = PASSES[:3] + step_of("b", LISTS[0], LISTS)
    expected += PASSES_WITHOUT_VIEW + step_of("a", LISTS[0], LISTS)
    assert described(result) == list(expected)
    for kernel in (3, 9):
        assert result.kernels.duration_seconds[kernel] == pytest.approx(0.5e-3)
        signature = kernel_signature(LISTS[0][1], [((), "torch.float32")])
        assert result.kernels.signature[kernel] == signature
    assert result.ideal_seconds == pytest.approx(trace.ideal_seconds)


@pytest.mark.parametrize("kernels", [LOOP, LISTS], ids=["loop", "lists"])
def test_counts_of_steps_on_the_host(kernels: tuple[Kernel, ...]) -> None:
    """Kernels that access nothing move as they would if one saw what they use."""
    seen = moved(training_trace(PASSES + kernels))
    unseen = moved(training_trace(PASSES + kernels, without=".step"))
    assert unseen.kernels.op.tolist() == seen.kernels.op.tolist()
    if kernels is LISTS:
        assert unseen.kernels.signature[3] == seen.kernels.signature[3]
    assert lifetimes(unseen) == lifetimes(seen)


def test_a_bucket_steps_after_its_last_gradient() -> None:
    """Both parameters in one list: after the backward pass, as recorded, but gradients die."""
    kernels = (
        ("optimizer", "aten._foreach_add_.Scalar", "a.grad: a.step:rw b.step:rw"),
        ("optimizer", "aten._foreach_sub_.List", "a:rw b:rw a.grad:r b.grad:r"),
    )
    trace = training_trace(PASSES + kernels)
    assert described(moved(trace)) == described(trace)


def test_a_gradient_that_is_added_to_is_complete_right_after() -> None:
    """As in the last of several micro-batches; no view tells."""
    passes = (
        *PASSES[:3],
        ("backward", "aten.mm_backward", "b.grad: loss:r more:n"),
        ("backward", "aten.add_.Tensor", "b.grad:rw more:r"),
        ("backward", "aten.mm_backward", "back:r a.grad:n"),
    )
    result = moved(training_trace(passes + LOOP))
    steps_of_b = (("optimizer", LOOP[4][1], "b.step:rw"), *step_of("b", LOOP[4], LOOP)[1:])
    expected = passes[:5] + steps_of_b + passes[5:] + step_of("a", LOOP[0], LOOP)
    assert described(result) == list(expected)
    assert lifetimes(result)["b.grad"] == (2, 8)


def test_a_gradient_of_an_earlier_micro_batch_waits_for_the_loop() -> None:
    """A hook cannot know that no other will come; b steps after a, and its gradient stays."""
    trace = training_trace(PASSES + LOOP)
    micro_batch = np.array([0, 0, 0, 1, 1] + [-1] * len(LOOP))
    late = replace(
        trace,
        kernels=replace(trace.kernels, micro_batch=micro_batch),
        metadata=replace(trace.metadata, micro_batches=2),
    )
    result = moved(late)
    assert described(result) == described(trace)
    assert lifetimes(result) == lifetimes(trace) | {"a.grad": (4, 8)}


def test_gradients_that_the_loop_keeps_stay() -> None:
    """``zero_grad(set_to_none=False)``: they live through the cycle before and after."""
    trace = training_trace(PASSES + LOOP)
    is_kept = trace.storages.name == "b.grad"
    births, deaths = trace.storages.birth.copy(), trace.storages.death.copy()
    births[is_kept] = deaths[is_kept] = -1
    result = moved(replace(trace, storages=replace(trace.storages, birth=births, death=deaths)))
    assert "b.grad" not in lifetimes(result)
    assert lifetimes(result)["a.grad"] == (8, 12)


def test_scaling_by_a_pipeline_moves_along() -> None:
    """Its schedule divides all gradients after the last backward pass, one kernel each."""
    division = "aten.div_.Tensor"
    scaling = (("other", division, "a.grad:rw"), ("other", division, "b.grad:rw"))
    result = moved(training_trace(PASSES + scaling + LOOP))
    steps_of_b = (scaling[1], ("optimizer", LOOP[4][1], "b.step:rw"))
    assert described(result)[3:5] == [("other", division, "b.grad:rw"), steps_of_b[1]]
    assert described(result)[10] == ("other", division, "a.grad:rw")


REFUSED: dict[str, tuple[tuple[Kernel, ...], int, str]] = {
    "clipping": (
        (*PASSES, ("other", "aten.linalg_vector_norm", "a.grad:r b.grad:r norm:n"), *LOOP),
        1,
        r"kernel 5 \(aten.linalg_vector_norm\) uses [ab].grad after its gradient is complete",
    ),
    "scaling by something": (
        (*PASSES, ("other", "aten.div_.Tensor", "b.grad:rw hidden:r"), *LOOP),
        1,
        r"kernel 5 \(aten.div_.Tensor\) uses b.grad",
    ),
    "parameter read later": (
        (*PASSES[:4], ("backward", "aten.mm_backward", "b:r further:r a.grad:n"), *LOOP),
        1,
        r"kernel 4 \(aten.mm_backward\) uses b after",
    ),
    "norm inside the optimizer": (
        (*PASSES, ("optimizer", "aten.stack", "a.grad:r b.grad:r norm:n"), *LOOP),
        1,
        r"kernel 5 \(aten.stack\) of the optimizer uses 2 of 2 parameters",
    ),
    "buckets that overlap": (
        (*PASSES, *LISTS, ("optimizer", "aten._foreach_add_.List", "a:rw b:rw")),
        1,
        r"kernel 6 \(aten._foreach_lerp_.Scalar\) of the optimizer uses 1 of 2 parameters",
    ),
    "two steps": (PASSES + LOOP, 2, "the trace has 2"),
    "no optimizer": (PASSES, 1, "no kernels of an optimizer"),
    "a closure": (
        (*PASSES, *LOOP[:4], ("forward", "aten.mm", "a:r"), *LOOP[4:]),
        1,
        r"kernel 9 \(aten.mm\) runs inside the optimizer step",
    ),
    "no gradient": (
        (*PASSES[:4], ("optimizer", "aten.sub_.Tensor", "a:rw"), *LOOP[4:]),
        1,
        "makes no gradient for a,",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_results_is_refused(name: str) -> None:
    """Each message names the kernel, or what is missing."""
    kernels, optimizer_steps, message = REFUSED[name]
    with pytest.raises(InputError, match=message):
        moved(training_trace(kernels, optimizer_steps=optimizer_steps))


def test_unknown_names_and_options_are_named() -> None:
    """Those that exist are listed."""
    trace = training_trace(PASSES + LOOP)
    with pytest.raises(InputError, match=rf"transform: 'sideways' is not known.*{IN_BACKWARD}"):
        transform_trace(trace, "sideways")
    with pytest.raises(InputError, match="has no option 'late'"):
        transform_trace(trace, IN_BACKWARD, {"late": True})
    assert IN_BACKWARD in TRANSFORMS


@pytest.fixture
def planned(small_hardware: Hardware) -> tuple[Trace, Plan]:
    """A trace, and a plan for it in which parameters step early and something moves."""
    trace = training_trace(PASSES + LOOP)
    plan = teraio.plan(trace, small_hardware, gpu_memory=8200, transform=IN_BACKWARD)
    assert len(plan.moves)
    return trace, plan


def test_a_plan_refers_to_the_recorded_trace(planned: tuple[Trace, Plan]) -> None:
    """Its tables are about the transformed one, which everybody makes again from the recorded."""
    trace, plan = planned
    metadata, result = plan.metadata, trace_of_plan(trace, plan)
    assert (metadata.transform, dict(metadata.transform_options)) == (IN_BACKWARD, {})
    assert (metadata.trace_hash, metadata.ideal_seconds) == (trace.hash, trace.ideal_seconds)
    assert (
        plan.kernels.op.tolist() == result.kernels.op.tolist() == moved(trace).kernels.op.tolist()
    )
    verdict = teraio.verify(trace, plan)
    assert verdict.valid, verdict.violations
    assert verdict.fits
    timeline = teraio.simulate(trace, plan)
    assert timeline.metadata.iteration_seconds == pytest.approx(plan.predicted_seconds)
    assert timeline.metadata.ideal_seconds == trace.ideal_seconds
    untouched = teraio.plan(trace, plan.hardware, planner="ideal")
    assert trace_of_plan(trace, untouched) is trace


def test_the_verifier_judges_a_plan_by_its_transform(planned: tuple[Trace, Plan]) -> None:
    """A transform that cannot be made again, or none at all, is a violation and no error."""
    trace, plan = planned
    for name in ("sideways", None):
        wrong = replace(plan, metadata=replace(plan.metadata, transform=name))
        verdict = teraio.verify(trace, wrong)
        assert not verdict.valid
        assert verdict.violations[0].rule == "trace"


def test_only_one_transform_per_plan(planned: tuple[Trace, Plan]) -> None:
    """A planner that transforms by itself takes no other."""
    trace, plan = planned
    with pytest.raises(InputError, match=f"applies {IN_BACKWARD} itself"):
        plan_of_original(plan, trace, "recompute")
