"""The parts of a replay by themselves: stand-in kernels, scaled plans, patterns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Plan
from teraio.contracts.plan_checks import find_violations
from teraio.errors import StoreError
from teraio.executor.holding import Wait
from teraio.executor.replaying import stand_ins
from teraio.executor.replaying.memory_traffic import MemoryTraffic
from teraio.executor.replaying.patterns import Patterns
from teraio.executor.replaying.scaling import scaled_plan, scaled_trace
from teraio.executor.replaying.stand_ins import HostKernels
from teraio.executor.replaying.unplanned import plan_without_moves
from teraio.traces.trace import Trace


class FakeTime:
    """A clock that moves when somebody sleeps, or works."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        # Whoever waits actively sees time pass.
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def works(self, seconds: float) -> None:
        """The host does something else for a while."""
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(stand_ins, "time", fake)
    return fake


def nothing() -> None:
    """No work."""


def test_what_comes_late_is_cut_off_what_follows(clock: FakeTime) -> None:
    """3 ms of bookkeeping between kernels of 2 ms: the third ends when it should."""
    kernels = HostKernels(None)
    kernels.begin_iteration()
    begun = clock.now
    for kernel in range(3):
        kernels.run(kernel, 2e-3, 0, [], nothing)
        if kernel == 0:
            clock.works(3e-3)
    assert clock.now - begun == pytest.approx(6e-3, abs=50e-6)


def test_gaps_are_made_up_for_too(clock: FakeTime) -> None:
    """Work inside a gap takes no time of its own."""
    kernels = HostKernels(None)
    kernels.begin_iteration()
    begun = clock.now
    clock.works(1e-3)
    kernels.idle(4e-3)
    kernels.run(0, 2e-3, 0, [], nothing)
    assert clock.now - begun == pytest.approx(6e-3, abs=50e-6)


def test_a_kernel_begins_when_the_transfer_has_ended(clock: FakeTime) -> None:
    """What was late before a wait is lost in it."""
    kernels = HostKernels(None)
    kernels.begin_iteration()
    clock.works(1e-3)
    blocked = Wait(0, 0, "read", clock.now, clock.now + 5e-3)
    clock.works(5e-3)
    start, end = kernels.run(0, 2e-3, 0, [blocked], nothing)
    assert start == pytest.approx(blocked.end_seconds, abs=50e-6)
    assert end - start == pytest.approx(2e-3, abs=50e-6)


def test_a_wait_for_what_had_ended_is_none(clock: FakeTime) -> None:
    """It costs microseconds, and the time that is owed stays owed."""
    kernels = HostKernels(None)
    kernels.begin_iteration()
    begun = clock.now
    clock.works(1e-3)
    found_done = Wait(0, 0, "read", clock.now, clock.now + 20e-6)
    kernels.run(0, 3e-3, 0, [found_done], nothing)
    assert clock.now - begun == pytest.approx(3e-3, abs=50e-6)


def test_work_is_done_in_the_kernels_time(clock: FakeTime) -> None:
    kernels = HostKernels(None)
    kernels.begin_iteration()
    start, end = kernels.run(0, 5e-3, 0, [], lambda: clock.works(2e-3))
    assert end - start == pytest.approx(5e-3, abs=50e-6)


def test_memory_traffic_is_bounded_by_the_kernel() -> None:
    """A kernel of no time moves nothing, and one of much takes what its bytes take."""
    traffic = MemoryTraffic("cpu")
    assert traffic.move(1e9, 0.0) == 0.0
    assert traffic.move(1e6, 1.0) == pytest.approx(1e6 / traffic.bytes_per_second)


# Scale


@settings(max_examples=30, deadline=None)
@given(scale=st.floats(0.001, 1.0))
def test_scaled_plans_are_valid_and_fit(small_trace: Trace, small_plan: Plan, scale: float) -> None:
    """Slots stay disjoint and aligned, budgets hold, whatever the factor."""
    trace = scaled_trace(small_trace, scale)
    plan = scaled_plan(small_plan, trace, scale)
    verdict = find_violations(plan).verification()
    assert verdict.valid, verdict.violations[0]
    assert verdict.fits, verdict.violations[0]
    assert trace.ideal_seconds == pytest.approx(small_trace.ideal_seconds * scale)
    assert (trace.storages.nbytes >= small_trace.storages.nbytes * scale).all()
    assert (trace.storages.nbytes <= small_trace.storages.nbytes * scale + 1).all()


def test_at_scale_one_nothing_changes(small_trace: Trace, small_plan: Plan) -> None:
    assert scaled_trace(small_trace, 1.0) is small_trace
    assert scaled_plan(small_plan, small_trace, 1.0) is small_plan


def test_the_plan_of_no_moves_is_valid(small_trace: Trace, small_hardware: Hardware) -> None:
    """Placed on the GPU: what is alive while kernel 0 runs, and nothing else."""
    plan = plan_without_moves(small_trace, small_hardware)
    assert find_violations(plan).verification().valid
    assert np.flatnonzero(plan.storages.placement == "gpu").tolist() == [0, 1, 2, 4, 5, 6]


# Patterns


@pytest.mark.parametrize("nbytes", [1, 3, 8, 4095, 4096, 4104, 300_000])
@pytest.mark.parametrize("check", ["full", "sampled"])
def test_what_was_written_is_found_right(nbytes: int, check: str) -> None:
    patterns = Patterns(2, "cpu", check)
    data = torch.empty(nbytes, dtype=torch.uint8)
    patterns.born(1, data)
    for _ in range(3):
        patterns.write(1)
        patterns.check(1, 0)
    data[-1] ^= 1
    with pytest.raises(StoreError, match=r"storage 1 .* kernel 7"):
        patterns.check(1, 7)


@given(position=st.integers(0, 99_999), bit=st.integers(0, 7))
@settings(max_examples=30, deadline=None)
def test_any_flipped_bit_is_found_in_full(position: int, bit: int) -> None:
    patterns = Patterns(1, "cpu", "full")
    data = torch.empty(100_000, dtype=torch.uint8)
    patterns.born(0, data)
    patterns.write(0)
    data[position] ^= 1 << bit
    with pytest.raises(StoreError):
        patterns.check(0, 0)


def test_contents_differ_by_storage_write_and_page() -> None:
    """So that swapped storages, stale copies and swapped pages are seen by samples."""
    patterns = Patterns(2, "cpu", "sampled")
    one, other = (torch.zeros(8 * 4096, dtype=torch.uint8) for _ in range(2))
    patterns.born(0, one)
    patterns.born(1, other)
    patterns.write(0)
    patterns.write(1)
    first = one.clone()
    assert not torch.equal(first, other)
    patterns.write(0)
    assert not torch.equal(first, one)
    pages = one.view(8, 4096)
    assert len({bytes(page.tolist()) for page in pages}) == 8


def test_what_was_never_written_has_no_content() -> None:
    """A storage that is gone, one of no bytes, and one that only begins its second life."""
    patterns = Patterns(3, "cpu", "full")
    patterns.born(2, torch.empty(64, dtype=torch.uint8))
    patterns.write(2)
    patterns.died(2)
    patterns.born(2, torch.empty(64, dtype=torch.uint8))
    patterns.check(2, 0)
    patterns.born(0, torch.empty(0, dtype=torch.uint8))
    patterns.born(1, torch.empty(64, dtype=torch.uint8))
    patterns.died(1)
    for row in (0, 1):
        patterns.write(row)
        patterns.check(row, 0)
    assert patterns.num_checked == 0
