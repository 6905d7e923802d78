"""Times the distinct calls of a trace on a real GPU, each once, with random data.

A model of any size has about a hundred. The times are those of kernels in a queue that is never
empty, so they add up to an iteration whose host keeps ahead of the device.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from teraio.contracts.table import MISSING, IntArray
from teraio.errors import InputError, OffloadWarning
from teraio.profiler.costs.arguments import MATRIX_PRODUCTS, PRECISIONS, base_name
from teraio.profiler.costs.measuring import Measured, Meter, make_meter
from teraio.profiler.costs.regions import REGION, make_region
from teraio.profiler.costs.remaking import MadeCall, make_call
from teraio.profiler.costs.sustained import HeavyCall, sustained_seconds
from teraio.profiler.costs.timed_machine import describe_machine
from teraio.profiler.costs.timings import Key, Timing, Timings, as_timings, keys_of
from teraio.profiler.product_precision import product_precision_of
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
    call = trace.kernels.call
    return time_calls(
        trace.calls,
        device=device,
        precision=precision or trace.metadata.precision or default_precision(trace.calls),
        counts=np.bincount(call[call != MISSING], minlength=len(trace.calls)),
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
    counts: IntArray | None = None,
    known: Timings | None = None,
    progress: Progress | None = None,
) -> Timings:
    """See :func:`time_kernels`. ``counts``: how often each call occurs [default: all once]."""
    _check(device, precision)
    machine = describe_machine(device, with_pace=known is None)
    timings = known or Timings(machine)
    timings.check_machine(machine)
    session = _Session(calls, device, precision)
    # Heavy ones last: by then the device is warm.
    missing = {key: row for key, row in keys_of(calls, precision) if timings.get(key) is None}
    rows = sorted(missing.items(), key=lambda item: int(calls.flops[item[1]]))
    entries = []
    with _settings(device, precision):
        for done, (key, row) in enumerate(rows):
            if progress is not None:
                progress(done / len(rows))
                progress(str(calls.op[row]))
            measured = session.measure(row)
            if measured is not None:
                entries.append(_entry(key, measured))
        if device.startswith("cuda"):
            entries = session.sustain(timings.merge(entries), missing, counts)
    session.warn_of_failures()
    return timings.merge(entries)


def _check(device: str, precision: str) -> None:
    if precision not in PRECISIONS:
        raise InputError(f"precision: {precision!r} is not one of {', '.join(PRECISIONS)}")
    kind = device.partition(":")[0]
    if kind not in {"cpu", "cuda"}:
        raise InputError(f"device: {device!r}; kernels are timed on cuda or cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError("device: torch sees no CUDA GPU here; see torch.cuda.is_available()")


@contextmanager
def _settings(device: str, precision: str) -> Iterator[None]:
    """Everything that is set while calls are timed, and as it was afterwards."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(product_precision_of(precision))
        if device.startswith("cuda"):
            stack.enter_context(torch.cuda.device(device))
            stack.enter_context(torch.random.fork_rng([torch.cuda.current_device()]))
        else:
            stack.enter_context(torch.random.fork_rng([]))
        yield


class _Session:
    """Times rows of one calls table, and remembers what could not be timed."""

    def __init__(self, calls: Calls, device: str, precision: str) -> None:
        self._calls = calls
        self._device = device
        self._precision = precision
        self._meter: Meter = make_meter(device)
        self._failures: dict[str, str] = {}

    def _make(self, row: int) -> MadeCall:
        op, arguments = str(self._calls.op[row]), str(self._calls.arguments[row])
        if op == REGION:
            return make_region(arguments, self._device)
        return make_call(op, arguments, self._device)

    def measure(self, row: int) -> Measured | None:
        """The times of one call, or None, with a reason kept for the warning."""
        calls = self._calls
        moved_bytes = int(calls.read_bytes[row] + calls.written_bytes[row])
        is_heavy = bool(calls.flops[row] > 0)
        try:
            return self._meter.measure(lambda: self._make(row), moved_bytes, is_heavy=is_heavy)
        except torch.OutOfMemoryError:
            reason = "needs more memory than the GPU has free"
        except InputError as error:
            reason = str(error)
        except (RuntimeError, TypeError, ValueError) as error:
            reason = str(error).partition("\n")[0][:_LONGEST_REASON]
        finally:
            self._free()
        self._failures[str(calls.op[row])] = reason
        return None

    def _free(self) -> None:
        if self._device.startswith("cuda"):
            torch.cuda.empty_cache()

    def sustain(
        self, timings: Timings, missing: dict[Key, int], counts: IntArray | None
    ) -> list[Timing]:
        """The new entries, those of heavy calls as they run in the trace's mixture."""
        calls = self._calls
        of_row = {row: timings.get(key) for key, row in keys_of(calls, self._precision)}
        found = {row: timing for row, timing in of_row.items() if timing is not None}
        counts = np.ones(len(calls), dtype=np.int64) if counts is None else counts
        heavy = [row for row in found if calls.flops[row] > 0 and counts[row] > 0]
        if any(row in heavy for row in missing.values()):
            took = {row: float(counts[row]) * timing.seconds for row, timing in found.items()}
            heavy_share = sum(took[row] for row in heavy) / sum(took.values())
            for row, seconds in zip(
                heavy, self._sustained(heavy, found, counts, 1.0 - heavy_share), strict=True
            ):
                found[row] = replace(found[row], seconds=seconds)
        return [found[row] for row in missing.values() if row in found]

    def _sustained(
        self, rows: list[int], found: dict[int, Timing], counts: IntArray, light_share: float
    ) -> list[float]:
        alone = [found[row].seconds for row in rows]
        heavy = [
            HeavyCall(partial(self._make, row), int(counts[row]), seconds)
            for row, seconds in zip(rows, alone, strict=True)
        ]
        try:
            return sustained_seconds(heavy, light_share)
        except torch.OutOfMemoryError:
            return alone
        finally:
            self._free()

    def warn_of_failures(self) -> None:
        """One warning for all, if any."""
        if not self._failures:
            return
        told = "; ".join(f"{op} ({reason})" for op, reason in self._failures.items())
        message = f"could not be timed, so a roofline prices them: {told}"
        warnings.warn(message, OffloadWarning, stacklevel=3)


def _entry(key: Key, measured: Measured) -> Timing:
    op, arguments, precision = key
    return Timing(op=op, arguments=arguments, precision=precision, **measured._asdict())
