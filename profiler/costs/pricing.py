"""Gives the kernels of a trace their times: from a timing file where it has them, else a roofline.

Kernels of one call take the same time. The gaps between them are 0, unless timings tell how long
the host needs to launch each call: then the device is followed as that host feeds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from teraio.contracts.table import MISSING, BoolArray, FloatArray, IntArray
from teraio.errors import InputError
from teraio.profiler.costs.arguments import PRECISIONS
from teraio.profiler.costs.gpus import GpuSpec, as_gpu
from teraio.profiler.costs.roofline import roofline_seconds
from teraio.profiler.costs.timings import Timing, Timings, as_timings
from teraio.profiler.cuda_clock import SYNCHRONISING, follow_host
from teraio.traces.trace import UNTRACKED, Kernels, Storages, Trace, as_trace

_NOTE = "times: "
"""How the lines begin that pricing adds to a trace's known differences."""


def price(
    trace: Trace | str | Path,
    *,
    gpu: str | GpuSpec,
    precision: str,
    timings: Timings | str | Path | None = None,
) -> Trace:
    """The trace with durations, gaps and scratch memory of one GPU.

    Calls that ``timings`` lacks are priced by the roofline of ``gpu``. ``precision``: ``fp32``,
    ``tf32`` (products of float32 matrices on the tensor cores) or ``bf16``. Kernels whose call was
    not recorded keep their times. Raises InputError if no kernel's call was recorded.
    """
    trace, spec, known = as_trace(trace), as_gpu(gpu), as_timings(timings)
    if precision not in PRECISIONS:
        raise InputError(f"precision: {precision!r} is not one of {', '.join(PRECISIONS)}")
    call = trace.kernels.call
    if not np.any(call != MISSING):
        raise InputError(
            "the trace says of no kernel what it computes (calls are missing), so it cannot be "
            "priced; traces of `teraio trace` do"
        )
    seconds = roofline_seconds(trace.calls, spec, precision)
    found = _find_timings(trace, known, precision)
    for row, timing in found.items():
        seconds[row] = timing.seconds
    kernels = trace.kernels
    durations = np.where(call == MISSING, kernels.duration_seconds, seconds[call])
    gaps = np.zeros(len(call))
    workspace = kernels.workspace_bytes
    if known is not None and found:
        gaps = _gaps_seconds(kernels, durations, found, known.machine.host_seconds_per_kernel)
        workspace = _workspace_bytes(kernels, found)
    priced = replace(
        kernels, duration_seconds=durations, gap_before_seconds=gaps, workspace_bytes=workspace
    )
    note = _describe(priced, spec, found, known)
    kept = [n for n in trace.metadata.known_differences if not n.startswith(_NOTE)]
    metadata = replace(trace.metadata, precision=precision, known_differences=[*kept, note])
    storages = _with_library_memory(trace, spec) if trace.metadata.source == "fake" else None
    return replace(trace, kernels=priced, metadata=metadata, storages=storages or trace.storages)


def _with_library_memory(trace: Trace, gpu: GpuSpec) -> Storages:
    """Storages with what the GPU's libraries keep for themselves, as a measured trace has it."""
    storages = trace.storages
    kept = storages.take(~(trace.is_persistent & (storages.name == UNTRACKED)))
    nowhere, nbytes = (None, None, None), gpu.library_bytes
    row = (len(kept), nbytes, nbytes, "buffer", UNTRACKED, *nowhere, None, False)
    added = Storages.from_rows([row])
    columns = [column.name for column in Storages.COLUMNS]
    return Storages(**{name: np.r_[getattr(kept, name), getattr(added, name)] for name in columns})


def _find_timings(trace: Trace, timings: Timings | None, precision: str) -> dict[int, Timing]:
    """Timings by row of the calls table."""
    if timings is None:
        return {}
    calls = trace.calls
    rows = zip(calls.op.tolist(), calls.arguments.tolist(), strict=True)
    found = {i: timings.find(op, text, precision) for i, (op, text) in enumerate(rows)}
    return {row: timing for row, timing in found.items() if timing is not None}


def _per_kernel(kernels: Kernels, values: dict[int, float], default: float) -> FloatArray:
    """Values by call, spread over the kernels, float64 (kernels,)."""
    of_call = np.full(int(kernels.call.max()) + 2, default)
    for row, value in values.items():
        of_call[row] = value
    result: FloatArray = of_call[kernels.call]  # a missing call, -1, is the last: the default
    return result


def _gaps_seconds(
    kernels: Kernels, durations: FloatArray, found: dict[int, Timing], pace_seconds: float
) -> FloatArray:
    """Idle time before each kernel on a device that waits for a host of this pace."""
    by_call = {row: timing.host_seconds for row, timing in found.items()}
    launch = _per_kernel(kernels, by_call, float(np.median(list(by_call.values()))))
    between = np.full(len(launch), max(0.0, pace_seconds - float(launch.mean())))
    synchronises: BoolArray = np.isin(kernels.op, list(SYNCHRONISING))
    return follow_host(durations, launch, between, synchronises)


def _workspace_bytes(kernels: Kernels, found: dict[int, Timing]) -> IntArray:
    measured = _per_kernel(kernels, {r: float(t.workspace_bytes) for r, t in found.items()}, -1.0)
    return np.where(measured < 0, kernels.workspace_bytes, measured.astype(np.int64))


def _describe(
    kernels: Kernels,
    gpu: GpuSpec,
    found: dict[int, Timing],
    timings: Timings | None,
) -> str:
    """Which kernels were timed and which were reckoned, as one line."""
    is_timed: BoolArray = np.isin(kernels.call, list(found))
    is_reckoned: BoolArray = ~is_timed & (kernels.call != MISSING)
    parts: Sequence[tuple[str, BoolArray]] = [
        (f"by the roofline of {gpu.name}", is_reckoned),
        ("as recorded", kernels.call == MISSING),
    ]
    if timings is not None:
        parts = [(f"measured on {timings.machine.describe()}", is_timed), *parts]
    told = [_share(kernels, what, chosen) for what, chosen in parts if np.any(chosen)]
    return f"{_NOTE}{'; '.join(told)}"


def _share(kernels: Kernels, what: str, chosen: BoolArray) -> str:
    num_calls = len(np.unique(kernels.call[chosen]))
    seconds = float(kernels.duration_seconds[chosen].sum())
    return f"{int(chosen.sum()):,} kernels of {num_calls} calls ({seconds:.4g} s) {what}"
