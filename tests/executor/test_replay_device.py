"""Stand-in kernels of a GPU, on a GPU that is a clock: calibration, short kernels, drift."""

from __future__ import annotations

import types
from typing import Any

import pytest

from teraio.executor import iteration_log
from teraio.executor.holding import Wait
from teraio.executor.iteration_log import IterationLog, IterationRecord
from teraio.executor.replaying import device_kernels
from teraio.executor.replaying.device_kernels import DeviceKernels
from teraio.executor.replaying.device_times import settle_device_times
from teraio.executor.stores import streams

LAUNCH_SECONDS = 3e-6


class FakeGpu:
    """Takes the place of ``torch.cuda``: work runs at once, and only its own clock moves."""

    def __init__(self, cycles_per_second: float) -> None:
        self.cycles_per_second = cycles_per_second
        self.now = 5.0
        self.num_launches = 0
        self.num_waited_for = 0

    def _sleep(self, cycles: int) -> None:
        self.num_launches += 1
        self.now += LAUNCH_SECONDS + cycles / self.cycles_per_second

    def Event(self, *, enable_timing: bool = False) -> FakeEvent:  # noqa: N802 - torch's name
        return FakeEvent(self)

    def current_stream(self) -> Any:
        return types.SimpleNamespace(synchronize=lambda: None)


class FakeEvent:
    """Remembers when it was recorded."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self.at = float("nan")

    def record(self, stream: Any = None) -> None:
        self.at = self._gpu.now

    def synchronize(self) -> None:
        self._gpu.num_waited_for += 1

    def elapsed_time(self, other: FakeEvent) -> float:
        return (other.at - self.at) * 1e3


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """One at 1.5 GHz."""
    fake = FakeGpu(1.5e9)
    for module in (device_kernels, streams, iteration_log):
        monkeypatch.setattr(module, "torch", types.SimpleNamespace(cuda=fake))
    return fake


def nothing() -> None:
    """No work."""


def play(kernels: DeviceKernels, gpu: FakeGpu, seconds: list[float]) -> float:
    """One iteration; the time that it took."""
    kernels.begin_iteration()
    begun = gpu.now
    for kernel, one in enumerate(seconds):
        kernels.run(kernel, one, 0, [], nothing)
    return gpu.now - begun


def test_kernels_take_their_time_launch_included(gpu: FakeGpu) -> None:
    """Whatever clock and launch are."""
    kernels = DeviceKernels(None)
    assert play(kernels, gpu, [1e-3, 50e-6, 2e-3]) == pytest.approx(3.05e-3, rel=1e-3)
    assert kernels.error() == pytest.approx(0, abs=1e-3)


def test_what_is_shorter_than_a_launch_is_carried_on(gpu: FakeGpu) -> None:
    """A hundred kernels of 1 us take 100 us in all, in fewer launches."""
    kernels = DeviceKernels(None)
    launches = gpu.num_launches
    assert play(kernels, gpu, [1e-6] * 100) == pytest.approx(100e-6, abs=2 * LAUNCH_SECONDS)
    assert gpu.num_launches - launches < 50


def test_gaps_take_their_time_but_are_no_kernel(gpu: FakeGpu) -> None:
    kernels = DeviceKernels(None)
    kernels.begin_iteration()
    begun = gpu.now
    kernels.idle(1e-3)
    kernels.run(0, 2e-3, 0, [], nothing)
    assert gpu.now - begun == pytest.approx(3e-3, rel=1e-3)
    (played,) = kernels.iterations[-1]
    assert played.start.elapsed_time(played.end) == pytest.approx(2, rel=1e-3)


def test_a_clock_that_has_changed_is_noticed_and_followed(gpu: FakeGpu) -> None:
    """A tenth slower after the calibration: the error says so, and recalibrating mends it."""
    kernels = DeviceKernels(None)
    gpu.cycles_per_second *= 0.9
    play(kernels, gpu, [1e-3] * 10)
    assert kernels.error() == pytest.approx(1 / 0.9 - 1, rel=0.01)
    kernels.recalibrate()
    play(kernels, gpu, [1e-3] * 10)
    assert kernels.error() == pytest.approx(0, abs=1e-3)


def test_the_host_does_not_run_ahead_without_bound(gpu: FakeGpu) -> None:
    """It waits for what it issued long before, and for nothing in a short iteration."""
    kernels = DeviceKernels(None)
    waited_for = gpu.num_waited_for
    play(kernels, gpu, [1e-4] * 200)
    assert gpu.num_waited_for == waited_for
    play(kernels, gpu, [1e-4] * 200)
    assert gpu.num_waited_for - waited_for == 400 - device_kernels._MOST_AHEAD


def test_an_iteration_is_placed_on_the_hosts_clock(gpu: FakeGpu) -> None:
    """Kernels follow each other from the iteration's start, and a late transfer is the stall."""
    log, kernels = IterationLog("cuda"), DeviceKernels(None)
    kernels.begin_iteration()
    record = IterationRecord(0, 0.0)
    start: Any = gpu.Event()
    start.record()
    kernels.run(0, 1e-3, 0, [], nothing)
    gpu.now += 4e-3  # The compute stream waits.
    kernels.run(1, 1e-3, 0, [], nothing)
    end: Any = gpu.Event()
    end.record()
    record.start_event, record.end_event = start, end
    arrived = log.resolved(record).start_seconds + 4.5e-3
    read: Any = types.SimpleNamespace(end_seconds=arrived)
    record.traffic.waits = [Wait(1, 3, "read", 0.0, 0.0, read)]
    settle_device_times(log, record, kernels.iterations[-1], [0.0, 0.0])
    assert record.end_seconds - record.start_seconds == pytest.approx(6e-3, rel=1e-3)
    assert [kernel for kernel, _, _ in record.kernels] == [0, 1]
    (stall,) = record.traffic.waits
    assert (stall.kernel, stall.row, stall.cause) == (1, 3, "read")
    assert stall.start_seconds == pytest.approx(record.kernels[0][2])
    assert stall.end_seconds == pytest.approx(arrived)
