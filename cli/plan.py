"""``teraio plan``: decide what moves when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from teraio.cli.command import Reporter, command
from teraio.cli.options import (
    INPUT_PATH,
    gpu_memory_option,
    hardware_option,
    host_memory_option,
    output_option,
    ssd_years_option,
)
from teraio.cli.result import Result
from teraio.cli.tables import dollars, duration, facts, grid, percent, size, years
from teraio.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from teraio.contracts.plan import Plan


@command(
    "plan",
    example="teraio plan bert.trace --hardware g10 --gpu-memory 16GB -o bert.plan\n"
    "teraio plan gpt.rank0.trace gpt.rank1.trace --hardware node.toml -o gpt.plan",
)
@click.argument("traces", metavar="TRACE...", type=INPUT_PATH, nargs=-1, required=True)
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
@click.option(
    "--ranks-per-node",
    type=click.IntRange(min=1),
    help="With traces of several ranks: how many share a node [default: all, or as it has GPUs].",
)
def plan(
    reporter: Reporter,
    traces: tuple[Path, ...],
    hardware: str,
    output: Path | None,
    ranks_per_node: int | None,
    **options: Any,
) -> Result:
    """Decide which storages leave the GPU when, and predict the iteration.

    Traces of several ranks give a plan for each, made for its fair share of what they share:
    gpt.rank0.plan and so on, or where -o says {rank}. --host-memory is then for all of a node.

    Exit code 1 if no plan can work: one kernel alone needs more memory than the GPU has, or the
    SSDs must be written more than they may be.
    """
    from teraio.planner import plan as make_plan
    from teraio.planner import plan_summary
    from teraio.traces.trace import Trace

    if len(traces) > 1 or ranks_per_node is not None:
        options["ranks_per_node"] = ranks_per_node
        return _plan_ranks(reporter, traces, hardware, output, options)
    _refuse_overwriting(traces, output)
    loaded = Trace.load(traces[0])
    with reporter.progress_with_compilation("Planning") as progress:
        made = make_plan(loaded, hardware, progress=progress, **options)
    if output is not None:
        made.save(output)
    summary = plan_summary(made)
    data = {**summary, "moves": len(made.moves), "file": output}
    compiled = reporter.compilation_seconds
    return Result(data, lambda console: _show(console, made, summary, output, compiled))


def _refuse_overwriting(traces: Sequence[Path], output: Path | None) -> None:
    for trace in traces:
        if output is not None and output.exists() and trace.exists() and output.samefile(trace):
            raise InputError(f"{output}: is both an input and an output of this command")


def _plan_ranks(
    reporter: Reporter,
    paths: Sequence[Path],
    hardware: str,
    output: Path | None,
    options: Mapping[str, Any],
) -> Result:
    """One plan for each trace; the training is as fast as its slowest rank."""
    from teraio.contracts.rank_paths import path_of_rank
    from teraio.planner import plan_summary
    from teraio.planner.rank_shares import plan_ranks
    from teraio.traces.trace import Trace

    traces = [Trace.load(path) for path in paths]
    files = [output and path_of_rank(output, trace.metadata.rank) for trace in traces]
    for file in files:
        _refuse_overwriting(paths, file)
    with reporter.progress_with_compilation("Planning") as progress:
        plans = plan_ranks(traces, hardware, progress=progress, **options)
    rows = []
    for made, file in zip(plans, files, strict=True):
        rank = made.metadata.rank
        if file is not None:
            made.save(file)
        rows.append({"rank": rank, **plan_summary(made), "moves": len(made.moves), "file": file})
    slowest = max(rows, key=lambda row: row["predicted_seconds"])
    data = {
        "predicted_seconds": slowest["predicted_seconds"],
        "slowest_rank": slowest["rank"],
        "rows": rows,
    }
    return Result(data, lambda console: _show_ranks(console, rows, plans))


def _show_ranks(console: Console, rows: Sequence[Mapping[str, Any]], plans: Sequence[Plan]) -> None:
    headings = ("rank", "predicted", "of ideal", "peak on the GPU", "host", "moves", "file")
    table = [
        (
            str(row["rank"]),
            duration(row["predicted_seconds"]),
            percent(row["fraction_of_ideal"]),
            _of(row["peak_gpu_bytes"], made.metadata.gpu_memory_bytes),
            _of(row["peak_host_bytes"], made.metadata.host_memory_bytes),
            f"{row['moves']:,}",
            str(row["file"] or "not saved (no -o)"),
        )
        for row, made in zip(rows, plans, strict=True)
    ]
    console.print(grid("plans of ranks", headings, table))


def _show(
    console: Console,
    plan: Plan,
    summary: Mapping[str, Any],
    output: Path | None,
    compilation_seconds: float,
) -> None:
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
        *_compilation_rows(compilation_seconds),
    ]
    console.print(facts(str(output or "plan, not saved (no -o)"), rows))


def _compilation_rows(seconds: float) -> list[tuple[str, str]]:
    """Nothing where little had to be compiled."""
    return [("compiling, once on a machine", duration(seconds))] if seconds >= 1 else []


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
