"""Times the distinct calls of a trace on a real GPU, each once, with random data.

A model of any size has about a hundred. The times are those of kernels in a queue that is never
empty, so they add up to an iteration whose host keeps ahead of the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from teraio.errors import InputError, OffloadWarning
from teraio.profiler.costs.arguments import MATRIX_PRODUCTS, PRECISIONS, base_name
from teraio.profiler.costs.measuring import Measured, Meter, make_meter, product_precision_of
from teraio.profiler.costs.remaking import make_call
from teraio.profiler.costs.timed_machine import describe_machine
from teraio.profiler.costs.timings import Key, Timing, Timings, as_timings, keys_of
from teraio.traces.trace import Calls, Trace, as_trace

Progress = Callable[[float | str], None]

_LONGEST_REASON = 120
"""Characters of torch's own errors that are told."""


def time_kernels(
    trace: Trace | str | Path,
    *,
    device: str = "cuda",
    precision: str | None = None,
    known: Timings | str | Path | None = None,
    progress: Progress | None = None,
) -> Timings:
    """``known`` and the times of all calls of the trace that it lacks.

    ``precision``: fp32, tf32 or bf16 [default: what the trace's calls show; TF32 they do not].
    Raises InputError for a trace without calls, a device that is not there, or timings of another
    machine; warns of calls that could not be timed.
    """
    trace, timings = as_trace(trace), as_timings(known)
    if not len(trace.calls):
        raise InputError("the trace describes no calls to time; traces of `teraio trace` do")
    return time_calls(
        trace.calls,
        device=device,
        precision=precision or default_precision(trace.calls),
        known=timings,
        progress=progress,
    )


def default_precision(calls: Calls) -> str:
    """``bf16`` if any matrix product is of bfloat16, else ``fp32``."""
    rows = zip(calls.op.tolist(), calls.arguments.tolist(), strict=True)
    products = [text for op, text in rows if base_name(op) in MATRIX_PRODUCTS]
    return "bf16" if any('"bfloat16"' in text for text in products) else "fp32"


def time_calls(
    calls: Calls,
    *,
    device: str,
    precision: str,
    known: Timings | None = None,
    progress: Progress | None = None,
) -> Timings:
    """See :func:`time_kernels`."""
    _check(device, precision)
    machine = describe_machine(device, with_pace=known is None)
    timings = known or Timings(machine)
    timings.check_machine(machine)
    missing = {key: row for key, row in keys_of(calls, precision) if timings.get(key) is None}
    # Heavy ones last: by then the device is warm.
    rows = sorted(missing.items(), key=lambda item: int(calls.flops[item[1]]))
    entries, failures = [], {}
    meter = make_meter(device)
    with torch.no_grad(), product_precision_of(precision):
        for done, (key, row) in enumerate(rows):
            if progress is not None:
                progress(done / len(rows))
                progress(str(calls.op[row]))
            measured = _measure(meter, calls, row, device)
            if isinstance(measured, Measured):
                entries.append(_entry(key, measured))
            else:
                failures[str(calls.op[row])] = measured
    if failures:
        _warn(failures)
    return timings.merge(entries)


def _check(device: str, precision: str) -> None:
    if precision not in PRECISIONS:
        raise InputError(f"precision: {precision!r} is not one of {', '.join(PRECISIONS)}")
    kind = device.partition(":")[0]
    if kind not in {"cpu", "cuda"}:
        raise InputError(f"device: {device!r}; kernels are timed on cuda or cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError("device: torch sees no CUDA GPU here; see torch.cuda.is_available()")


def _measure(meter: Meter, calls: Calls, row: int, device: str) -> Measured | str:
    """The times of one call, or why there are none."""
    op, arguments = str(calls.op[row]), str(calls.arguments[row])
    moved_bytes = int(calls.read_bytes[row] + calls.written_bytes[row])
    is_heavy = bool(calls.flops[row] > 0)

    def make() -> Any:
        return make_call(op, arguments, device)

    try:
        return meter.measure(make, moved_bytes, is_heavy=is_heavy)
    except torch.OutOfMemoryError:
        return "needs more memory than the GPU has free"
    except InputError as error:
        return str(error)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        return str(error).partition("\n")[0][:_LONGEST_REASON]
    finally:
        if device.startswith("cuda"):
            torch.cuda.empty_cache()


def _entry(key: Key, measured: Measured) -> Timing:
    op, arguments, precision = key
    return Timing(op=op, arguments=arguments, precision=precision, **measured._asdict())


def _warn(failures: dict[str, str]) -> None:
    told = "; ".join(f"{op} ({reason})" for op, reason in failures.items())
    message = f"{len(failures)} operators were not timed, a roofline prices them: {told}"
    warnings.warn(message, OffloadWarning, stacklevel=3)
