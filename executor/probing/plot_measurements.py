"""Two pictures of a probe: rates by size of transfer with the fit, and sustained writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from teraio.contracts import drawing
from teraio.executor.probing.fitting import KINDS
from teraio.executor.probing.measurements import MeasuredPath, Measurements

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = dict(zip(KINDS, (drawing.GREEN, drawing.BLUE, drawing.YELLOW, drawing.SKY), strict=True))
_LABELS = dict(
    zip(KINDS, ("read", "write", "read while writing", "write while reading"), strict=True)
)
_LINES = (drawing.BLUE, drawing.ORANGE, drawing.GREEN, drawing.PINK)


def plot_measurements(measured: Measurements) -> Axes:
    """Draw each path's rates by size (dots measured, lines fitted), and below the writes over time.

    Returns the first axes.
    """
    paths, has_sustained = measured.paths, bool(measured.sustained)
    num_rows = len(paths) + has_sustained
    figure = drawing.new_figure(7.5, 2.8 * num_rows)
    axes = figure.subplots(num_rows, 1, squeeze=False)[:, 0]
    for path, path_axes in zip(paths, axes, strict=False):
        _draw_path(path_axes, path)
    drawing.legend_above(axes[0], columns=2)
    if has_sustained:
        _draw_sustained(axes[-1], measured)
    first: Axes = axes[0]
    return first


def _draw_path(axes: Axes, path: MeasuredPath) -> None:
    drawing.tidy(axes)
    sizes = np.array([timing.nbytes for timing in path.timings])
    line = np.geomspace(sizes.min(), sizes.max() * 1.001, 100)
    for kind in KINDS:
        timings = [timing for timing in path.timings if timing.kind == kind]
        fitted = [nbytes / path.fit.seconds(kind, int(nbytes)) / 1e9 for nbytes in line]
        axes.plot(line / 2**20, fitted, color=_COLORS[kind], linewidth=1)
        axes.plot(
            [timing.nbytes / 2**20 for timing in timings],
            [timing.rate / 1e9 for timing in timings],
            "o",
            color=_COLORS[kind],
            markersize=4,
            label=_LABELS[kind],
        )
    axes.set(xscale="log", ylim=(0, None), xlabel="size of a transfer (MiB)")
    ticks = np.unique(sizes) / 2**20
    axes.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylabel(f"{path.device}, {path.backend} (GB/s)")


def _draw_sustained(axes: Axes, measured: Measurements) -> None:
    drawing.tidy(axes)
    for index, writes in enumerate(measured.sustained):
        seconds, rates = zip(*writes.over_time(), strict=True)
        color = _LINES[index % len(_LINES)]
        axes.plot(seconds, np.array(rates) / 1e9, color=color, label=writes.device)
        axes.axhline(writes.rate / 1e9, color=color, linestyle=":", linewidth=1)
    axes.set(ylim=(0, None), xlabel="writing for (s)", ylabel="sustained writes (GB/s)")
    axes.legend(loc="lower left", frameon=False, fontsize="small")
