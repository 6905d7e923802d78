"""``teraio simulate``: play a plan, or no plan, through the simulator."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from teraio.cli.tables import facts, percent, size
from teraio.cli.timelines import show_timeline, write_timeline
from teraio.cli.trace_names import kernel_names, storage_names

if TYPE_CHECKING:
    from rich.console import Console


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
@click.option(
    "--reserved", is_flag=True, help="Also what PyTorch's allocator will reserve, with PLAN."
)
def simulate(
    reporter: Reporter,
    trace: Path,
    plan: Path | None,
    hardware: str | None,
    gpu_memory: int | None,
    host_memory: int | None,
    timeline: Path | None,
    plot: Path | None,
    reserved: bool,
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
    if plan is None and reserved:
        raise click.UsageError("--reserved: needs a PLAN")
    loaded = Trace.load(trace)
    chosen = None if plan is None else Plan.load(plan)
    with reporter.progress_with_compilation("Simulating") as report:
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
    data: dict[str, Any] = {**summary(played), "timeline": timeline, "plot": plot}
    memory = None
    if chosen is not None and reserved:
        from teraio.simulator.reserved_memory import predict_reserved_memory

        memory = predict_reserved_memory(chosen)
        data["reserved_gpu_bytes"] = memory.reserved_bytes
        data["relocated_bytes"] = memory.moved_bytes

    def show(console: Console) -> None:
        show_timeline(console, str(plan or trace), played)
        if memory is not None:
            share = percent(memory.fragmentation)
            reserved_text = f"{size(memory.reserved_bytes)}, {share} more than is allocated"
            rows = [("PyTorch will reserve", reserved_text)]
            if memory.moved_bytes:
                rows.append(("moved within the GPU, each step", size(memory.moved_bytes)))
            console.print(facts("Memory", rows))

    return Result(data, show)
