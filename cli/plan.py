"""``teraio plan``: decide what moves when."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from teraio.cli.command import Reporter, command
from teraio.cli.options import (
    gpu_memory_option,
    hardware_option,
    host_memory_option,
    output_option,
    ssd_years_option,
    trace_argument,
)
from teraio.cli.result import Result
from teraio.cli.tables import dollars, duration, facts, percent, size, years

if TYPE_CHECKING:
    from rich.console import Console

    from teraio.contracts.plan import Plan


@command("plan", example="teraio plan bert.trace --hardware g10 --gpu-memory 16GB -o bert.plan")
@trace_argument
@hardware_option
@output_option("The plan to write, e.g. bert.plan.", required=False)
@click.option("--planner", default="optimal", show_default=True, help="Who decides.")
@gpu_memory_option
@host_memory_option
@click.option(
    "--bandwidth-share",
    type=float,
    default=1.0,
    show_default=True,
    help="Share of the rates that the plan counts on; the prediction uses all of them.",
)
@ssd_years_option
@click.option(
    "--transform",
    metavar="NAME",
    help="Change the training before planning; the plan says so, and running it does it. "
    "optimizer-in-backward steps each parameter as soon as its gradient is complete.",
)
@click.option("--time-limit", type=float, metavar="SECONDS", help="Return the best found by then.")
@click.option(
    "--start",
    type=click.Path(path_type=Path),
    metavar="PLAN",
    help="An earlier plan of the same trace to start from, say for another budget.",
)
@click.option(
    "--bound/--no-bound",
    default=None,
    help="Prove how fast any plan could be, and what more memory or bandwidth would be worth; "
    "optimal does so unless told not to.",
)
def plan(
    reporter: Reporter, trace: Path, hardware: str, output: Path | None, **options: Any
) -> Result:
    """Decide which storages leave the GPU when, and predict the iteration.

    Exit code 1 if no plan can work: one kernel alone needs more memory than the GPU has, or the
    SSDs must be written more than they may be.
    """
    from teraio.planner import plan as make_plan
    from teraio.planner import plan_summary
    from teraio.traces.trace import Trace

    loaded = Trace.load(trace)
    with reporter.progress("Planning") as progress:
        made = make_plan(loaded, hardware, progress=progress, **options)
    if output is not None:
        made.save(output)
    summary = plan_summary(made)
    data = {**summary, "moves": len(made.moves), "file": output}
    return Result(data, lambda console: _show(console, made, summary, output))


def _show(console: Console, plan: Plan, summary: Mapping[str, Any], output: Path | None) -> None:
    metadata = plan.metadata
    written = sum(metadata.ssd_bytes_written.values())
    moved = plan.moves.nbytes
    offloaded, fetched = moved[plan.moves.writes].sum(), moved[plan.moves.prefetch_start >= 0].sum()
    rows = [
        ("planner", metadata.planner),
        *([("transform", metadata.transform)] if metadata.transform else []),
        ("predicted iteration", duration(plan.predicted_seconds)),
        ("ideal iteration", duration(plan.ideal_seconds)),
        ("lower bound", f"{duration(plan.lower_bound_seconds)} ({metadata.bound_kind})"),
        ("gap to the bound", f"at most {percent(plan.gap)}"),
        ("fraction of ideal", percent(plan.fraction_of_ideal)),
        (
            "peak on the GPU",
            f"{size(metadata.peak_gpu_bytes)} of {size(metadata.gpu_memory_bytes)}",
        ),
        (
            "peak on the host",
            f"{size(metadata.peak_host_bytes)} of {size(metadata.host_memory_bytes)}",
        ),
        ("moves", f"{len(plan.moves):,}" if len(plan.moves) else _why_no_moves(plan)),
        ("moved per iteration", f"{size(offloaded)} out, {size(fetched)} in"),
        ("written to SSD per iteration", size(written)),
        ("SSDs last", years(summary["ssd_years"])),
        ("cost of a million tokens", dollars(summary["dollars_per_million_tokens"])),
        ("planning took", duration(metadata.planning_seconds)),
        *_bound_rows(plan),
    ]
    console.print(facts(str(output or "plan, not saved (no -o)"), rows))


def _bound_rows(plan: Plan) -> list[tuple[str, str]]:
    """What proving took, and what would help most; nothing if no bound was asked for."""
    metadata = plan.metadata
    if metadata.bound_seconds == 0:
        return []
    worth = [
        *((f"1 GB more of {name}", s) for name, s in metadata.value_of_gb.items()),
        *((f"1 GB/s more of {name}", s) for name, s in metadata.value_of_gb_per_second.items()),
    ]
    helpful = sorted((row for row in worth if row[1] > 0), key=lambda row: -row[1])
    rows = [("the bound took", duration(metadata.bound_seconds))]
    return rows + [(name, f"{duration(seconds)} off the bound") for name, seconds in helpful]


def _why_no_moves(plan: Plan) -> str:
    metadata = plan.metadata
    has_moves = metadata.planner not in ("on-demand", "recompute-only")
    if metadata.peak_gpu_bytes <= metadata.gpu_memory_bytes and has_moves:
        return "none needed: everything fits; give a smaller --gpu-memory to offload"
    return "none: this planner makes no moves ahead"


def _of(used_bytes: int, budget_bytes: int) -> str:
    return f"{size(used_bytes)} of {size(budget_bytes)}"
