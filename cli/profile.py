"""``teraio profile``: record a trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from teraio.cli.command import Reporter, ScriptCommand, command
from teraio.cli.options import INPUT_PATH, output_option
from teraio.cli.result import Result
from teraio.cli.trace_facts import trace_result

if TYPE_CHECKING:
    from teraio.traces.trace import Trace


@command(
    "profile",
    cls=ScriptCommand,
    options_metavar="-o TRACE [OPTIONS]",
    example="teraio profile -o gpt.trace train.py --batch-size 4\n"
    "teraio profile -o gpt2.trace --model tiny-gpt2\n"
    "torchrun --nproc-per-node 2 --no-python teraio profile -o gpt.trace train.py",
)
@output_option("The trace to write, e.g. gpt.trace.")
@click.option("--model", metavar="NAME", help="Record a reference model; no SCRIPT then.")
@click.option("--steps", type=click.IntRange(min=3), help="With --model: iterations to run.")
@click.option("--sequence", type=click.IntRange(min=1), help="With --model: tokens of each.")
@click.option(
    "--micro-batch-size", type=click.IntRange(min=1), help="With --model: sequences at once."
)
@click.option("--micro-batches", type=click.IntRange(min=1), help="With --model: per iteration.")
@click.option("--device", help="With --model: cpu or cuda.")
@click.argument("script", metavar="[SCRIPT]", type=INPUT_PATH, required=False)
@click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
def profile(
    reporter: Reporter,
    output: Path,
    model: str | None,
    script: Path | None,
    arguments: tuple[str, ...],
    **model_options: Any,
) -> Result:
    """Record one steady iteration of a training script, or of a reference model.

    SCRIPT runs unmodified, as "python SCRIPT ARGS" would, until the iteration is recorded. Options
    of teraio stand before SCRIPT; everything after it is the script's. Under torchrun each rank
    writes its own trace: gpt.rank0.trace and so on, or where -o says {rank}.
    """
    from teraio.contracts.rank_paths import path_of_rank

    given = {name: value for name, value in model_options.items() if value is not None}
    if (script is None) == (model is None):
        raise click.UsageError("give either a SCRIPT or --model NAME")
    if script is not None and given:
        option = next(iter(given)).replace("_", "-")
        raise click.UsageError(f"--{option} goes with --model; SCRIPT sets its own")
    trace = _profile(reporter, model, script, list(arguments), given)
    if trace.metadata.world_size > 1:
        output = path_of_rank(output, trace.metadata.rank)
    trace.save(output)
    return trace_result(trace, output)


def _profile(
    reporter: Reporter,
    model: str | None,
    script: Path | None,
    arguments: list[str],
    model_options: dict[str, Any],
) -> Trace:
    from teraio.profiler import profile_model, profile_script

    if script is not None:
        # No progress bar: it would stand between the script and its terminal.
        return profile_script(script, arguments)
    assert model is not None, "the caller has seen to it"
    with reporter.progress("Profiling") as progress:
        return profile_model(model, progress=progress, **model_options)
