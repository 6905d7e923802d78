"""Records an iteration of fake tensors: nothing is computed, nothing of the model is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from teraio.profiler.fake.fake_mode import KNOWN_DIFFERENCES, fake_tensors
from teraio.profiler.fake.fake_recorder import FakeRecorder
from teraio.profiler.operators import AUTOMATIC_BUCKETS
from teraio.profiler.trace_building import build_trace
from teraio.profiler.training.loop import Training, build_training
from teraio.profiler.training.setup import TrainingSetup
from teraio.traces.trace import Trace

Progress = Callable[[str], None]


def record(
    setup: TrainingSetup,
    micro_batches: int | None = None,
    *,
    bucket_bytes: int = AUTOMATIC_BUCKETS,
    progress: Progress | None = None,
) -> Trace:
    """The trace of an iteration of so many micro-batches (default: the setup's).

    Its kernels' times mean nothing: see :mod:`teraio.profiler.costs.pricing`. Raises InputError,
    which names operator and module, for what fake tensors cannot do.
    """
    micro_batches = micro_batches or setup.micro_batches
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
