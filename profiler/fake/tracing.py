"""The door to traces without a GPU: train on fake tensors, record, unroll, price."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from teraio.errors import InputError
from teraio.profiler.costs.gpus import GpuSpec, as_gpu
from teraio.profiler.costs.pricing import price
from teraio.profiler.costs.timings import Timings, as_timings
from teraio.profiler.fake.recording import Progress, record
from teraio.profiler.models import MODELS
from teraio.profiler.operators import AUTOMATIC_BUCKETS
from teraio.profiler.training.model_sources import OwnModel, model_label, resolve_model
from teraio.profiler.training.setup import TrainingSetup, make_setup
from teraio.traces.trace import Trace
from teraio.traces.unrolling import micro_batches_to_trace, unroll

DEFAULT_GPU = "h100-nvl"


def trace(
    model: Any,
    *,
    sequence: int | None = None,
    micro_batch_size: int | None = None,
    gpu: str | GpuSpec = DEFAULT_GPU,
    timings: Timings | str | Path | None = None,
    assume_scalars: bool = False,
    bucket_bytes: int = AUTOMATIC_BUCKETS,
    progress: Progress | None = None,
    **options: Any,
) -> Trace:
    """The trace of a training iteration that never ran; nothing of the model's size is allocated.

    ``model``: a reference model's name or sizes; a function that makes one, or its name
    ``"module:function"`` (:mod:`teraio.profiler.training.model_sources` tells the contract);
    ``"transformers:NAME"`` or ``"transformers:CONFIG.json"``; or a saved trace's path, which gets
    the times of another GPU. ``options`` (``micro_batches``, ``stages``, ``dtype``, ...) are fields
    of :class:`teraio.profiler.training.TrainingSetup`. ``sequence`` defaults to a reference
    model's, ``micro_batch_size`` to 1.

    Kernels take as long as ``timings`` says, the others what the table of ``gpu`` predicts.
    ``assume_scalars``: code that asks for the value of a tensor is told 1, and the trace says
    where. Raises InputError, which names operator and module, for what fake tensors cannot do:
    values that decide shapes or the way on.
    """
    gpu, timings = as_gpu(gpu), as_timings(timings)
    if is_saved_trace(model):
        options |= {"sequence": sequence, "micro_batch_size": micro_batch_size}
        options |= {"assume_scalars": assume_scalars, "bucket_bytes": bucket_bytes or None}
        return _price_again(Path(model), gpu, timings, options)
    with _exits_refused(model):
        setup = make_setup(
            resolve_model(model),
            sequence=_sequence_of(model) if sequence is None else sequence,
            micro_batch_size=1 if micro_batch_size is None else micro_batch_size,
            **options,
        )
        recorded = _record(setup, assume_scalars, bucket_bytes, progress)
    recorded = replace(recorded, metadata=replace(recorded.metadata, tokens=setup.tokens))
    return price(recorded, gpu=gpu, precision=setup.dtype, timings=timings)


@contextlib.contextmanager
def _exits_refused(model: Any) -> Iterator[None]:
    """One's own code that ends the process would end the command as if all were well."""
    try:
        yield
    except SystemExit as error:
        raise InputError(
            f"model {model_label(model)}: its code ends the process (sys.exit({error.code!r})); "
            'leave that to what runs under `if __name__ == "__main__"`'
        ) from error


def is_saved_trace(model: Any) -> bool:
    """Whether ``model`` is the path of a trace, not the name of a model."""
    if isinstance(model, Path):
        return True
    if not isinstance(model, str) or model in MODELS:
        return False
    return model.rstrip("/").endswith(".trace") or Path(model).is_dir()


def _record(
    setup: TrainingSetup, assume_scalars: bool, bucket_bytes: int, progress: Progress | None
) -> Trace:
    def record_some(micro_batches: int) -> Trace:
        return record(
            setup,
            micro_batches,
            bucket_bytes=bucket_bytes,
            assume_scalars=assume_scalars,
            progress=progress,
        )

    few = min(setup.micro_batches, _fewest_micro_batches(setup))
    try:
        recorded = record_some(few)
        if progress is not None:
            progress(f"unrolling to {setup.micro_batches} micro-batches")
        return unroll(recorded, setup.micro_batches)
    except InputError:
        # One's own model may do something else in each micro-batch.
        if few == setup.micro_batches or not isinstance(setup.model, OwnModel):
            raise
    if progress is not None:
        progress("tracing every micro-batch, because they differ")
    return record_some(setup.micro_batches)


def _fewest_micro_batches(setup: TrainingSetup) -> int:
    # 1F1B needs as many as there are stages.
    return max(micro_batches_to_trace(setup.warmup_forwards), setup.stages)


def _sequence_of(model: Any) -> int:
    if isinstance(model, str) and model in MODELS:
        return MODELS[model].sequence
    raise InputError(f"sequence: is missing (--sequence); {model_label(model)} has no default")


def _price_again(
    path: Path, gpu: GpuSpec, timings: Timings | None, options: Mapping[str, Any]
) -> Trace:
    """A saved trace with the times of another GPU, or of TF32 in place of float32."""
    saved = Trace.load(path)
    given = {n: value for n, value in options.items() if value is not None and value is not False}
    dtype = given.pop("dtype", None)
    if given:
        raise InputError(
            f"{next(iter(given))}: {path} is recorded already; only gpu, timings and dtype can "
            "be changed"
        )
    before = saved.metadata.precision or "fp32"
    if dtype is not None and (dtype == "bf16") != (before == "bf16"):
        raise InputError(
            f"dtype: {path} was recorded in {before}; its kernels are others in {dtype}: "
            "trace the model again"
        )
    return price(saved, gpu=gpu, precision=dtype or before, timings=timings)
