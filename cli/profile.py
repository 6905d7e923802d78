"""``teraio profile``: record a trace."""

from __future__ import annotations

from pathlib import Path

import click

from teraio.cli.command import Reporter, ScriptCommand, command
from teraio.cli.options import INPUT_PATH, output_option
from teraio.cli.result import Result
from teraio.cli.trace_facts import trace_result


@command(
    "profile",
    cls=ScriptCommand,
    options_metavar="-o TRACE [OPTIONS]",
    example="teraio profile -o gpt.trace train.py --batch-size 4\n"
    "teraio profile -o gpt2.trace --model gpt2",
)
@output_option("The trace to write, e.g. gpt.trace.")
@click.option("--model", metavar="NAME", help="Record a reference model; no SCRIPT then.")
@click.option("--steps", type=click.IntRange(min=2), help="With --model: iterations to run.")
@click.option("--device", help="With --model: cpu or cuda.")
@click.argument("script", metavar="[SCRIPT]", type=INPUT_PATH, required=False)
@click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
def profile(
    reporter: Reporter,
    output: Path,
    model: str | None,
    steps: int | None,
    device: str | None,
    script: Path | None,
    arguments: tuple[str, ...],
) -> Result:
    """Record one steady iteration of a training script, or of a reference model.

    SCRIPT runs unmodified, as "python SCRIPT ARGS" would, until the iteration is recorded. Options
    of teraio stand before SCRIPT; everything after it is the script's.
    """
    options = {"steps": steps, "device": device}
    given = {name: value for name, value in options.items() if value is not None}
    if (script is None) == (model is None):
        raise click.UsageError("give either a SCRIPT or --model NAME")
    if script is not None and given:
        raise click.UsageError(f"--{next(iter(given))} goes with --model; SCRIPT sets its own")
    from teraio.profiler import profile_model, profile_script

    if model is not None:
        trace = profile_model(model, **given)
    else:
        assert script is not None
        trace = profile_script(script, list(arguments), model=None)
    trace.save(output)
    return trace_result(trace, output)
