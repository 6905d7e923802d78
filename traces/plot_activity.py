"""How small a share of the GPU's memory the running kernel uses (paper, Figure 1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from teraio.contracts import drawing
from teraio.contracts.table import FloatArray, IntArray
from teraio.traces.columns import add_steps, first_of_columns, shade_phases
from teraio.traces.lifetimes import active_bytes, kernel_starts_seconds, live_bytes
from teraio.traces.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEAST_PERCENT = 0.01
"""Bottom of the axis. Kernels that use less (of 94 GB: 9 MB) are drawn there."""


def plot_activity(
    trace: Trace, capacity_bytes: int | None = None, axes: Axes | None = None
) -> Axes:
    """Draw live bytes and those in use by each kernel, in percent, and return the axes.

    100 % is the GPU's memory, or without ``capacity_bytes`` the most bytes that live at once. The
    scale is logarithmic. Where kernels share a column, the band spans what they use, and the line
    in it is their mean over time.
    """
    if axes is None:
        axes = drawing.new_figure(6.0, 4.2).add_subplot()
    whole = capacity_bytes or trace.peak_live_bytes or 1
    starts = kernel_starts_seconds(trace)
    first = first_of_columns(starts)
    factor, unit = drawing.time_unit(starts[-1])
    edges = np.r_[starts[first], starts[-1]] * factor
    live, active = (np.asarray(f(trace)) / whole * 100 for f in (live_bytes, active_bytes))
    drawing.tidy(axes)
    axes.set_yscale("log")
    top = 3 * max(100.0, float(live.max(initial=0)))
    axes.set(ylim=(_LEAST_PERCENT, top), xlim=(0, edges[-1] or 1))  # before what has only one y
    most = np.maximum.reduceat(live, first)
    add_steps(axes, most, edges, drawing.BLUE, linewidth=1.4, baseline=None, label="alive")
    _draw_active(axes, trace, active, first, edges)
    if capacity_bytes is not None:
        drawing.capacity_line(axes, 100, 1, "%")
    shade_phases(axes, trace, first, edges)
    of_what = "GPU memory" if capacity_bytes else "peak live bytes"
    axes.set(xlabel=f"ideal time ({unit})", ylabel=f"share of {of_what} (%)")
    axes.yaxis.set_major_formatter("{x:g}")
    drawing.legend_above(axes)
    return axes


def _draw_active(
    axes: Axes, trace: Trace, active: FloatArray, first: IntArray, edges: FloatArray
) -> None:
    durations = trace.kernels.duration_seconds
    weights = durations if durations.any() else np.ones(len(durations))
    column_weights = np.add.reduceat(weights, first)
    sums = np.add.reduceat(weights * active, first)
    plain = np.add.reduceat(active, first) / np.diff(np.r_[first, len(active)])
    mean = np.divide(sums, column_weights, out=plain, where=column_weights > 0)
    lower = np.maximum(np.minimum.reduceat(active, first), _LEAST_PERCENT)
    upper = np.maximum(np.maximum.reduceat(active, first), _LEAST_PERCENT)
    orange = {"edgecolor": drawing.ORANGE, "linewidth": 0.5}
    add_steps(axes, upper, edges, drawing.ORANGE, baseline=lower, fill=True, **orange)
    time_mean = float(np.average(active, weights=weights))
    add_steps(
        axes,
        np.maximum(mean, _LEAST_PERCENT),
        edges,
        drawing.DARK_RED,
        baseline=None,
        linewidth=0.8,
        label=f"in use: mean {time_mean:.2g} %, at most {active.max(initial=0):.2g} %",
    )
