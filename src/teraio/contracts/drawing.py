"""What all pictures share: colours, a figure without pyplot's global state, saving with our mark.

Colours are those of Okabe and Ito, which people with any colour vision can tell apart. Blue and
green transfers were planned; red always means lost time.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from teraio.contracts.output import replacing_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLACK = "#000000"
GREY = "#B8BEC6"
DARK_GREY = "#5B6470"
BLUE = "#0072B2"
SKY = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
ORANGE = "#E69F00"
RED = "#D55E00"
DARK_RED = "#8C2D04"
PINK = "#CC79A7"
CAPACITY_COLOR = "#B00020"

_DOTS_PER_INCH = 160


def new_figure(width_inches: float, height_inches: float) -> Figure:
    """A figure that belongs to nobody else and lays itself out."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width_inches, height_inches), layout="constrained")


def tidy(axes: Axes) -> None:
    """Leave out the frame's top and right, and put a faint grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(DARK_GREY)
    axes.tick_params(colors=DARK_GREY, labelcolor=BLACK)
    axes.grid(axis="both", color="#E6E8EB", linewidth=0.7)
    axes.set_axisbelow(True)


def capacity_line(axes: Axes, capacity_bytes: float, factor: float, unit: str) -> None:
    """The dashed line that memory must stay below, readable on any colour.

    ``factor`` and ``unit`` are the axis's (:func:`memory_unit`).
    """
    from matplotlib.patheffects import withStroke

    axes.axhline(
        capacity_bytes * factor,
        color=CAPACITY_COLOR,
        linestyle="--",
        linewidth=1.6,
        label=f"capacity {capacity_bytes * factor:.3g} {unit}",
        path_effects=[withStroke(linewidth=3.2, foreground="white")],
    )


def legend_above(axes: Axes, columns: int = 1) -> None:
    """The legend over the data's upper edge, where it hides nothing."""
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=columns,
        frameon=False,
        fontsize="small",
        borderaxespad=0.2,
    )


def save_picture(axes: Axes, path: str | Path) -> None:
    """Write the figure of ``axes`` to a .png, .svg or .pdf file, atomically.

    Raises InputError if something that is not teraio's stands at ``path``.
    """
    path = Path(path)
    figure = axes.get_figure(root=True)
    assert figure is not None, "axes always belong to a figure"
    key = "Software" if path.suffix == ".png" else "Creator"
    with replacing_file(path) as temporary:
        figure.savefig(temporary, dpi=_DOTS_PER_INCH, metadata={key: "teraio"})


def memory_unit(num_bytes: float) -> tuple[float, str]:
    """Factor and name of the decimal unit in which an axis that spans ``num_bytes`` reads best."""
    for factor, unit in ((1e-9, "GB"), (1e-6, "MB")):
        if num_bytes * factor >= 1:
            return factor, unit
    return 1e-3, "kB"


def time_unit(seconds: float) -> tuple[float, str]:
    """Factor and name of the unit in which an axis that spans ``seconds`` reads best."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 2:
            return factor, unit
    return 1e6, "us"
