"""``teraio replay``: a plan with real transfers and timed stand-in kernels, without its model."""

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
from teraio.cli.ssd_files import file_facts, file_line, ssd_backend_option, ssd_path_option
from teraio.cli.tables import duration, facts, grid
from teraio.cli.timelines import show_timeline, write_timeline
from teraio.cli.trace_names import kernel_names, storage_names

if TYPE_CHECKING:
    from rich.console import Console

    from teraio.executor import Replay


@command(
    "replay",
    example="teraio replay llama.trace llama.plan --device cuda --timeline replay.json\n"
    "teraio replay llama.trace llama.plan --device cpu --scale 0.01",
)
@trace_argument
@click.argument("plan", metavar="[PLAN]", type=INPUT_PATH, required=False)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Whose memory the plan is about.",
)
@optional_hardware_option
@gpu_memory_option
@host_memory_option
@ssd_path_option
@ssd_backend_option
@click.option(
    "--iterations",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Measured after one that warms up.",
)
@click.option(
    "--scale",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help="Multiply sizes, durations and budgets, to fit a smaller machine.",
)
@click.option(
    "--verify",
    type=click.Choice(["full", "sampled", "off"]),
    help="How much of each storage to compare when it is back [default: sampled; off on a GPU].",
)
@click.option(
    "--memory-traffic", is_flag=True, help="Stand-in kernels read and write memory as the trace's."
)
@timeline_option
@plot_option
def replay(
    reporter: Reporter,
    trace: Path,
    plan: Path | None,
    device: str,
    hardware: str | None,
    gpu_memory: int | None,
    host_memory: int | None,
    ssd_path: tuple[Path, ...],
    ssd_backend: str,
    iterations: int,
    scale: float,
    verify: str | None,
    memory_traffic: bool,
    timeline: Path | None,
    plot: Path | None,
) -> Result:
    """Play a plan on this machine: real memory, real transfers, and a stand-in for each kernel.

    No model is needed: a stand-in takes its kernel's time of the trace. Without PLAN, storages are
    paged on demand. What is measured stands beside what the simulator says.
    """
    from teraio.contracts.plan import Plan
    from teraio.executor import replay as play
    from teraio.traces.trace import Trace
    from teraio.traces.transforms import trace_of_plan

    if plan is None and hardware is None:
        raise click.UsageError("without PLAN, --hardware is needed")
    loaded = Trace.load(trace)
    chosen = None if plan is None else Plan.load(plan)
    with reporter.progress_with_compilation("Replaying") as report:
        played = play(
            loaded,
            chosen,
            device=device,
            hardware=hardware,
            gpu_memory=gpu_memory,
            host_memory=host_memory,
            ssd_path=ssd_path or None,
            ssd_backend=ssd_backend,
            iterations=iterations,
            scale=scale,
            verify=verify,
            memory_traffic=memory_traffic,
            progress=report and (lambda iteration: report(f"iteration {iteration}")),
        )
    named = loaded if chosen is None else trace_of_plan(loaded, chosen)
    write_timeline(played.timeline, timeline, plot, kernel_names(named), storage_names(named))
    files = [file_facts(use) for use in played.ssd_files]
    data = {**played.summary(), "ssd_files": files, "timeline": timeline, "plot": plot}
    return Result(data, lambda console: _show(console, str(plan or trace), played))


def _show(console: Console, title: str, played: Replay) -> None:
    show_timeline(console, title, played.timeline)
    measured, predicted = played.timeline.stall_seconds, played.predicted.stall_seconds
    rows = [("iteration", duration(played.iteration_seconds), duration(played.predicted_seconds))]
    rows += [
        (f"stall, {cause}", duration(measured[cause]), duration(predicted[cause]))
        for cause in measured
    ]
    console.print(grid("Beside the simulator", ("", "measured", "predicted"), rows))
    notes = [
        ("measured against predicted", f"{100 * played.error:+.1f} %"),
        ("moves that found their storage", f"{played.moves_found:,} of {played.moves_planned:,}"),
        ("transfers whose bytes were compared", f"{played.transfers_checked:,}: all right"),
    ]
    if not played.transfers_checked:
        notes.pop()
    notes += [(f"{use.device} in {use.path}", file_line(use)) for use in played.ssd_files]
    if played.scale != 1:
        notes.append(("scaled", f"sizes, durations and budgets times {played.scale:g}"))
    if played.device == "cuda":
        notes.append(("stand-in kernels", f"{100 * played.kernel_error:+.1f} % off their time"))
    console.print(facts("", notes))
