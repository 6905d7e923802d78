"""Memory over one iteration: what must be held, by kind, and how little of it is in use."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from teraio.contracts import drawing
from teraio.contracts.table import IntArray
from teraio.traces.characterise import live_bytes_by_kind
from teraio.traces.lifetimes import active_bytes, kernel_starts_seconds, live_bytes
from teraio.traces.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_COLUMNS = 2000
"""Steps drawn at most; of more kernels, the one with the most live bytes speaks for its group."""

KIND_COLORS = {
    "parameter": drawing.BLUE,
    "gradient": drawing.SKY,
    "optimizer_state": drawing.GREEN,
    "activation": drawing.ORANGE,
    "input": drawing.YELLOW,
    "buffer": drawing.GREY,
    "temporary": drawing.PINK,
    "workspace": drawing.DARK_GREY,
}

_PHASE_SHADES = {"forward": "#EEF3F8", "backward": "#FBF3E4", "optimizer": "#E8F4EF"}
_MIN_LABELLED_WIDTH = 0.07


def plot_memory(trace: Trace, capacity_bytes: int | None = None, axes: Axes | None = None) -> Axes:
    """Draw GPU memory against ideal time and return the axes.

    Stacked areas are allocated bytes by kind plus the kernel's workspace: what an unlimited GPU
    would hold. What each kernel accesses is black; the dashed line is the capacity.
    """
    if axes is None:
        axes = drawing.new_figure(9.5, 4.2).add_subplot()
    starts = kernel_starts_seconds(trace)
    chosen = _kernels_to_draw(trace, starts)
    factor, unit = drawing.time_unit(starts[-1])
    edges = np.r_[starts[chosen], starts[-1]] * factor
    drawing.tidy(axes)
    most_bytes = max(trace.peak_allocated_bytes, capacity_bytes or 0)
    scale, memory_unit = drawing.memory_unit(most_bytes)
    _draw_areas(axes, trace, chosen, edges, scale)
    active = active_bytes(trace)[chosen] * scale
    axes.stairs(active, edges, fill=True, color=drawing.BLACK, label="in use by the kernel")
    if capacity_bytes is not None:
        drawing.capacity_line(axes, capacity_bytes, scale, memory_unit)
    axes.set(xlim=(0, edges[-1] or 1), ylim=(0, 1.12 * most_bytes * scale or 1))
    _draw_phases(axes, trace, starts * factor)
    axes.set(xlabel=f"ideal time ({unit})", ylabel=f"GPU memory ({memory_unit})")
    axes.set_title(trace.metadata.model, loc="left", fontsize="medium")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False
    )
    return axes


def _kernels_to_draw(trace: Trace, starts: np.ndarray) -> IntArray:
    """Rising indices of the kernels that stand for all, int64 (<= MAX_COLUMNS,)."""
    num_kernels = trace.num_kernels
    if num_kernels <= MAX_COLUMNS:
        return np.arange(num_kernels)
    column = np.minimum(
        (starts[:-1] / max(starts[-1], 1e-30) * MAX_COLUMNS).astype(np.int64), MAX_COLUMNS - 1
    )
    live = live_bytes(trace, allocated=True) + trace.kernels.workspace_bytes
    order = np.lexsort((-live, column))
    first = np.r_[True, np.diff(column[order]) > 0]
    chosen: IntArray = np.sort(order[first])
    return chosen


def _draw_areas(
    axes: Axes, trace: Trace, chosen: IntArray, edges: np.ndarray, scale: float
) -> None:
    layers = live_bytes_by_kind(trace, allocated=True)
    layers["workspace"] = trace.kernels.workspace_bytes
    below = np.zeros(len(chosen))
    for kind, live in layers.items():
        if not live.any():
            continue
        above = below + live[chosen] * scale
        axes.stairs(
            above,
            edges,
            baseline=below,
            fill=True,
            color=KIND_COLORS[kind],
            label=kind.replace("_", " "),
        )
        below = above


def _draw_phases(axes: Axes, trace: Trace, starts: np.ndarray) -> None:
    """Shade runs of kernels of one phase, and name those that are wide enough to carry a name."""
    phase = trace.kernels.phase
    change = np.flatnonzero(phase[1:] != phase[:-1]) + 1
    bounds = np.r_[0, change, trace.num_kernels]
    for first, end in pairwise(bounds):
        shade = _PHASE_SHADES.get(phase[first])
        if shade is None:
            continue
        left, right = starts[first], starts[end]
        axes.axvspan(left, right, color=shade, zorder=0, linewidth=0)
        if right - left > _MIN_LABELLED_WIDTH * starts[-1]:
            axes.annotate(
                phase[first],
                ((left + right) / 2, 0.98),
                xycoords=axes.get_xaxis_transform(),
                ha="center",
                va="top",
                fontsize="small",
                color=drawing.DARK_GREY,
            )
