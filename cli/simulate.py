"""``teraio simulate``: play a plan, or no plan, through the simulator."""

from __future__ import annotations

from pathlib import Path

import click

from teraio.cli.command import Reporter, command
from teraio.cli.options import (
    INPUT_PATH,
    gpu_memory_option,
    host_memory_option,
    optional_hardware_option,
    plot_option,
    timeline_option,
    trace_argument,
)
from teraio.cli.result import Result
from teraio.cli.timelines import show_timeline, write_timeline
from teraio.cli.trace_names import kernel_names, storage_names


@command(
    "simulate",
    example="teraio simulate bert.trace bert.plan --plot timeline.png --timeline timeline.json",
)
@trace_argument
@click.argument("plan", metavar="[PLAN]", type=INPUT_PATH, required=False)
@optional_hardware_option
@gpu_memory_option
@host_memory_option
@timeline_option
@plot_option
def simulate(
    reporter: Reporter,
    trace: Path,
    plan: Path | None,
    hardware: str | None,
    gpu_memory: int | None,
    host_memory: int | None,
    timeline: Path | None,
    plot: Path | None,
) -> Result:
    """Play a plan through the simulator and account for every second of the iteration.

    Without PLAN, storages are fetched when a kernel needs them and evicted when memory runs out.
    The hardware and budgets are the plan's unless given.
    """
    from teraio.contracts.plan import Plan
    from teraio.contracts.timeline import summary
    from teraio.simulator import simulate as play
    from teraio.traces.trace import Trace
    from teraio.traces.transforms import trace_of_plan

    if plan is None and hardware is None:
        raise click.UsageError("without PLAN, --hardware is needed")
    loaded = Trace.load(trace)
    chosen = None if plan is None else Plan.load(plan)
    with reporter.progress("Simulating") as report:
        played = play(
            loaded,
            chosen,
            hardware,
            gpu_memory=gpu_memory,
            host_memory=host_memory,
            record=timeline is not None or plot is not None,
            progress=report and (lambda iteration: report(f"iteration {iteration}")),
        )
    named = loaded if chosen is None else trace_of_plan(loaded, chosen)
    write_timeline(played, timeline, plot, kernel_names(named), storage_names(named))
    data = {**summary(played), "timeline": timeline, "plot": plot}
    return Result(data, lambda console: show_timeline(console, str(plan or trace), played))
