"""The picture of a timeline: lanes, fractions of time busy, the memory curve."""

from __future__ import annotations

import time

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch

from teraio.contracts.plot_timeline import NUM_COLUMNS, busy_fraction
from teraio.contracts.timeline import Events, Timeline, TimelineMetadata

GB = 10**9


def _timeline(rows: list[tuple[object, ...]], iterations: int = 1) -> Timeline:
    metadata = TimelineMetadata(
        source="simulated",
        iteration_seconds=10.0,
        ideal_seconds=8.0,
        cycle_iterations=iterations,
        steady=True,
        compute_alone_seconds=8.0,
        compute_overlapped_seconds=0.0,
        stall_read_seconds=2.0,
        stall_memory_seconds=0.0,
        stall_host_seconds=0.0,
        gap_seconds=0.0,
        peak_gpu_bytes=3 * GB,
        capacity_bytes=4 * GB,
    )
    return Timeline(events=Events.from_rows(rows), metadata=metadata)


def _small() -> Timeline:
    """A kernel, a stall for the read that ends with it, a kernel; one offload, one prefetch."""
    return _timeline(
        [
            (0, 0, "kernel", 0, None, "", 0.0, 4.0, 0, ""),
            (0, 0, "stall", 1, 7, "host read", 4.0, 6.0, 0, "read"),
            (0, 0, "kernel", 1, None, "", 6.0, 10.0, 0, ""),
            (0, 0, "transfer", 0, 7, "host write", 0.0, 2.0, GB, "offload"),
            (0, 0, "transfer", 1, 7, "host read", 3.0, 6.0, GB, "prefetch"),
            (0, 0, "memory", 0, None, "", 0.0, 5.0, 3 * GB, ""),
            (0, 0, "memory", 1, None, "", 5.0, 10.0, GB, ""),
        ]
    )


def _lane_labels(axes: Axes) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


def test_one_lane_for_compute_and_one_per_channel() -> None:
    axes = _small().plot()
    assert _lane_labels(axes) == ["compute", "host write", "host read"]
    legend = axes.get_legend()
    assert legend is not None
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts == ["kernels", "stall: waits for a storage", "offload", "prefetch"]
    assert axes.get_title(loc="left") == "simulated iteration: 10.0 s, 80.0 % of ideal"


def test_lanes_show_when_each_was_busy() -> None:
    """The stall fills [4, 6) of [0, 10): a fifth of the columns, and no others."""
    axes = _small().plot()
    patches = {p.get_label(): p for p in axes.patches if isinstance(p, StepPatch)}
    top, edges, bottom = patches["stall: waits for a storage"].get_data()
    height = np.asarray(top) - np.asarray(bottom)
    busy = height > 1e-9
    assert busy.mean() == pytest.approx(0.2, abs=2 / NUM_COLUMNS)
    assert edges[:-1][busy].min() == pytest.approx(4.0, abs=0.02)
    assert edges[1:][busy].max() == pytest.approx(6.0, abs=0.02)


def test_memory_curve_and_capacity_lie_below() -> None:
    axes = _small().plot()
    memory = axes.figure.axes[1]
    held, edges, _ = next(p for p in memory.patches if isinstance(p, StepPatch)).get_data()
    assert held[0] == 3
    assert held[-1] == 1
    assert edges[-1] == pytest.approx(10.0)
    assert [np.asarray(line.get_ydata()).tolist() for line in memory.lines] == [[4, 4]]
    assert (memory.get_xlabel(), memory.get_ylabel()) == ("time (s)", "GPU memory (GB)")


def test_given_axes_are_divided() -> None:
    axes = Figure().add_subplot()
    assert _small().plot(axes) is axes
    assert len(axes.figure.axes) == 2


def test_iterations_of_a_cycle_are_told_apart() -> None:
    rows: list[tuple[object, ...]] = [
        (i, 0, "kernel", 0, None, "", 1.0 * i, i + 1.0, 0, "") for i in range(3)
    ]
    axes = _timeline(rows, iterations=3).plot()
    vertical = [
        np.asarray(line.get_xdata())[0] for line in axes.lines if line.get_linestyle() == ":"
    ]
    assert vertical == [1.0, 2.0]


def test_two_ranks_have_lanes_of_their_own() -> None:
    rows: list[tuple[object, ...]] = [
        (0, rank, "kernel", 0, None, "", 0.0, 1.0, 0, "") for rank in (0, 1)
    ]
    assert _lane_labels(_timeline(rows).plot()) == ["rank 0 compute", "rank 1 compute"]


def test_a_timeline_without_events_still_draws() -> None:
    """Simulated with record=False."""
    assert _lane_labels(_timeline([]).plot()) == []


def test_a_hundred_thousand_kernels_are_quick_and_few_artists() -> None:
    starts = np.linspace(0.0, 9.0, 100_000, endpoint=False)
    rows: list[tuple[object, ...]] = [
        (0, 0, "kernel", k, None, "", start, start + 8e-5, 0, "") for k, start in enumerate(starts)
    ]
    timeline = _timeline(rows)
    begin = time.process_time()
    axes = timeline.plot()
    assert time.process_time() - begin < 5
    assert len(axes.patches) == 1


def test_busy_fraction_is_exact_across_column_edges() -> None:
    starts, ends = np.array([2.5, 0.0]), np.array([3.25, 1.5])
    fraction = busy_fraction(starts, ends, np.arange(5.0))
    assert np.allclose(fraction, [1.0, 0.5, 0.5, 0.25])


def test_busy_fraction_of_nothing_is_zero() -> None:
    assert np.array_equal(busy_fraction(np.empty(0), np.empty(0), np.arange(4.0)), [0, 0, 0])
