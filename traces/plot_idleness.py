"""How long storages lie idle, against their size (paper, Figure 2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from teraio.contracts import drawing
from teraio.contracts.hardware import Ssd
from teraio.contracts.table import FloatArray
from teraio.traces.characterise import round_trip_seconds
from teraio.traces.idleness import LARGE_BYTES, LONG_SECONDS, Idleness, idleness
from teraio.traces.lifetimes import inactive_periods
from teraio.traces.trace import Trace
from teraio.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.ticker import Formatter

_BINS_PER_DECADE = 6
_MAX_DECADES = 7
"""Of sizes, below the largest. Smaller storages hold next to nothing and are left out."""


def plot_idleness(trace: Trace, ssd: Ssd | None = None, axes: Axes | None = None) -> Axes:
    """Draw how many inactive periods there are of each length and size, and return the axes.

    Both scales are logarithmic; the colour counts periods. The frame marks storages of 10 MB to
    1 GB idle for 10 ms or more. Above the line, a period outlasts the way to ``ssd`` and back.
    """
    if axes is None:
        axes = drawing.new_figure(6.0, 4.2).add_subplot()
    drawing.tidy(axes)
    axes.set(xscale="log", yscale="log", xlabel="size of the storage", ylabel="time idle")
    periods = inactive_periods(trace)
    nbytes = trace.storages.nbytes[periods.storage].astype(float)
    shown = (nbytes > nbytes.max(initial=0) / 10**_MAX_DECADES) & (periods.seconds > 0)
    sizes, seconds = nbytes[shown], periods.seconds[shown]
    size_edges = _edges(np.r_[sizes, LARGE_BYTES])
    time_edges = _edges(np.r_[seconds, LONG_SECONDS])
    _draw_counts(axes, sizes, seconds, size_edges, time_edges)
    axes.set(xlim=(size_edges[0], size_edges[-1]), ylim=(time_edges[0], time_edges[-1]))
    _draw_frame(axes, time_edges[-1], idleness(trace, periods=periods))
    if ssd is not None:
        axes.plot(
            size_edges,
            round_trip_seconds(ssd, size_edges),
            color=drawing.RED,
            linewidth=1.4,
            label=f"to {ssd.name} ({format_bytes(ssd.write_rate)}/s) and back",
        )
    axes.xaxis.set_major_formatter(_short(format_bytes))
    axes.yaxis.set_major_formatter(_short(format_seconds))
    drawing.legend_above(axes)
    return axes


def _edges(values: FloatArray) -> FloatArray:
    """Bounds of bins that hold all values, evenly spaced in the logarithm, on whole decades."""
    low, high = np.floor(np.log10(values.min())), np.ceil(np.log10(values.max()) + 1e-9)
    return np.logspace(low, high, int(high - low) * _BINS_PER_DECADE + 1)


def _draw_counts(
    axes: Axes,
    sizes: FloatArray,
    seconds: FloatArray,
    size_edges: FloatArray,
    time_edges: FloatArray,
) -> None:
    from matplotlib.colors import LogNorm

    counts, _, _ = np.histogram2d(sizes, seconds, bins=(size_edges, time_edges))
    most = max(float(counts.max(initial=0)), 10.0)
    mesh = axes.pcolormesh(
        size_edges,
        time_edges,
        np.ma.masked_equal(counts.T, 0),
        norm=LogNorm(vmin=1, vmax=most),
        cmap="viridis_r",
        rasterized=True,  # an image, also inside a .svg or .pdf
    )
    axes.figure.colorbar(mesh, ax=axes, pad=0.02, label="inactive periods")


def _draw_frame(axes: Axes, longest_seconds: float, large: Idleness) -> None:
    from matplotlib.patches import Rectangle

    low, high = LARGE_BYTES
    share = large.long_idle_storage_fraction
    shown = "none" if share is None else f"{100 * share:.0f} %"
    axes.add_patch(
        Rectangle(
            (low, LONG_SECONDS),
            high - low,
            longest_seconds - LONG_SECONDS,
            fill=False,
            edgecolor=drawing.BLACK,
            linestyle="--",
            linewidth=1.2,
            label=f"{shown} of 10 MB to 1 GB are idle for 10 ms or more",
        )
    )


def _short(text: Callable[[float], str]) -> Formatter:
    """Labels such as ``10 MB``: whole decades need no digits after the point."""
    from matplotlib.ticker import FuncFormatter

    def label(value: float, _: int | None) -> str:
        number, unit = text(value).split(" ")
        return f"{float(number):g} {unit}"

    return FuncFormatter(label)
