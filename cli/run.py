"""``teraio run``: execute a plan in an unmodified training script."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from teraio.cli.command import Reporter, ScriptCommand, command
from teraio.cli.options import (
    INPUT_PATH,
    gpu_memory_option,
    host_memory_option,
    timeline_option,
)
from teraio.cli.result import Result
from teraio.cli.ssd_files import file_facts, file_line, ssd_backend_option, ssd_path_option
from teraio.cli.tables import duration, facts, size
from teraio.cli.timelines import write_timeline

if TYPE_CHECKING:
    from rich.console import Console

    from teraio.contracts.plan import Plan
    from teraio.executor import RunReport


@command(
    "run",
    cls=ScriptCommand,
    leading=1,
    example="teraio run gpt.plan train.py --batch-size 4\n"
    "teraio run --gpu-memory 8GB --ssd-path /mnt/nvme gpt.plan train.py\n"
    "torchrun --nproc-per-node 2 --no-python teraio run gpt.plan train.py",
)
@gpu_memory_option
@host_memory_option
@ssd_path_option
@ssd_backend_option
@click.option(
    "--verify-transfers",
    is_flag=True,
    help="Compare a checksum of everything that comes back from a tier. Slow.",
)
@click.option(
    "--on-drift",
    type=click.Choice(["fetch", "stop"]),
    default="fetch",
    show_default=True,
    help="When the run leaves its trace: fetch what is missing on demand, or stop.",
)
@click.option("--device", help="cpu or cuda: whose memory is planned [default: the plan's].")
@timeline_option
@click.argument("plan", metavar="PLAN", type=INPUT_PATH)
@click.argument("script", metavar="SCRIPT", type=INPUT_PATH)
@click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
def run(
    reporter: Reporter,
    plan: Path,
    script: Path,
    arguments: tuple[str, ...],
    gpu_memory: int | None,
    host_memory: int | None,
    ssd_path: tuple[Path, ...],
    ssd_backend: str,
    verify_transfers: bool,
    on_drift: str,
    device: str | None,
    timeline: Path | None,
) -> Result:
    """Run a training script under a plan, as "python SCRIPT ARGS" would otherwise.

    Budgets are the plan's unless given. Options of teraio stand before SCRIPT; everything after it
    is the script's. Results of the training are the same, bit for bit. Under torchrun each rank
    runs its own plan: PLAN is the name that "teraio plan" was given for all, or contains {rank}.
    """
    from teraio.contracts.plan import Plan
    from teraio.contracts.rank_paths import plan_path_of_rank
    from teraio.executor import run_script
    from teraio.executor.ranks import current_rank

    plan = plan_path_of_rank(plan, *current_rank())
    loaded = Plan.load(plan)
    report = run_script(
        loaded,
        script,
        list(arguments),
        gpu_memory=gpu_memory,
        host_memory=host_memory,
        ssd_path=ssd_path or None,
        ssd_backend=ssd_backend,
        verify_transfers=verify_transfers,
        on_drift=on_drift,
        device=device,
    )
    write_timeline(report.timeline, timeline)
    data = {
        "steps": report.steps,
        "measured_seconds": report.measured_seconds if report.steps else None,
        "predicted_seconds": loaded.predicted_seconds,
        "peak_bytes": report.peak_bytes,
        "reserved_bytes": report.reserved_bytes or None,
        "relocated_bytes": report.relocated_bytes,
        "host_lead_seconds": report.host_lead_seconds,
        "moves_planned": report.moves_planned,
        "moves_found": report.moves_found,
        "substituted_kernels": report.substituted_kernels,
        "drift": report.drift,
        "first_drift": report.first_drift,
        "demand_fetches": report.demand_fetches,
        "evictions": report.evictions,
        "ssd_files": [file_facts(use) for use in report.ssd_files],
        "verified_reads": report.verified_reads,
        "timeline": timeline,
    }
    return Result(data, lambda console: _show(console, str(plan), loaded, report))


def _show(console: Console, title: str, plan: Plan, report: RunReport) -> None:
    kernels = len(plan.kernels) * (report.steps - report.warm_up_steps)
    rows = [
        ("steps", f"{report.steps:,}" if report.steps else "0: the script made no optimizer step"),
        ("measured iteration, median", duration(report.measured_seconds if report.steps else None)),
        ("predicted iteration", duration(plan.predicted_seconds)),
        ("peak on the GPU", f"{size(report.peak_bytes)} of {size(report.budget_bytes)}"),
        ("moves that found their storage", _of(report.moves_found, report.moves_planned)),
        ("other kernels than in the trace", _of(report.substituted_kernels, len(plan.kernels))),
        ("kernels off the trace (drift)", _of(report.drift, kernels)),
        ("demand fetches", f"{report.demand_fetches:,} ({size(report.demand_fetch_bytes)})"),
        ("evictions", f"{report.evictions:,} ({size(report.eviction_bytes)})"),
    ]
    if report.reserved_bytes:
        rows.append(("reserved by PyTorch's allocator", size(report.reserved_bytes)))
    if report.relocated_bytes:
        rows.append(("moved within the GPU, each step", size(report.relocated_bytes)))
    if report.host_lead_seconds is not None:
        rows.append(("training thread ahead of the GPU", duration(report.host_lead_seconds)))
    rows += [(f"{use.device} in {use.path}", file_line(use)) for use in report.ssd_files]
    if report.verified_reads:
        rows.append(("reads whose checksum agreed", f"{report.verified_reads:,}"))
    if report.first_substituted:
        rows.append(("first of the others", report.first_substituted))
    if report.first_drift:
        rows.append(("first off the trace", report.first_drift))
    console.print(facts(title, rows))


def _of(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,}"
