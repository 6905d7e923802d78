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

MARK_BYTES = 104_729
"""Size of a storage made and freed at once where a kernel begins and ends: a prime, so that only a
tensor of as many single bytes could be taken for it."""


def is_profiler_active() -> bool:
    """Whether the user (or another tool) is profiling this thread already."""
    return bool(torch._C._autograd._profiler_enabled())


# Note [No function is watched]: torch's profiler gives each function that begins while it runs a
# place to write the function's end to, and frees these places when it stops. A function that ends
# later writes there all the same if another profiler runs by then, over what the memory holds now.
# The meter is stopped and started anew inside ``Optimizer.step``, which torch announces as such a
# function, as are compiled regions and what users label: a process would crash at random. So the
# profiler watches functions of a kind that nobody calls, and marks are allocations.


class CpuWorkspaceMeter:
    """Reads the allocator's events of torch's profiler, delimited by marks around each kernel.

    See Note [No function is watched].
    """

    def __init__(self) -> None:
        self._output_bytes: list[int] = []
        self._kernel_of_mark: list[int] = []
        _start_profiler()

    @contextlib.contextmanager
    def around_kernel(self) -> Iterator[None]:
        """Wrap the operator call of the next kernel."""
        self._kernel_of_mark.append(len(self._output_bytes))
        _mark()
        try:
            yield
        finally:
            _mark()

    def kernel_ended(self, output_bytes: int) -> None:
        """The kernel has left this many bytes of new storages behind."""
        self._output_bytes.append(output_bytes)

    def stop(self) -> IntArray:
        """End the measurement; workspace of each kernel in bytes, int64 (kernels,).

        All 0, of which the user is warned, if something else looked like a mark.
        """
        changes = _stop_profiler()
        result = np.zeros(len(self._output_bytes), dtype=np.int64)
        num_marks = 2 * len(self._kernel_of_mark)
        if any(changes.count(mark) != num_marks for mark in (MARK_BYTES, -MARK_BYTES)):
            warn_of_unknown_workspace(f"the loop has storages of {MARK_BYTES} bytes, as marks have")
            return result
        peaks = _peaks_between_marks(changes)
        # An operator that failed is no kernel; the next one to succeed has its number.
        for kernel, peak_bytes in zip(self._kernel_of_mark, peaks, strict=True):
            if kernel < len(result):
                result[kernel] = max(0, peak_bytes - self._output_bytes[kernel])
        return result

    def abort(self) -> None:
        """Stop without a result."""
        _stop_profiler()


def _start_profiler() -> None:
    template = torch.autograd.profiler.profile(profile_memory=True)
    config, activities = template.config(create_trace_id=True), template.kineto_activities
    torch._C._autograd._prepare_profiler(config, activities)
    # torch's own type stub lacks the scopes.
    enable: Any = torch._C._autograd._enable_profiler
    enable(config, activities, {torch._C._profiler.RecordScope.STATIC_RUNTIME_MODEL})


def _stop_profiler() -> list[int]:
    """Bytes of each allocation, negative for a free, in the order in which they happened."""
    profiled: Any = torch._C._autograd._disable_profiler()
    events = [event for event in profiled.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def _mark() -> None:
    torch.UntypedStorage(MARK_BYTES, device="cpu")


def _peaks_between_marks(changes: list[int]) -> list[int]:
    """Most bytes allocated at once between each mark that begins a kernel and that which ends it.

    Above those at its start.
    """
    peaks: list[int] = []
    held = peak = 0
    is_inside = False
    for change in changes:
        if change == -MARK_BYTES:
            if is_inside:
                peaks.append(peak)
            is_inside = not is_inside
            held = peak = 0
        elif change != MARK_BYTES and is_inside:
            held += change
            peak = max(peak, held)
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
    except (RuntimeError, AttributeError, TypeError) as error:
        # It is in use elsewhere, or this version of torch has it otherwise.
        warn_of_unknown_workspace(str(error))
        return None


def warn_of_unknown_workspace(reason: str) -> None:
    """Tell the user that the trace lacks the operators' scratch memory."""
    message = f"scratch memory inside operators is unknown and counts as 0 in the trace: {reason}"
    warnings.warn(message, OffloadWarning, stacklevel=3)
