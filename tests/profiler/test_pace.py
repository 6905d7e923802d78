"""Unwatched iterations set the sum of a trace."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

import teraio
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


def test_the_median_of_three_iterations_counts() -> None:
    """Iterations of two optimizer steps; the fourth is not timed any more."""
    pace = UnwatchedPace("cpu")
    pace.note_step()
    assert pace.seconds is None
    pace.start(2)
    for seconds in (0.03, 0.03, 0.005, 0.005, 0.01, 0.01, 0.0, 0.0):
        assert not pace.is_complete or seconds == 0.0
        time.sleep(seconds)
        pace.note_step()
    assert pace.is_complete
    assert pace.seconds is not None
    assert 0.02 <= pace.seconds < 0.05


def test_a_trace_sums_to_an_unwatched_iteration() -> None:
    """A loop that sleeps where only a mode is slow would be too long without the pace."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lengths = []
    with teraio.profile(model, optimizer) as profile:
        while not profile.done:
            began = time.perf_counter()
            optimizer.zero_grad()
            model(torch.zeros(2, 8)).sum().backward()
            optimizer.step()
            if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
                time.sleep(0.05)
            lengths.append(time.perf_counter() - began)
    assert max(lengths[:-3]) > 0.05
    assert profile.trace.ideal_seconds < 0.05
    assert profile.trace.ideal_seconds == pytest.approx(sorted(lengths[-3:])[1], abs=0.005)
