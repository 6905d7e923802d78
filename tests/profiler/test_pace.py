"""Unwatched iterations set the sum of a trace."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

import teraio
from teraio.profiler import clocks, pace, recorder
from teraio.profiler.pace import UnwatchedPace, meet_pace


def test_gaps_give_way_first_then_durations() -> None:
    """3 s of kernels and 2 s of gaps, met by paces above, within and below."""
    durations, gaps = np.array([1.0, 2.0]), np.array([0.5, 1.5])
    for seconds, expected in (
        (None, ([1.0, 2.0], [0.5, 1.5])),
        (9.0, ([1.0, 2.0], [0.5, 1.5])),
        (4.0, ([1.0, 2.0], [0.25, 0.75])),
        (1.5, ([0.5, 1.0], [0.0, 0.0])),
    ):
        met = meet_pace(durations, gaps, seconds)
        assert [part.tolist() for part in met] == list(expected)


class FakeClock:
    """Moves when told, and by a microsecond whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """The clock of everything that a profile times."""
    fake = FakeClock()
    for module in (clocks, pace, recorder):
        monkeypatch.setattr(module, "perf_counter", fake)
    return fake


def test_kernels_are_lengthened_only_where_clocks_explain_it() -> None:
    """3 s of kernels and 2 s of gaps: 5.6 s is a GPU at lower clocks, 7 s a disturbed one."""
    durations, gaps = np.array([1.0, 2.0]), np.array([0.5, 1.5])
    for seconds, expected in (
        (5.6, [1.2, 2.4]),
        (5.0, [1.0, 2.0]),
        (7.0, [1.0, 2.0]),
    ):
        running, waiting = meet_pace(durations, gaps, seconds, may_lengthen=True)
        assert running.tolist() == pytest.approx(expected)
        assert waiting.tolist() == gaps.tolist()
    nothing = np.zeros(2)
    assert meet_pace(nothing, gaps, 3.0, may_lengthen=True)[0].tolist() == [0.0, 0.0]


class FakeEvent:
    """An event on a GPU without a queue: it passes when it is recorded."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self.passed_at = 0.0

    def record(self) -> None:
        self.passed_at = self._clock.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1e3 * (end.passed_at - self.passed_at)


@pytest.fixture
def gpu(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """The clock of host and GPU."""
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: FakeEvent(clock))
    return clock


def run_until_complete(clock: FakeClock, laps: Iterable[float]) -> tuple[int, UnwatchedPace]:
    """How many iterations of a GPU's loop were asked for, and their pace."""
    unwatched = UnwatchedPace("cuda")
    unwatched.start(1)
    for number, seconds in enumerate(laps, start=1):
        clock.now += seconds
        unwatched.note_step()
        if unwatched.is_complete:
            return number, unwatched
    raise AssertionError("the iterations given were not enough")


def test_a_gpu_goes_on_until_its_clocks_have_settled(gpu: FakeClock) -> None:
    """Kernels get slower for 1.5 s; the median of the last four iterations has none of it."""
    number, unwatched = run_until_complete(gpu, [0.45, 0.46, 0.47, *[0.48, 0.5] * 9])
    assert number == 9
    assert unwatched.seconds == pytest.approx(0.49, abs=1e-5)
    assert unwatched.tells_clocks


@pytest.mark.parametrize(
    ("lap_seconds", "expected"), [(3.0, 3), (1.8, 3), (1.5, 4), (1.0, 5), (0.1, 13)]
)
def test_laps_of_a_gpu_by_their_length(gpu: FakeClock, lap_seconds: float, expected: int) -> None:
    """Three of a slow model, never more than thirteen."""
    assert run_until_complete(gpu, [lap_seconds] * 20)[0] == expected


def test_a_first_lap_that_compiles_is_no_time_to_settle(gpu: FakeClock) -> None:
    """A GPU that idles for ten seconds meanwhile is as cool afterwards as before."""
    assert run_until_complete(gpu, [10.0, *[0.5] * 20])[0] == 8


def test_ranks_all_time_three_iterations(gpu: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """They leave after the same step, and waiting for each other does not lengthen kernels."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    number, unwatched = run_until_complete(gpu, [0.5] * 20)
    assert number == 3
    assert unwatched.seconds == pytest.approx(0.5, abs=1e-5)
    assert not unwatched.tells_clocks


def test_two_laps_tell_nothing_of_clocks(gpu: FakeClock) -> None:
    """One of them may have been disturbed."""
    unwatched = UnwatchedPace("cuda")
    unwatched.start(1)
    for expected in (False, False, True):
        gpu.now += 0.5
        unwatched.note_step()
        assert unwatched.tells_clocks == expected
    assert not unwatched.is_complete


def test_the_median_of_three_iterations_counts(clock: FakeClock) -> None:
    """Iterations of two optimizer steps; the fourth is not timed any more."""
    unwatched = UnwatchedPace("cpu")
    unwatched.note_step()
    assert unwatched.seconds is None
    unwatched.start(2)
    for seconds in (3.0, 3.0, 0.5, 0.5, 1.0, 1.0, 0.0, 0.0):
        assert not unwatched.is_complete or seconds == 0.0
        clock.now += seconds
        unwatched.note_step()
    assert unwatched.is_complete
    assert unwatched.seconds == pytest.approx(2.0, abs=1e-5)


def test_a_trace_sums_to_an_unwatched_iteration(clock: FakeClock) -> None:
    """A loop that is slow where only a mode watches would be too long without the pace."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    was_watched = []
    with teraio.profile(model, optimizer) as profile:
        while not profile.done:
            optimizer.zero_grad()
            model(torch.zeros(2, 8)).sum().backward()
            optimizer.step()
            was_watched.append(_get_current_dispatch_mode() is not None)
            clock.now += 1.0 if was_watched[-1] else 0.25
    assert was_watched[0]
    assert was_watched[-3:] == [False] * 3
    assert profile.trace.ideal_seconds == pytest.approx(0.25, abs=1e-3)


@pytest.mark.parametrize(("tells_clocks", "expected"), [(False, 1.0), (True, 1.1)])
def test_kernels_that_are_slower_in_plain_training(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch, tells_clocks: bool, expected: float
) -> None:
    """An operator takes 1 s while it is watched, and 1.1 s at the clocks of steady training."""
    seconds = 1.0

    def product(x: torch.Tensor) -> torch.Tensor:
        clock.now += seconds
        return x.clone()

    monkeypatch.setattr(UnwatchedPace, "tells_clocks", tells_clocks)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.library._scoped_library("teraio_test_pace", "DEF") as library:
        library.define("product(Tensor x) -> Tensor")
        library.impl("product", product, "CompositeExplicitAutograd")
        with teraio.profile(model, optimizer) as profile:
            while not profile.done:
                seconds = 1.1 if _get_current_dispatch_mode() is None else 1.0
                optimizer.zero_grad()
                model(torch.ops.teraio_test_pace.product(torch.zeros(2, 8))).sum().backward()
                optimizer.step()
    trace = profile.trace
    assert trace.ideal_seconds == pytest.approx(expected, abs=1e-3)
    is_product = trace.kernels.op == "teraio_test_pace.product.default"
    assert trace.kernels.duration_seconds[is_product] == pytest.approx(expected, abs=1e-3)
