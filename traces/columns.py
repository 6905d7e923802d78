"""Any number of kernels on a picture's time axis: at most so many columns, phases behind them."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from teraio.contracts import drawing
from teraio.contracts.table import FloatArray, IntArray
from teraio.traces.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_COLUMNS = 2000
"""Steps drawn at most. More kernels share columns of equal time, by where they start."""

_PHASE_SHADES = {"forward": "#EEF3F8", "backward": "#FBF3E4", "optimizer": "#E8F4EF"}
_LABEL_INCHES = 0.65


def first_of_columns(starts: FloatArray) -> IntArray:
    """First kernel of each column, rising from 0, int64 (<= MAX_COLUMNS,).

    ``starts`` are the kernels' starts and the end of the iteration, float64 (K + 1,). So
    ``np.maximum.reduceat(values, first)`` is the most of each column.
    """
    num_kernels = len(starts) - 1
    if num_kernels <= MAX_COLUMNS:
        return np.arange(num_kernels)
    column = (starts[:-1] / max(starts[-1], 1e-30) * MAX_COLUMNS).astype(np.int64)
    column = np.minimum(column, MAX_COLUMNS - 1)
    first: IntArray = np.flatnonzero(np.r_[True, np.diff(column) > 0])
    return first


def add_steps(axes: Axes, values: FloatArray, edges: FloatArray, color: str, **style: Any) -> None:
    """``axes.stairs`` without its search for the data's limits, which takes most of the time.

    The caller sets the limits. ``fill=True`` fills from ``baseline``, a number or one per step.
    """
    from matplotlib.patches import StepPatch

    colors = {"facecolor": color} if style.get("fill") else {"edgecolor": color, "fill": False}
    style = {"linewidth": 0 if style.get("fill") else 1, **colors, **style}
    axes.add_artist(StepPatch(values, edges, **style))


def shade_phases(axes: Axes, trace: Trace, first: IntArray, edges: FloatArray) -> None:
    """Shade runs of columns of one phase, and name those that are wide enough to carry a name.

    A column has the phase of its first kernel. ``edges`` bound the columns on the time axis,
    float64 (columns + 1,).
    """
    phase = trace.kernels.phase[first]
    bounds = np.r_[0, np.flatnonzero(phase[1:] != phase[:-1]) + 1, len(first)]
    runs = [(phase[begin], edges[begin], edges[end]) for begin, end in pairwise(bounds)]
    for name, shade in _PHASE_SHADES.items():
        spans = [(left, right - left) for phase, left, right in runs if phase == name]
        axes.broken_barh(
            spans, (0, 1), transform=axes.get_xaxis_transform(), color=shade, zorder=0, linewidth=0
        )
    least = _LABEL_INCHES * axes.figure.dpi / axes.bbox.width * edges[-1]
    for name, left, right in runs:
        if name in _PHASE_SHADES and right - left > least:
            axes.annotate(
                name,
                ((left + right) / 2, 0.98),
                xycoords=axes.get_xaxis_transform(),
                ha="center",
                va="top",
                fontsize="small",
                color=drawing.DARK_GREY,
            )
