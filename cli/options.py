"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from teraio.errors import InputError
from teraio.units import parse_bytes

PICTURE_SUFFIXES = (".png", ".svg", ".pdf")
TIMELINE_SUFFIXES = (".json", ".timeline")


class Size(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.5
    """Bytes, written ``94GB`` (10^9), ``80GiB`` (2^30) or as a number of bytes."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: click.Context | None) -> int:
        """Bytes as an integer."""
        try:
            return parse_bytes(value)
        except InputError as error:
            self.fail(str(error).removeprefix("size: "), param, ctx)


class OutputPath(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.5
    """A path to write. Refused at once, before any work, if something else stands there."""

    name = "path"

    def __init__(self, suffixes: tuple[str, ...] = ()) -> None:
        self.suffixes = suffixes

    def convert(self, value: Any, param: Any, ctx: click.Context | None) -> Path:
        """The path. Raises InputError if it could not be written later."""
        from teraio.contracts.output import check_replaceable

        path = Path(value)
        if self.suffixes and path.suffix not in self.suffixes:
            self.fail(f"{path}: the name must end in {' or '.join(self.suffixes)}", param, ctx)
        check_replaceable(path)
        if not os.access(path.parent, os.W_OK):
            raise InputError(f"{path}: the folder {path.parent} is not writable")
        return path


INPUT_PATH = click.Path(path_type=Path)

trace_argument = click.argument("trace", metavar="TRACE", type=INPUT_PATH)

hardware_option = click.option(
    "--hardware",
    metavar="FILE|PRESET",
    required=True,
    help="Hardware file, or a preset such as paper, g10, h200, rtx4090, cpu.",
)

optional_hardware_option = click.option(
    "--hardware",
    metavar="FILE|PRESET",
    help="Hardware file, or a preset such as paper, g10, h200, rtx4090, cpu.",
)

gpu_memory_option = click.option(
    "--gpu-memory", type=Size(), help="GPU memory to stay within, e.g. 40GiB [default: all of it]."
)

host_memory_option = click.option(
    "--host-memory", type=Size(), help="Host memory for offloading, e.g. 64GB [default: all of it]."
)

ssd_years_option = click.option(
    "--ssd-years",
    type=float,
    metavar="YEARS",
    help="Write so little that each SSD lasts that long in training without a pause.",
)

timeline_option = click.option(
    "--timeline",
    type=OutputPath(TIMELINE_SUFFIXES),
    help="Write the timeline: .json opens in ui.perfetto.dev, .timeline in teraio.Timeline.load.",
)

plot_option = click.option(
    "--plot", type=OutputPath(PICTURE_SUFFIXES), help="Draw it to a .png, .svg or .pdf file."
)


def output_option(
    what: str, *, required: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``-o``: replaces what teraio wrote before, refuses to touch anything else."""
    return click.option("-o", "--output", type=OutputPath(), required=required, help=what)
