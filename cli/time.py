"""``teraio time``: how long a trace's kernels take on a real GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from teraio.cli.command import Reporter, command
from teraio.cli.options import output_option, trace_argument
from teraio.cli.result import Result
from teraio.cli.tables import duration, facts

if TYPE_CHECKING:
    from rich.console import Console

    from teraio.profiler.costs.timings import Timings
    from teraio.traces.trace import Calls


@command(
    "time",
    options_metavar="-o TIMINGS [OPTIONS]",
    example="teraio time llama.trace --device cuda -o h200.timings\n"
    "teraio trace llama3-8b -o llama.trace --timings h200.timings --gpu h200",
)
@trace_argument
@output_option("The timing file to write, e.g. h200.timings; what it holds already is kept.")
@click.option("--device", default="cuda", show_default=True, help="What to time on: cuda or cpu.")
@click.option("--precision", help="fp32, tf32 or bf16 [default: the trace's].")
def time(
    reporter: Reporter, trace: Path, output: Path, device: str, precision: str | None
) -> Result:
    """Time every distinct operator call of a trace once, with random data.

    The trace may be of a model that fits on no GPU, as long as each of its kernels does. The file
    serves all traces: calls that it holds are not timed again. "teraio trace --timings" takes it.
    """
    from time import perf_counter

    from teraio.profiler.costs.kernel_timing import default_precision, time_kernels
    from teraio.profiler.costs.timings import Timings
    from teraio.traces.trace import Trace

    loaded = Trace.load(trace)
    known = Timings.load(output) if output.exists() else None
    precision = precision or loaded.metadata.precision or default_precision(loaded.calls)
    began = perf_counter()
    with reporter.progress("Timing") as progress:
        timings = time_kernels(
            loaded, device=device, precision=precision, known=known, progress=progress
        )
    timings.save(output)
    seconds = perf_counter() - began
    return _result(output, loaded.calls, precision, known, timings, seconds)


def _result(
    output: Path,
    calls: Calls,
    precision: str,
    known: Timings | None,
    timings: Timings,
    seconds: float,
) -> Result:
    from teraio.profiler.costs.timings import keys_of

    keys = {key for key, _ in keys_of(calls, precision)}
    reused = sum(known is not None and known.get(key) is not None for key in keys)
    failed = sum(timings.get(key) is None for key in keys)
    data = {
        "signatures": len(keys),
        "seconds": seconds,
        "timed": len(keys) - reused - failed,
        "reused": reused,
        "failed": failed,
        "precision": precision,
        "gpu": timings.machine.gpu,
        "file": str(output),
    }

    def show(console: Console) -> None:
        rows = [
            ("distinct calls", f"{data['signatures']:,}"),
            ("timed now", f"{data['timed']:,} in {duration(seconds)}"),
            ("known before", f"{reused:,}"),
            ("not timed", f"{failed:,}"),
            ("on", timings.machine.describe()),
        ]
        console.print(facts(str(output), rows))

    return Result(data, show)
