"""``teraio compare``: several planners side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from teraio.cli.command import Reporter, command
from teraio.cli.options import (
    gpu_memory_option,
    hardware_option,
    host_memory_option,
    plot_option,
    ssd_years_option,
    trace_argument,
)
from teraio.cli.result import Result
from teraio.cli.tables import dollars, duration, grid, percent, size, years

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

_HEADINGS = (
    "planner",
    "iteration",
    "of ideal",
    "stalled",
    "GPU peak",
    "host peak",
    "to SSD",
    "SSD lasts",
    "$ / M tokens",
)


@command(
    "compare",
    example="teraio compare bert.trace --hardware g10 --planners ideal,optimal,greedy,on-demand "
    "--plot compare.png",
)
@trace_argument
@hardware_option
@click.option(
    "--planners",
    default="ideal,optimal,greedy,on-demand",
    show_default=True,
    metavar="A,B,C",
    help="Planners and policies, in the order of the table.",
)
@gpu_memory_option
@host_memory_option
@ssd_years_option
@plot_option
def compare(
    reporter: Reporter,
    trace: Path,
    hardware: str,
    planners: str,
    gpu_memory: int | None,
    host_memory: int | None,
    ssd_years: float | None,
    plot: Path | None,
) -> Result:
    """Plan and simulate with several planners: one table, one picture."""
    from teraio.planner import compare as make_table
    from teraio.traces.trace import Trace

    names = [name.strip() for name in planners.split(",") if name.strip()]
    loaded = Trace.load(trace)
    with reporter.progress_with_compilation("Comparing") as progress:
        table = make_table(
            loaded,
            hardware,
            names,
            gpu_memory=gpu_memory,
            host_memory=host_memory,
            ssd_years=ssd_years,
            progress=progress,
        )
    if plot is not None:
        from teraio.contracts.drawing import save_picture
        from teraio.planner.plot_comparison import plot_comparison

        save_picture(plot_comparison(table), plot)
    data = {"rows": table.to_dict("records"), "plot": plot}
    return Result(data, lambda console: _show(console, str(trace), table))


def _show(console: Console, title: str, table: pd.DataFrame) -> None:
    stalls = [f"stall_{cause}_seconds" for cause in ("read", "memory", "host")]
    rows = [
        (
            row["planner"],
            duration(row["iteration_seconds"]),
            percent(row["fraction_of_ideal"]),
            duration(sum(row[stall] for stall in stalls)),
            size(row["peak_gpu_bytes"]),
            size(row["peak_host_bytes"]),
            size(row["ssd_bytes_written"]),
            years(row["ssd_years"]),
            dollars(row["dollars_per_million_tokens"]),
        )
        for row in table.astype(object).where(table.notna(), float("nan")).to_dict("records")
    ]
    console.print(grid(title, _HEADINGS, rows))
    for planner, note in zip(table["planner"], table["note"], strict=True):
        if note:
            console.print(f"{planner}: {note}")
