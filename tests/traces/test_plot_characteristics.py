"""The pictures of how little is in use and how long the rest is idle: what is drawn in them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle, StepPatch

from teraio.contracts.drawing import save_picture
from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Accesses
from teraio.contracts.table import IntArray
from teraio.traces.columns import MAX_COLUMNS, first_of_columns
from teraio.traces.trace import Kernels, Storages, Trace, TraceMetadata

MB, GB = 10**6, 10**9


def _trace(num_kernels: int = 6, seconds: float = 20e-3) -> Trace:
    """A 2 GB weight used by the first kernel, and a 200 MB activation used by the second and by
    the one before the last; 4 B that every kernel uses.
    """
    kernels = [
        (k, "op", "", "forward" if k < 3 else "backward", 0, seconds, 0.0, 0, 0, 0)
        for k in range(num_kernels)
    ]
    storages = [
        (0, 2 * GB, 2 * GB, "parameter", "weight", None, None, None, "", True),
        (1, 200 * MB, 200 * MB, "activation", "", 1, 0, num_kernels - 2, "", True),
        (2, 4, 512, "buffer", "step", None, None, None, "", True),
    ]
    accesses = [(0, 0, True, False), (1, 1, False, True), (num_kernels - 2, 1, True, False)]
    accesses += [(k, 2, True, False) for k in range(num_kernels)]
    return Trace(
        kernels=Kernels.from_rows(kernels),
        storages=Storages.from_rows(storages),
        accesses=Accesses.from_rows(sorted(accesses)),
        metadata=TraceMetadata(source="imported", model="a model"),
    )


def _steps(axes: Axes) -> list[StepPatch]:
    return [patch for patch in axes.patches if isinstance(patch, StepPatch)]


def _texts(axes: Axes) -> list[str]:
    legend = axes.get_legend()
    assert legend is not None
    return [text.get_text() for text in legend.get_texts()]


def test_activity_is_in_percent_of_the_gpu() -> None:
    axes = _trace().plot_activity(4 * GB)
    alive, _, mean = _steps(axes)
    assert np.allclose(alive.get_data()[0], [50, 55, 55, 55, 55, 50])
    assert np.allclose(mean.get_data()[0], [50, 5, 0.01, 0.01, 5, 0.01], atol=1e-6)
    assert np.allclose(mean.get_data()[1], np.arange(7) * 20)  # milliseconds
    assert axes.get_yscale() == "log"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("ideal time (ms)", "share of GPU memory (%)")
    assert _texts(axes) == ["alive", "in use: mean 10 %, at most 50 %", "capacity 100 %"]


def test_activity_without_capacity_is_in_percent_of_the_peak() -> None:
    axes = _trace().plot_activity()
    assert axes.get_ylabel() == "share of peak live bytes (%)"
    assert _steps(axes)[0].get_data()[0].max() == pytest.approx(100)
    assert not axes.lines


@pytest.mark.parametrize("capacity_bytes", [4 * GB, 94 * GB, 10**15])
def test_axes_span_a_hundredth_percent_to_above_the_peak(capacity_bytes: int) -> None:
    axes = _trace().plot_activity(capacity_bytes)
    assert axes.get_ylim() == (0.01, 300)
    assert axes.get_xlim() == pytest.approx((0, 120))
    assert _trace().plot_activity(GB).get_ylim()[1] == pytest.approx(660)


def test_band_spans_the_kernels_that_share_a_column() -> None:
    """Ten kernels a column: the first holds the weight's kernel (50 %), and ones that use 4 B."""
    trace = _trace(10 * MAX_COLUMNS)
    _, band, mean = _steps(trace.plot_activity(4 * GB))
    upper, edges, lower = (np.atleast_1d(values) for values in band.get_data())
    assert len(edges) == MAX_COLUMNS + 1
    assert (upper[0], lower[0]) == (pytest.approx(50), 0.01)
    assert mean.get_data()[0][0] == pytest.approx((50 + 5) / 10)


