"""The meter of scratch memory on the CPU: what it reports, and that it cannot harm the process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from teraio.errors import OffloadWarning
from teraio.profiler.workspace import MARK_BYTES, CpuWorkspaceMeter, is_profiler_active

RESTARTS = """
import torch
from teraio.profiler.workspace import CpuWorkspaceMeter

meter = CpuWorkspaceMeter()
for _ in range(3):
    with torch.autograd.profiler.record_function("Optimizer.step"):
        torch.ones(10) + 1
        meter.abort()
        del meter
        taken = [bytearray(size) for size in range(256, 100_000, 64)]
        meter = CpuWorkspaceMeter()
    untouched = [memory.count(0) == len(memory) for memory in taken]
    assert all(untouched), "memory that the meter gave back was written to"
meter.abort()
"""


def allocate(*sizes: int) -> torch.UntypedStorage:
    """Make and free storages of so many bytes in turn; the last one is returned."""
    storage = torch.UntypedStorage(0)
    for size in sizes:
        del storage
        storage = torch.UntypedStorage(size)
    return storage


def test_most_bytes_at_once_beyond_what_stays() -> None:
    meter = CpuWorkspaceMeter()
    kept = []
    for sizes in ((1000, 500, 24), (24,), (300, 300, 24)):
        with meter.around_kernel():
            kept.append(allocate(*sizes))
        meter.kernel_ended(24)
        allocate(5000)  # Between kernels: nobody's.
    assert meter.stop().tolist() == [976, 0, 276]
    assert not is_profiler_active()


def test_a_kernel_that_failed_counts_for_nothing() -> None:
    def fail() -> None:
        allocate(9000)
        raise ValueError

    meter = CpuWorkspaceMeter()
    for work in (fail, lambda: allocate(100), fail):
        _run_in(meter, work)
    assert meter.stop().tolist() == [100]


def _run_in(meter: CpuWorkspaceMeter, work: Callable[[], Any]) -> None:
    try:
        with meter.around_kernel():
            work()
    except ValueError:
        return
    meter.kernel_ended(0)


@pytest.mark.parametrize("is_inside", [True, False], ids=["inside a kernel", "between kernels"])
def test_a_storage_of_the_size_of_a_mark_is_not_taken_for_one(is_inside: bool) -> None:
    meter = CpuWorkspaceMeter()
    for _ in range(3):
        with meter.around_kernel():
            allocate(MARK_BYTES if is_inside else 100, 100)
        meter.kernel_ended(0)
        if not is_inside:
            allocate(MARK_BYTES)
    with pytest.warns(OffloadWarning, match=r"counts as 0 .* storages of 104729 bytes"):
        assert meter.stop().tolist() == [0, 0, 0]


def test_no_function_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that outlasts the profiler would write its end over memory that was freed."""
    names: list[str] = []
    disable = torch._C._autograd._disable_profiler

    def observed() -> Any:
        result: Any = disable()
        names.extend(event.name() for event in result.events())
        return result

    monkeypatch.setattr(torch._C._autograd, "_disable_profiler", observed)
    monkeypatch.setattr(torch.autograd.profiler, "_disable_profiler", observed)
    meter = CpuWorkspaceMeter()
    weight = torch.ones(10, requires_grad=True)
    with torch.autograd.profiler.record_function("user's"), meter.around_kernel():
        (weight * 2).sum().backward()
    meter.kernel_ended(0)
    meter.stop()
    assert set(names) == {"[memory]"}


def test_memory_given_back_is_not_written_to_after_a_restart() -> None:
    """As where an iteration that was metered differs, and the next is metered instead."""
    command = [sys.executable, "-c", RESTARTS]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
