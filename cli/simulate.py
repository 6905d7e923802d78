"""``teraio simulate``: play a plan, or no plan, through the simulator."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from teraio.traces.trace import Trace


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

    if plan is None and hardware is None:
        raise click.UsageError("without PLAN, --hardware is needed")
    loaded = Trace.load(trace)
    with reporter.progress("Simulating") as report:
        played = play(
            loaded,
            None if plan is None else Plan.load(plan),
            hardware,
            gpu_memory=gpu_memory,
            host_memory=host_memory,
            record=timeline is not None or plot is not None,
            progress=report and (lambda iteration: report(f"iteration {iteration}")),
        )
    write_timeline(played, timeline, plot, _kernel_names(loaded), _storage_names(loaded))
    data = {**summary(played), "timeline": timeline, "plot": plot}
    return Result(data, lambda console: show_timeline(console, str(plan or trace), played))


def _kernel_names(trace: Trace) -> list[str]:
    return [str(op) for op in trace.kernels.op]


def _storage_names(trace: Trace) -> list[str]:
    names = zip(trace.storages.name, trace.storages.kind, strict=True)
    return [name or f"{kind} {index}" for index, (name, kind) in enumerate(names)]
