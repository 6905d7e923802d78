"""A timeline at a glance: who was busy when, where time was lost, and the memory curve below.

A lane's height is the fraction of the time in which it was busy: full height where it never
paused, a tenth where it worked a tenth of the time. So thousands of short kernels or transfers
neither merge into a false solid bar nor make the picture slow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from teraio.contracts import drawing
from teraio.contracts.table import FloatArray
from teraio.contracts.timeline import Events, Timeline
from teraio.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUM_COLUMNS = 700
"""Columns of time into which events are gathered."""

_LANE_HEIGHT = 0.78
_COMPUTE_LAYERS = (
    ("kernel", "", "kernels", drawing.DARK_GREY),
    ("stall", "read", "stall: waits for a storage", drawing.RED),
    ("stall", "memory", "stall: waits for memory", drawing.DARK_RED),
    ("stall", "host", "stall: waits for the host", drawing.PINK),
)
_TRANSFER_LAYERS = (
    ("transfer", "offload", "offload", drawing.BLUE),
    ("transfer", "prefetch", "prefetch", drawing.GREEN),
    ("transfer", "demand_fetch", "demand fetch", drawing.ORANGE),
    ("transfer", "eviction", "eviction", drawing.YELLOW),
)


def plot_timeline(timeline: Timeline, axes: Axes | None = None) -> Axes:
    """Draw the reported cycle and return the axes of the lanes; those of the memory lie below.

    Axes that are given are divided: lanes above, memory below.
    """
    events = timeline.events
    channels = sorted(set(events.channel[events.what == "transfer"]), key=_reads_last)
    ranks = sorted(set(events.rank.tolist()))
    num_lanes = len(ranks) * (1 + len(channels))
    axes, memory_axes = _two_axes(axes, num_lanes)
    span = float(events.end_seconds.max(initial=0.0)) or 1.0
    factor, unit = drawing.time_unit(span)
    edges = np.linspace(0.0, span, NUM_COLUMNS + 1)
    labels: list[str] = []
    for rank in ranks:
        of_rank = events.take(events.rank == rank)
        prefix = f"rank {rank} " if len(ranks) > 1 else ""
        for channel in ("", *channels):
            layers = _TRANSFER_LAYERS if channel else _COMPUTE_LAYERS
            lane = of_rank.take(of_rank.channel == channel) if channel else of_rank
            _draw_lane(axes, lane, layers, edges, factor, bottom=-len(labels))
            labels.append(prefix + (channel or "compute"))
    _finish_lanes(axes, labels, span * factor)
    axes.set_title(_headline(timeline), loc="left", fontsize="medium")
    _draw_iteration_ends(axes, events, factor)
    _draw_memory(memory_axes, timeline, edges, factor)
    memory_axes.set(xlim=(0, span * factor), xlabel=f"time ({unit})")
    return axes


def _headline(timeline: Timeline) -> str:
    metadata = timeline.metadata
    share = metadata.ideal_seconds / metadata.iteration_seconds if metadata.iteration_seconds else 1
    seconds = format_seconds(metadata.iteration_seconds)
    return f"{metadata.source} iteration: {seconds}, {100 * share:.1f} % of ideal"


def _reads_last(channel: str) -> tuple[str, bool]:
    device, _, direction = channel.rpartition(" ")
    return device, direction == "read"


def _two_axes(axes: Axes | None, num_lanes: int) -> tuple[Axes, Axes]:
    lanes_inches = 0.42 * num_lanes + 0.3
    if axes is None:
        figure = drawing.new_figure(10.5, lanes_inches + 2.6)
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(lanes_inches, 1.9))
        return upper, lower
    from mpl_toolkits.axes_grid1 import make_axes_locatable

    lower = make_axes_locatable(axes).append_axes("bottom", "60%", pad=0.15, sharex=axes)
    return axes, lower


def busy_fraction(starts: FloatArray, ends: FloatArray, edges: FloatArray) -> FloatArray:
    """Fraction of each column [edges[i], edges[i+1]) covered by intervals that do not overlap."""
    if len(starts) == 0:
        return np.zeros(len(edges) - 1)
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum(ends[order], starts[order])
    moments = np.column_stack((starts, ends)).reshape(-1)
    busy_until = np.column_stack((np.zeros(len(starts)), ends - starts)).reshape(-1).cumsum()
    covered: FloatArray = np.diff(np.interp(edges, moments, busy_until)) / np.diff(edges)
    return np.clip(covered, 0.0, 1.0)


def _draw_lane(
    axes: Axes,
    events: Events,
    layers: tuple[tuple[str, str, str, str], ...],
    edges: FloatArray,
    factor: float,
    *,
    bottom: float,
) -> None:
    base = np.full(len(edges) - 1, bottom - _LANE_HEIGHT / 2)
    for what, cause, label, color in layers:
        rows = (events.what == what) & ((events.cause == cause) | (what == "kernel"))
        if not rows.any():
            continue
        fraction = busy_fraction(events.start_seconds[rows], events.end_seconds[rows], edges)
        top = np.minimum(base + fraction * _LANE_HEIGHT, bottom + _LANE_HEIGHT / 2)
        known = axes.get_legend_handles_labels()[1]
        axes.stairs(
            top,
            edges * factor,
            baseline=base,
            fill=True,
            color=color,
            label=label if label not in known else None,
        )
        base = top


def _finish_lanes(axes: Axes, labels: list[str], right: float) -> None:
    drawing.tidy(axes)
    axes.grid(axis="y", visible=False)
    for lane in range(len(labels)):
        axes.axhline(-lane - _LANE_HEIGHT / 2, color=drawing.GREY, linewidth=0.6, zorder=0.5)
    axes.set_yticks([-lane for lane in range(len(labels))], labels)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelbottom=False)
    axes.spines["left"].set_visible(False)
    axes.set(xlim=(0, right), ylim=(-len(labels) + 0.45, 0.55))
    order = [layer[2] for layer in (*_COMPUTE_LAYERS, *_TRANSFER_LAYERS)]
    entries = zip(*axes.get_legend_handles_labels(), strict=True)
    handles = [handle for handle, _ in sorted(entries, key=lambda entry: order.index(entry[1]))]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)


def _draw_iteration_ends(axes: Axes, events: Events, factor: float) -> None:
    kernels = events.what == "kernel"
    for iteration in range(int(events.iteration.max(initial=0))):
        end = events.end_seconds[kernels & (events.iteration == iteration)].max(initial=0.0)
        axes.axvline(end * factor, color=drawing.BLACK, linestyle=":", linewidth=1)


def _draw_memory(axes: Axes, timeline: Timeline, edges: FloatArray, factor: float) -> None:
    drawing.tidy(axes)
    scale, unit = drawing.memory_unit(_most_bytes(timeline))
    events = timeline.events.take(timeline.events.what == "memory")
    for rank in sorted(set(events.rank.tolist())):
        held = _held_bytes(events.take(events.rank == rank), edges) * scale
        label = "held" if rank == events.rank.min() else None
        axes.stairs(held, edges * factor, fill=True, color=drawing.SKY, alpha=0.55, label=label)
        axes.stairs(held, edges * factor, baseline=None, color=drawing.BLUE, linewidth=1)
    if timeline.metadata.capacity_bytes > 0:
        drawing.capacity_line(axes, timeline.metadata.capacity_bytes, scale, unit)
    axes.set(ylim=(0, 1.12 * _most_bytes(timeline) * scale or 1), ylabel=f"GPU memory ({unit})")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)


def _most_bytes(timeline: Timeline) -> int:
    return max(timeline.metadata.capacity_bytes, timeline.metadata.peak_gpu_bytes)


def _held_bytes(events: Events, edges: FloatArray) -> npt.NDArray[np.float64]:
    """Most bytes held in each column; where nothing is sampled, what was held last."""
    order = np.argsort(events.start_seconds, kind="stable")
    starts, held = events.start_seconds[order], events.bytes[order].astype(np.float64)
    num_columns = len(edges) - 1
    before = np.searchsorted(starts, edges[:-1], side="right") - 1
    most = np.where(before >= 0, held[np.maximum(before, 0)], 0.0)
    column = np.clip(np.searchsorted(edges, starts, side="right") - 1, 0, num_columns - 1)
    np.maximum.at(most, column, held)
    return most
