"""Memory over one iteration: what must be held, by kind, and how little of it is in use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from teraio.contracts import drawing
from teraio.contracts.table import IntArray
from teraio.traces.characterise import live_bytes_by_kind
from teraio.traces.columns import add_steps, first_of_columns, shade_phases
from teraio.traces.lifetimes import active_bytes, kernel_starts_seconds, live_bytes
from teraio.traces.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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


def plot_memory(trace: Trace, capacity_bytes: int | None = None, axes: Axes | None = None) -> Axes:
    """Draw GPU memory against ideal time and return the axes.

    Stacked areas are allocated bytes by kind plus the kernel's workspace: what an unlimited GPU
    would hold. What each kernel accesses is black; the dashed line is the capacity. Of kernels
    that share a column, areas show the one with the most live bytes, black the one that uses most.
    """
    if axes is None:
        axes = drawing.new_figure(9.5, 4.2).add_subplot()
    starts = kernel_starts_seconds(trace)
    first = first_of_columns(starts)
    factor, unit = drawing.time_unit(starts[-1])
    edges = np.r_[starts[first], starts[-1]] * factor
    drawing.tidy(axes)
    most_bytes = max(trace.peak_allocated_bytes, capacity_bytes or 0)
    scale, memory_unit = drawing.memory_unit(most_bytes)
    _draw_areas(axes, trace, _fullest_of_columns(trace, first), edges, scale)
    active = np.maximum.reduceat(active_bytes(trace), first) * scale
    add_steps(axes, active, edges, drawing.BLACK, fill=True, label="in use by the kernel")
    if capacity_bytes is not None:
        drawing.capacity_line(axes, capacity_bytes, scale, memory_unit)
    axes.set(xlim=(0, edges[-1] or 1), ylim=(0, 1.12 * most_bytes * scale or 1))
    shade_phases(axes, trace, first, edges)
    axes.set(xlabel=f"ideal time ({unit})", ylabel=f"GPU memory ({memory_unit})")
    axes.set_title(trace.metadata.model, loc="left", fontsize="medium")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False
    )
    return axes


def _fullest_of_columns(trace: Trace, first: IntArray) -> IntArray:
    """The kernel of each column with the most live bytes and workspace, int64 (columns,)."""
    live = live_bytes(trace, allocated=True) + trace.kernels.workspace_bytes
    column = np.repeat(np.arange(len(first)), np.diff(np.r_[first, trace.num_kernels]))
    order = np.lexsort((-live, column))
    fullest: IntArray = order[first]
    return fullest


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
        label = kind.replace("_", " ")
        add_steps(axes, above, edges, KIND_COLORS[kind], baseline=below, fill=True, label=label)
        below = above
