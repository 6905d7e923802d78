"""Records an iteration of fake tensors: nothing is computed, nothing of the model is allocated."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TypeAlias

import torch

from teraio.profiler.fake.fake_mode import KNOWN_DIFFERENCES, fake_tensors
from teraio.profiler.fake.fake_recorder import FakeRecorder
from teraio.profiler.fake.gpu_operators import gpu_operators
from teraio.profiler.fake.refusals import BuildingMode, Refusals
from teraio.profiler.models import MoeConfig, model_config
from teraio.profiler.models.sizes import ModelConfig
from teraio.profiler.operators import AUTOMATIC_BUCKETS
from teraio.profiler.trace_building import build_trace
from teraio.profiler.training.loop import Training, build_training
from teraio.profiler.training.model_sources import OwnModel, model_label, resolve_model
from teraio.profiler.training.setup import TrainingSetup
from teraio.traces.trace import Trace

Progress = Callable[[str], None]
Source: TypeAlias = str | ModelConfig | OwnModel


def record(
    setup: TrainingSetup,
    micro_batches: int | None = None,
    *,
    bucket_bytes: int = AUTOMATIC_BUCKETS,
    assume_scalars: bool = False,
    progress: Progress | None = None,
) -> Trace:
    """The trace of an iteration of so many micro-batches (default: the setup's).

    Its kernels take no time: see :mod:`teraio.profiler.costs.pricing`. ``assume_scalars``: code
    that asks for the value of a tensor is told 1, and the trace says where. Raises InputError,
    which names operator and module, for what fake tensors cannot do.
    """
    if torch.cuda.is_available():
        # Fake tensors do so at first use, which checkpointing refuses inside a forward pass.
        torch.cuda.init()
    # One's own function is imported here: what a module makes on import must be real.
    source = resolve_model(setup.model)
    label, (source, differences) = model_label(source), _without_routing(source)
    setup = replace(setup, model=source, micro_batches=micro_batches or setup.micro_batches)
    own = source if isinstance(source, OwnModel) else None
    refusals = Refusals(
        assume_scalars=assume_scalars,
        unread_values_in=own.unread_values_in if own else frozenset(),
    )
    with (
        refusals.explained(),
        fake_tensors(),
        _fake_ranks(setup),
        own.tracing() if own else nullcontext(),
    ):
        if progress is not None:
            progress("building the model")
        with BuildingMode(refusals):
            training = build_training(setup)
        refusals.model = training.model
        recorder = FakeRecorder(bucket_bytes=bucket_bytes, progress=progress, refusals=refusals)
        recorder.names.add_model(training.model)
        recorder.names.add_optimizer(training.optimizer)
        with recorder, gpu_operators(setup.attention) if own else nullcontext():
            _run_iterations(training)
        made = _finish(recorder, setup, label)
    return _with_differences(
        made, [*refusals.assumptions(), *differences, *_operators_of_cpus(made)]
    )


def _without_routing(source: Source) -> tuple[Source, list[str]]:
    """Experts chosen by the data have no sizes without it; each then serves as many tokens."""
    if isinstance(source, OwnModel):
        return source, []
    config = model_config(source)
    if not isinstance(config, MoeConfig):
        return source, []
    return replace(config, routing="balanced"), ["every expert serves equally many tokens"]


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


def _finish(recorder: FakeRecorder, setup: TrainingSetup, label: str) -> Trace:
    made = build_trace(recorder, model=label)
    return replace(
        made, metadata=replace(made.metadata, rank=setup.rank, world_size=setup.world_size)
    )


def _operators_of_cpus(made: Trace) -> list[str]:
    """One line for each operator that no GPU has (recurrent layers of oneDNN, attention)."""
    names = dict.fromkeys(made.kernels.op.tolist())
    chosen = [name for name in names if "mkldnn" in name or "_for_cpu" in name]
    return [f"{name} is the CPU's; a GPU runs another and keeps other memory" for name in chosen]


def _with_differences(made: Trace, differences: list[str]) -> Trace:
    known = [*KNOWN_DIFFERENCES, *differences, *made.metadata.known_differences]
    return replace(made, metadata=replace(made.metadata, known_differences=known))
