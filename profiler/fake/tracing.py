"""The door to traces without a GPU: train on fake tensors, record, unroll, price."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from teraio.profiler.costs.pricing import price
from teraio.profiler.costs.timings import Timings
from teraio.traces.unrolling import micro_batches_to_trace, unroll

from teraio.errors import InputError
from teraio.profiler.fake.fake_mode import KNOWN_DIFFERENCES, fake_tensors
from teraio.profiler.fake.fake_recorder import FakeRecorder
from teraio.profiler.operators import AUTOMATIC_BUCKETS
from teraio.profiler.trace_building import build_trace
from teraio.profiler.training.loop import Training, build_training
from teraio.profiler.training.setup import TrainingSetup
from teraio.traces.trace import Trace

DEFAULT_GPU = "h100-nvl"

Progress = Callable[[str], None]


def trace(
    model: Any,
    *,
    sequence: int,
    micro_batch_size: int,
    gpu: str = DEFAULT_GPU,
    timings: Timings | None = None,
    bucket_bytes: int = AUTOMATIC_BUCKETS,
    progress: Progress | None = None,
    **options: Any,
) -> Trace:
    """The trace of a training iteration that never ran; nothing of the model's size is allocated.

    ``model`` and ``options`` (``micro_batches``, ``stages``, ``dtype``, ...) as in
    :class:`TrainingSetup`. Kernels take as long as ``timings`` says, the others what the table of
    ``gpu`` predicts. Raises InputError, which names operator and module, for what fake tensors
    cannot do: values that decide shapes or the way on.
    """
    setup = make_setup(model, sequence=sequence, micro_batch_size=micro_batch_size, **options)
    recorded = record(setup, bucket_bytes=bucket_bytes, progress=progress)
    if progress is not None:
        progress(f"unrolling to {setup.micro_batches} micro-batches")
    unrolled = unroll(recorded, setup.micro_batches)
    return price(unrolled, gpu=gpu, precision=setup.dtype, timings=timings)


def make_setup(model: Any, **options: Any) -> TrainingSetup:
    """The setup of these options. Raises InputError for an unknown one."""
    unknown = sorted(set(options) - set(TrainingSetup.__dataclass_fields__))
    if unknown:
        known = ", ".join(TrainingSetup.__dataclass_fields__)
        raise InputError(f"trace option {unknown[0]}: unknown; there are {known}")
    return TrainingSetup(model=model, **options)


def record(
    setup: TrainingSetup,
    *,
    bucket_bytes: int = AUTOMATIC_BUCKETS,
    progress: Progress | None = None,
) -> Trace:
    """The trace of as few micro-batches as can be unrolled, or all; its kernels take no time."""
    micro_batches = min(setup.micro_batches, micro_batches_to_trace(setup.warmup_forwards))
    with fake_tensors():
        if progress is not None:
            progress("building the model")
        training = build_training(setup)
        recorder = FakeRecorder(bucket_bytes=bucket_bytes, progress=progress)
        recorder.names.add_model(training.model)
        recorder.names.add_optimizer(training.optimizer)
        with recorder:
            _run_iterations(training, micro_batches)
        return _finish(recorder, setup)


def _run_iterations(training: Training, micro_batches: int) -> None:
    # The first creates the optimizer's state; lifetimes that reach over the cut need two more.
    training.run_iteration(min(micro_batches, training.setup.stages))
    for _ in range(2):
        training.run_iteration(micro_batches)


def _finish(recorder: FakeRecorder, setup: TrainingSetup) -> Trace:
    name = setup.model if isinstance(setup.model, str) else type(setup.model).__name__
    made = build_trace(recorder, model=name)
    metadata = replace(
        made.metadata,
        rank=setup.rank,
        world_size=setup.world_size,
        known_differences=[*KNOWN_DIFFERENCES, *made.metadata.known_differences],
    )
    return replace(made, metadata=metadata)
