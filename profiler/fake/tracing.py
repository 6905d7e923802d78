"""The door to traces without a GPU: train on fake tensors, record, unroll, price."""

from __future__ import annotations

from typing import Any

from teraio.profiler.costs.pricing import price
from teraio.profiler.costs.timings import Timings
from teraio.profiler.fake.recording import Progress, record
from teraio.profiler.operators import AUTOMATIC_BUCKETS
from teraio.profiler.training.setup import make_setup
from teraio.traces.trace import Trace
from teraio.traces.unrolling import micro_batches_to_trace, unroll

DEFAULT_GPU = "h100-nvl"


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
    micro_batches = min(setup.micro_batches, micro_batches_to_trace(setup.warmup_forwards))
    recorded = record(setup, micro_batches, bucket_bytes=bucket_bytes, progress=progress)
    if progress is not None:
        progress(f"unrolling to {setup.micro_batches} micro-batches")
    unrolled = unroll(recorded, setup.micro_batches)
    return price(unrolled, gpu=gpu, precision=setup.dtype, timings=timings)