def test_columns_hold_every_kernel_once_whatever_their_lengths() -> None:
    seconds = np.random.default_rng(0).exponential(size=7 * MAX_COLUMNS)
    starts = np.r_[0, np.cumsum(seconds)]
    first = first_of_columns(starts)
    assert first[0] == 0
    assert np.all(np.diff(first) > 0)
    assert len(first) <= MAX_COLUMNS
    widths = np.diff(np.r_[starts[first], starts[-1]])
    assert widths.max() <= 2 * starts[-1] / MAX_COLUMNS + seconds.max()


def test_idleness_counts_periods_by_size_and_length() -> None:
    """The weight idles for 5 kernels (100 ms), the activation for 2 (40 ms); 4 B never do."""
    axes = _trace().plot_idleness()
    (mesh,) = (c for c in axes.collections if isinstance(c, QuadMesh))
    counts: IntArray = np.ma.asarray(mesh.get_array()).filled(0)
    assert counts.sum() == 2
    row, column = np.nonzero(counts)
    corners = np.asarray(mesh.get_coordinates(), dtype=float)
    for i, (size, seconds) in zip((1, 0), ((2 * GB, 0.1), (200 * MB, 0.04)), strict=True):
        low, high = corners[row[i], column[i]], corners[row[i] + 1, column[i] + 1]
        assert low[0] <= size < high[0]
        assert low[1] <= seconds * (1 + 1e-9) < high[1]


def test_idleness_has_units_marks_and_a_scale() -> None:
    axes = _trace().plot_idleness()
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("size of the storage", "time idle")
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    (frame,) = (p for p in axes.patches if isinstance(p, Rectangle))
    assert (frame.get_x(), frame.get_y(), frame.get_width()) == (10 * MB, 10e-3, 990 * MB)
    assert _texts(axes) == ["100 % of 10 MB to 1 GB are idle for 10 ms or more"]
    assert axes.xaxis.get_major_formatter()(100 * MB, None) == "100 MB"
    assert axes.yaxis.get_major_formatter()(10e-3, None) == "10 ms"


def test_idleness_shows_what_the_ssd_could_move() -> None:
    (ssd,) = Hardware.preset("paper").ssd
    axes = _trace().plot_idleness(ssd)
    (line,) = axes.lines
    sizes, seconds = (np.asarray(values) for values in line.get_data())
    assert np.allclose(seconds, 2 * sizes / (16 * GB) + 40e-6)
    assert _texts(axes)[1] == "to ssd0 (16.0 GB/s) and back"


@pytest.mark.parametrize("seconds", [0.0, 20e-3])
def test_nothing_that_idles_still_draws(seconds: float, tmp_path: Path) -> None:
    whole = _trace(seconds=seconds)
    accesses = whole.accesses.take(whole.accesses.storage == 2)
    nothing = Trace(whole.kernels, whole.storages, accesses, whole.metadata)
    save_picture(nothing.plot_characteristics().axes[0], tmp_path / "picture.png")


def test_given_axes_are_drawn_into() -> None:
    left, right = Figure().subplots(1, 2)
    assert _trace().plot_activity(axes=left) is left
    assert _trace().plot_idleness(axes=right) is right


def test_all_in_one_picture_for_the_gpu_and_ssd_of_the_rank() -> None:
    node = Hardware.preset("paper-node")
    larger = replace(node, gpu=(node.gpu[0], replace(node.gpu[1], memory_bytes=188 * GB)))
    trace = _trace()
    metadata = replace(trace.metadata, rank=1, world_size=2)
    second = Trace(trace.kernels, trace.storages, trace.accesses, metadata)
    memory, activity, idle, *_ = _by_label(second.plot_characteristics(larger))
    assert "capacity 188 GB" in _texts(memory)
    assert _steps(activity)[0].get_data()[0].max() == pytest.approx(2.2 / 188 * 100)
    assert "to ssd1" in _texts(idle)[1]


def _by_label(figure: Figure) -> list[Axes]:
    labels = ["GPU memory (GB)", "share of GPU memory (%)", "time idle"]
    axes = {a.get_ylabel(): a for a in figure.axes}
    return [axes[label] for label in labels]


def test_pictures_of_many_kernels_stay_small(tmp_path: Path) -> None:
    trace = _trace(50_000, 1e-3)
    save_picture(trace.plot_characteristics().axes[0], tmp_path / "picture.svg")
    assert 10_000 < (tmp_path / "picture.svg").stat().st_size < 2 * MB
