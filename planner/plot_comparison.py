"""Several planners side by side: where each one's iteration goes, against the ideal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from teraio.contracts import drawing

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_PARTS = (
    ("compute_alone_seconds", "compute", drawing.DARK_GREY),
    ("compute_overlapped_seconds", "compute beside transfers", drawing.SKY),
    ("gap_seconds", "gaps of the trace", drawing.GREY),
    ("stall_read_seconds", "stall: waits for a storage", drawing.RED),
    ("stall_memory_seconds", "stall: waits for memory", drawing.DARK_RED),
    ("stall_host_seconds", "stall: waits for the host", drawing.PINK),
)
_ROOM_FOR_LABELS = 1.3


def plot_comparison(table: pd.DataFrame, axes: Axes | None = None) -> Axes:
    """Draw the table of :func:`teraio.compare` as one stacked bar per row; returns the axes.

    The parts of a bar are the disjoint account of the iteration, the dashed line is the ideal, and
    the label the fraction of ideal. A planner without an answer has no bar.
    """
    if axes is None:
        axes = drawing.new_figure(9.5, 1.5 + 0.45 * len(table)).add_subplot()
    iterations = table["iteration_seconds"].to_numpy(dtype=float)
    ideal = float(np.nanmax(table["ideal_seconds"].to_numpy(dtype=float), initial=0.0))
    longest = max(float(np.nanmax(iterations, initial=0.0)), ideal)
    factor, unit = drawing.time_unit(longest)
    rows = -np.arange(len(table))
    left = np.zeros(len(table))
    for column, label, color in _PARTS:
        width = np.nan_to_num(table[column].to_numpy(dtype=float)) * factor
        if width.any():
            axes.barh(rows, width, left=left, height=0.62, color=color, label=label)
        left += width
    axes.axvline(ideal * factor, color=drawing.BLACK, linestyle="--", linewidth=1.4, label="ideal")
    for row, seconds in zip(rows.tolist(), iterations.tolist(), strict=True):
        text = f" {100 * ideal / seconds:.1f} % of ideal" if seconds > 0 else " no plan exists"
        axes.text(float(np.nan_to_num(seconds)) * factor, row, text, va="center", ha="left")
    _finish(axes, table, rows)
    axes.set(xlim=(0, _ROOM_FOR_LABELS * longest * factor or 1))
    axes.set(xlabel=f"iteration ({unit})")
    return axes


def _finish(axes: Axes, table: pd.DataFrame, rows: Any) -> None:
    drawing.tidy(axes)
    axes.grid(axis="y", visible=False)
    axes.set_yticks(rows, table["planner"].astype(str).tolist())
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(rows.min(initial=0) - 0.6, 0.6)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
