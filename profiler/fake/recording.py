"""Records an iteration of fake tensors: nothing is computed, nothing of the model is allocated."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from teraio.profiler.fake.fake_mode import KNOWN_DIFFERENCES, fake_tensors
from teraio.profiler.fake.fake_recorder import FakeRecorder
from teraio.profiler.fake.gpu_operators import gpu_operators
from teraio.profiler.fake.refusals import BuildingMode, Refusals
from teraio.profiler.operators import AUTOMATIC_BUCKETS
from teraio.profiler.trace_building import build_trace
from teraio.profiler.training.loop import Training, build_training
from teraio.profiler.training.model_sources import OwnModel, model_label, resolve_model
from teraio.profiler.training.setup import TrainingSetup
from teraio.traces.trace import Trace

Progress = Callable[[str], None]


def record(
    setup: TrainingSetup,
    micro_batches: int | None = None,
    *,
    bucket_bytes: int = AUTOMATIC_BUCKETS,
    assume_scalars: bool = False,
    progress: Progress | None = None,
) -> Trace:
    """The trace of an iteration of so many micro-batches (default: the setup's).

    Its kernels' times mean nothing: see :mod:`teraio.profiler.costs.pricing`. ``assume_scalars``:
    code that asks for the value of a tensor is told 1, and the trace says where. Raises InputError,
    which names operator and module, for what fake tensors cannot do.
    """
    # One's own function is imported here: what a module makes on import must be real.
    source = resolve_model(setup.model)
    setup = replace(setup, model=source, micro_batches=micro_batches or setup.micro_batches)
    is_own = isinstance(source, OwnModel)
    refusals = Refusals(
        assume_scalars=assume_scalars,
        unread_values_in=source.unread_values_in if is_own else frozenset(),
    )
    with (
        refusals.explained(),
        fake_tensors(),
        _fake_ranks(setup),
        source.tracing() if is_own else nullcontext(),
    ):
        if progress is not None:
            progress("building the model")
        with BuildingMode(refusals):
            training = build_training(setup)
        refusals.model = training.model
        recorder = FakeRecorder(bucket_bytes=bucket_bytes, progress=progress, refusals=refusals)
        recorder.names.add_model(training.model)
        recorder.names.add_optimizer(training.optimizer)
        with recorder, gpu_operators(setup.attention) if is_own else nullcontext():
            _run_iterations(training)
        return _finish(recorder, setup, refusals)


def _fake_ranks(setup: TrainingSetup) -> AbstractContextManager[None]:
    """The other ranks of parallel training, where there are any."""
    if setup.world_size == 1:
        return nullcontext()
    from teraio.profiler.training.fake_group import fake_process_group

    return fake_process_group(setup.rank, setup.world_size)


def _run_iterations(training: Training) -> None:
    # The first creates the optimizer's state; lifetimes that reach over the cut need two more.
    training.run_iteration(min(training.setup.micro_batches, training.setup.stages))
    for _ in range(2):
        training.run_iteration()


def _finish(recorder: FakeRecorder, setup: TrainingSetup, refusals: Refusals) -> Trace:
    made = build_trace(recorder, model=model_label(setup.model))
    metadata = replace(
        made.metadata,
        rank=setup.rank,
        world_size=setup.world_size,
        known_differences=[
            *KNOWN_DIFFERENCES,
            *refusals.assumptions(),
            *made.metadata.known_differences,
        ],
    )
    return replace(made, metadata=metadata)
