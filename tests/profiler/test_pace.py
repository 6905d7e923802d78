"""Unwatched iterations set the sum of a trace."""

from __future__ import annotations

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
