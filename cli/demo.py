"""``teraio demo``: the whole chain in under two minutes, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from teraio.cli.command import Reporter, command
from teraio.cli.result import Result
from teraio.cli.tables import duration, facts, percent, size
from teraio.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from teraio.cli.demonstration import Demonstration


@command("demo", example="teraio demo --output demo-output")
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("demo-output"),
    show_default=True,
    help="Folder for the trace, the plan, the timelines and the pictures.",
)
def demo(reporter: Reporter, output: Path) -> Result:
    """Train a small Llama in half of its memory: profile, plan, predict, execute, compare.

    The "GPU" is main memory under a byte budget that is enforced and measured; host memory and a
    file are the tiers to offload to.
    """
    from teraio.cli.demonstration import demonstrate

    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{output}: cannot be made ({error.strerror})") from None
    with reporter.progress_with_compilation("Demonstrating") as progress:
        outcome = demonstrate(output.resolve(), progress or (lambda _: None))
    files = _save(outcome, output)
    return Result(_data(outcome, files), lambda console: _show(console, outcome, files))


def _save(outcome: Demonstration, output: Path) -> dict[str, Path]:
    from teraio.contracts import drawing

    files = {
        "trace": output / "demo.trace",
        "hardware": output / "hardware.toml",
        "plan": output / "demo.plan",
        "predicted": output / "predicted.timeline",
        "measured": output / "measured.timeline",
    }
    outcome.trace.save(files["trace"])
    outcome.hardware.save(files["hardware"])
    outcome.plan.save(files["plan"])
    outcome.predicted.save(files["predicted"])
    outcome.run.timeline.save(files["measured"])
    pictures = {
        "memory_picture": outcome.trace.plot(outcome.run.budget_bytes),
        "predicted_picture": outcome.predicted.plot(),
        "measured_picture": outcome.run.timeline.plot(),
    }
    for name, axes in pictures.items():
        files[name] = output / f"{name.removesuffix('_picture')}.png"
        drawing.save_picture(axes, files[name])
    return files


def _data(outcome: Demonstration, files: dict[str, Path]) -> dict[str, Any]:
    return {
        "ideal_seconds": outcome.trace.ideal_seconds,
        "plain_seconds": outcome.plain_seconds,
        "predicted_seconds": outcome.predicted.iteration_seconds,
        "measured_seconds": outcome.measured_seconds,
        "prediction_error": _prediction_error(outcome),
        "peak_without_offloading_bytes": outcome.trace.peak_allocated_bytes,
        "budget_bytes": outcome.run.budget_bytes,
        "peak_bytes": outcome.run.peak_bytes,
        "allocator_peak_bytes": outcome.allocator_peak_bytes,
        "within_budget": outcome.allocator_peak_bytes <= outcome.run.budget_bytes,
        "bit_identical": outcome.bit_identical,
        "losses": outcome.executed_losses,
        "moves": len(outcome.plan.moves),
        "drift": outcome.run.drift,
        "demand_fetches": outcome.run.demand_fetches,
        "files": {name: str(path) for name, path in files.items()},
    }


def _prediction_error(outcome: Demonstration) -> float:
    measured = outcome.measured_seconds
    return (outcome.predicted.iteration_seconds - measured) / measured


def _show(console: Console, outcome: Demonstration, files: dict[str, Path]) -> None:
    plan, run = outcome.plan, outcome.run
    moved = {name: size(num) for name, num in run.timeline.metadata.channel_bytes.items()}
    console.print(
        facts(
            "A small Llama, trained in half of the memory that it needs",
            [
                ("memory needed", size(outcome.trace.peak_allocated_bytes)),
                ("memory budget", size(run.budget_bytes)),
                ("peak, by the allocator's events", size(outcome.allocator_peak_bytes)),
                ("peak, by the executor's books", size(run.peak_bytes)),
                ("most scratch inside operators", _largest_workspaces(outcome)),
                ("moves in the plan", f"{len(plan.moves)}"),
                ("moved per iteration", ", ".join(f"{k} {v}" for k, v in moved.items())),
                ("iteration without offloading", duration(outcome.plain_seconds)),
                ("predicted under the plan", duration(outcome.predicted.iteration_seconds)),
                ("measured under the plan", duration(outcome.measured_seconds)),
                ("prediction error", percent(_prediction_error(outcome))),
                ("speed kept", percent(outcome.plain_seconds / outcome.measured_seconds)),
                ("fetches that the plan missed", f"{run.demand_fetches}"),
                ("last loss, plain and planned", _last_losses(outcome)),
                ("bit_identical", str(outcome.bit_identical).lower()),
            ],
        )
    )
    console.print(f"\nPictures, plan and trace are in {files['plan'].parent}/")


def _last_losses(outcome: Demonstration) -> str:
    return f"{outcome.plain_losses[-1]!r}  {outcome.executed_losses[-1]!r}"


def _largest_workspaces(outcome: Demonstration) -> str:
    kernels = outcome.trace.kernels
    largest: dict[str, int] = {}
    for op, num_bytes in zip(kernels.op, kernels.workspace_bytes.tolist(), strict=True):
        largest[op] = max(largest.get(op, 0), num_bytes)
    top = sorted(largest.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{op} {size(num)}" for op, num in top if num) or "none"
