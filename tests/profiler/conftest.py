"""Helpers of the recorder's tests: an allocator that is asked at every kernel boundary."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from teraio.profiler.dispatch import KernelCall  # noqa: E402
from teraio.profiler.profiling import Profile  # noqa: E402
from teraio.profiler.recorder import Recorder  # noqa: E402
from teraio.traces.trace import Trace  # noqa: E402


class MarkingRecorder(Recorder):
    """Marks every kernel in the events of torch's profiler."""

    def run_kernel(self, call: KernelCall) -> Any:
        with torch._C._profiler._RecordFunctionFast(f"kernel {self.iteration} {self.kernel}"):
            return super().run_kernel(call)


@dataclass
class Watched:
    """A trace, and what the allocator held when each kernel of the same iteration ended."""

    trace: Trace
    allocator_bytes: Any


Loop = Callable[[Callable[[], None]], None]


def watch_allocator(loop: Loop, *, bucket_bytes: int = 32 * 2**20) -> Watched:
    """Record ``loop(step)``, which must allocate everything itself, under torch's profiler."""
    gc.collect()  # What others left behind must not be freed meanwhile.
    recorder = MarkingRecorder(device_type="cpu", bucket_bytes=bucket_bytes)
    with torch.autograd.profiler.profile(profile_memory=True) as profiler:
        session = Profile(recorder)
        with pytest.warns(match="profiler is active"), session:
            loop(session.step)
    trace = session.trace
    steady = recorder.recording.require_steady()
    held = _bytes_at_kernel_ends(profiler)
    wanted = range(steady.start, steady.start + steady.period)
    rows = [held[key] for key in sorted(held) if key[0] in wanted]
    return Watched(trace, np.array(rows))


def _bytes_at_kernel_ends(profiler: Any) -> dict[tuple[int, int], int]:
    moments: list[tuple[int, int, tuple[int, int] | None]] = []
    for event in profiler.kineto_results.events():
        name = event.name()
        if name == "[memory]":
            moments.append((event.start_ns(), event.nbytes(), None))
        elif name.startswith("kernel "):
            segment, kernel = map(int, name.split()[1:])
            moments.append((event.end_ns(), 0, (segment, kernel)))
    held, result = 0, {}
    for _, change, mark in sorted(moments, key=lambda moment: moment[0]):
        held += change
        if mark is not None:
            result[mark] = held
    return result


@pytest.fixture
def watch() -> Callable[..., Watched]:
    """:func:`watch_allocator` as a fixture."""
    return watch_allocator


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    torch.manual_seed(0)
    yield


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    with _deterministic():
        yield
