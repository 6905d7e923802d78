"""``teraio trace``: a trace without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from teraio.cli.command import Reporter, command
from teraio.cli.options import INPUT_PATH, output_option
from teraio.cli.result import Result
from teraio.cli.trace_facts import trace_result

_AT_LEAST_ONE = click.IntRange(min=1)
_RANK = click.IntRange(min=0)

_GPUS = "h100-nvl, h100-sxm, h200, a100-80, l40s, rtx4090 or rtx5090"


@command(
    "trace",
    options_metavar="-o TRACE [OPTIONS]",
    example="teraio trace llama3-8b -o llama.trace --sequence 4096 --micro-batch-size 2 \\\n"
    "    --micro-batches 64 --stages 2 --stage 0 --gpu h100-nvl",
)
@click.argument("model", metavar="MODEL")
@output_option("The trace to write, e.g. llama.trace.")
@click.option("--sequence", type=_AT_LEAST_ONE, required=True, help="Tokens of each sequence.")
@click.option("--micro-batch-size", type=_AT_LEAST_ONE, default=1, help="Sequences at once [1].")
@click.option("--micro-batches", type=_AT_LEAST_ONE, default=1, help="Per iteration [1].")
@click.option("--dtype", default="fp32", help="fp32, tf32 or bf16 (autocast) [fp32].")
@click.option("--optimizer-implementation", default="fused", help="fused, foreach or for-loop.")
@click.option("--clip-norm", type=float, help="Clip gradients to this norm.")
@click.option("--checkpoint", help="Recompute activations: reentrant or non-reentrant.")
@click.option("--attention", help="auto, flash, efficient, cudnn or math [auto].")
@click.option("--compile-blocks", is_flag=True, help="Each block runs compiled.")
@click.option("--stages", type=_AT_LEAST_ONE, default=1, help="Stages of a 1F1B pipeline [1].")
@click.option("--stage", type=_RANK, default=0, help="Which of them to trace [0].")
@click.option("--tensor-parallel", type=_AT_LEAST_ONE, default=1, help="Ranks per layer [1].")
@click.option("--tensor-parallel-rank", type=_RANK, default=0, help="Which to trace [0].")
@click.option("--data-parallel", type=_AT_LEAST_ONE, default=1, help="Ranks of FSDP2 [1].")
@click.option("--data-parallel-rank", type=_RANK, default=0, help="Which to trace [0].")
@click.option("--gpu", default="h100-nvl", help=f"Whose speed: {_GPUS} [h100-nvl].")
@click.option("--timings", type=INPUT_PATH, help='Kernel times from "teraio time".')
def trace(
    reporter: Reporter,
    model: str,
    output: Path,
    gpu: str,
    timings: Path | None,
    **options: Any,
) -> Result:
    """Trace a training iteration of any size without a GPU.

    MODEL is a reference model such as llama3-8b or gpt2-40b. Nothing is computed and none of the
    model's memory is taken: a laptop can trace what fits on no GPU.
    """
    from teraio.profiler.costs.timings import Timings
    from teraio.profiler.fake.tracing import trace as trace_model

    known_times = Timings.load(timings) if timings is not None else None
    with reporter.progress("Tracing") as progress:
        made = trace_model(model, gpu=gpu, timings=known_times, progress=progress, **options)
    made.save(output)
    return trace_result(made, output, {"notes": made.metadata.known_differences})
