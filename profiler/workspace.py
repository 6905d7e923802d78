"""Scratch memory inside operators, which no dispatch mode can see: one iteration is spent on it.

Workspace of a kernel = the most that is allocated inside its operator at once, above what is alive
before it and the storages that it leaves behind.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from teraio.contracts.table import IntArray
from teraio.errors import OffloadWarning

_MARK = "teraio##"


def is_profiler_active() -> bool:
    """Whether the user (or another tool) is profiling this thread already."""
    return bool(torch._C._autograd._profiler_enabled())


class CpuWorkspaceMeter:
    """Reads the allocator's events of torch's profiler, delimited by a mark around each kernel."""

    def __init__(self) -> None:
        self._profiler = torch.autograd.profiler.profile(profile_memory=True)
        self._output_bytes: list[int] = []
        self._profiler.__enter__()

    @contextlib.contextmanager
    def around_kernel(self) -> Iterator[None]:
        """Wrap the operator call of the next kernel."""
        with torch._C._profiler._RecordFunctionFast(f"{_MARK}{len(self._output_bytes)}"):
            yield

    def kernel_ended(self, output_bytes: int) -> None:
        """The kernel has left this many bytes of new storages behind."""
        self._output_bytes.append(output_bytes)

    def stop(self) -> IntArray:
        """End the measurement; workspace of each kernel in bytes, int64 (kernels,)."""
        self._profiler.__exit__(None, None, None)
        result = np.zeros(len(self._output_bytes), dtype=np.int64)
        profiled: Any = self._profiler.kineto_results
        for kernel, peak_bytes in _peaks(profiled.events()).items():
            result[kernel] = max(0, peak_bytes - self._output_bytes[kernel])
        return result

    def abort(self) -> None:
        """Stop without a result."""
        self._profiler.__exit__(None, None, None)


def _peaks(events: Any) -> dict[int, int]:
    """Most bytes allocated at once inside each marked kernel, above those at its start."""
    marks, changes = [], []
    for event in events:
        name = event.name()
        if name == "[memory]":
            changes.append((event.start_ns(), event.nbytes()))
        elif name.startswith(_MARK):
            marks.append((event.start_ns(), event.end_ns(), int(name.removeprefix(_MARK))))
    marks.sort()
    changes.sort(key=lambda change: change[0])
    peaks, position = {}, 0
    for start, end, kernel in marks:
        while position < len(changes) and changes[position][0] < start:
            position += 1
        held = peak = 0
        while position < len(changes) and changes[position][0] <= end:
            held += changes[position][1]
            peak = max(peak, held)
            position += 1
        peaks[kernel] = peak
    return peaks


class CudaWorkspaceMeter:
    """Resets and reads the caching allocator's peak around each kernel.

    This overwrites the peak that ``torch.cuda.max_memory_allocated`` reports to the user.
    """

    def __init__(self) -> None:
        self._device = torch.cuda.current_device()
        self._workspace: list[int] = []
        self._before = self._inside = self._after = 0

    @contextlib.contextmanager
    def around_kernel(self) -> Iterator[None]:
        """Wrap the operator call of the next kernel."""
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = self._allocated()["current"]
        yield
        allocated = self._allocated()
        self._inside, self._after = allocated["peak"], allocated["current"]

    def _allocated(self) -> dict[str, int]:
        # The flat dictionary of torch.cuda.memory_stats takes ten times as long to make.
        statistics = torch.cuda.memory_stats_as_nested_dict(self._device)
        allocated: dict[str, int] = statistics["allocated_bytes"]["all"]
        return allocated

    def kernel_ended(self, output_bytes: int) -> None:
        """The kernel has left this many allocated bytes of new storages behind."""
        kept_bytes = max(self._before + output_bytes, self._after)
        self._workspace.append(max(0, self._inside - kept_bytes))

    def stop(self) -> IntArray:
        """Workspace of each kernel in bytes, int64 (kernels,)."""
        return np.array(self._workspace, dtype=np.int64)

    def abort(self) -> None:
        """Stop without a result."""


WorkspaceMeter = CpuWorkspaceMeter | CudaWorkspaceMeter


def start_workspace_meter(device_type: str) -> WorkspaceMeter | None:
    """Start measuring, or warn and return None if torch's profiler is not to be had."""
    if device_type == "cuda":
        return CudaWorkspaceMeter()
    if is_profiler_active():
        warn_of_unknown_workspace("torch's profiler is active already")
        return None
    if torch._C._current_graph_task_id() != -1:
        # A profiler that is started inside a backward pass is lost with that pass's thread state.
        warn_of_unknown_workspace("the optimizer steps inside the backward pass")
        return None
    try:
        return CpuWorkspaceMeter()
    except RuntimeError as error:
        warn_of_unknown_workspace(str(error))
        return None


def warn_of_unknown_workspace(reason: str) -> None:
    """Tell the user that the trace lacks the operators' scratch memory."""
    message = f"scratch memory inside operators is unknown and counts as 0 in the trace: {reason}"
    warnings.warn(message, OffloadWarning, stacklevel=3)
