"""``teraio trace``: a trace without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from teraio.cli.command import Progress, Reporter, command
from teraio.cli.options import INPUT_PATH, output_option
from teraio.cli.result import Result
from teraio.cli.tables import duration, grid, size
from teraio.cli.trace_facts import trace_data, trace_result
from teraio.errors import InputError

if TYPE_CHECKING:
    from teraio.traces.trace import Trace

_AT_LEAST_ONE = click.IntRange(min=1)
_RANK = click.IntRange(min=0)
_SIZES = ("stages", "data_parallel", "tensor_parallel")
_RANKS = ("stage", "data_parallel_rank", "tensor_parallel_rank")

_GPUS = "h100-nvl, h100-sxm, h200, a100-80, l40s, rtx4090 or rtx5090"


@command(
    "trace",
    options_metavar="-o TRACE [OPTIONS]",
    example="teraio trace llama3-8b -o llama.trace --micro-batches 64 --stages 2 --stage 0\n"
    "teraio trace my_models:make_model -o mine.trace --sequence 2048 --dtype bf16\n"
    "teraio trace llama.trace -o llama-h200.trace --gpu h200 --timings h200.timings",
)
@click.argument("model", metavar="MODEL")
@output_option("The trace to write, e.g. llama.trace.")
@click.option(
    "--sequence", type=_AT_LEAST_ONE, help="Tokens of each sequence [reference models: theirs]."
)
@click.option(
    "--micro-batch-size",
    type=_AT_LEAST_ONE,
    help="Sequences at once [reference models: theirs; else 1].",
)
@click.option("--micro-batches", type=_AT_LEAST_ONE, help="Per iteration [1].")
@click.option("--dtype", metavar="fp32|tf32|bf16", help="fp32, tf32 or bf16 (autocast) [fp32].")
@click.option(
    "--optimizer-implementation",
    metavar="fused|foreach|for-loop",
    help="fused, foreach or for-loop [fused].",
)
@click.option("--clip-norm", type=float, help="Clip gradients to this norm.")
@click.option(
    "--checkpoint",
    metavar="reentrant|non-reentrant",
    help="Recompute activations: reentrant or non-reentrant.",
)
@click.option(
    "--attention",
    metavar="auto|flash|efficient|cudnn|math",
    help="auto, flash, efficient, cudnn, math or sdpa [auto].",
)
@click.option("--compile-blocks", is_flag=True, default=None, help="Each block runs compiled.")
@click.option("--stages", type=_AT_LEAST_ONE, help="Stages of a 1F1B pipeline [1].")
@click.option("--stage", type=_RANK, help="Which of them to trace [0].")
@click.option("--tensor-parallel", type=_AT_LEAST_ONE, help="Ranks per layer [1].")
@click.option("--tensor-parallel-rank", type=_RANK, help="Which to trace [0].")
@click.option("--data-parallel", type=_AT_LEAST_ONE, help="Ranks of FSDP2 [1].")
@click.option("--data-parallel-rank", type=_RANK, help="Which to trace [0].")
@click.option(
    "--every-rank", is_flag=True, help="A trace of each rank: llama.rank0.trace and so on."
)
@click.option(
    "--assume-scalars",
    is_flag=True,
    default=None,
    help="Answer 1 where code asks for a tensor's value.",
)
@click.option("--gpu", metavar="NAME", help=f"Whose speed: {_GPUS} [h100-nvl].")
@click.option("--timings", type=INPUT_PATH, help='Kernel times from "teraio time".')
def trace(reporter: Reporter, model: str, output: Path, every_rank: bool, **options: Any) -> Result:
    """Trace a training iteration of any size without a GPU.

    MODEL is a reference model such as llama3-8b; MODULE:FUNCTION, your own function that makes one,
    found in this directory too; transformers:NAME or transformers:CONFIG.json, where that library
    is installed; or a trace, which gets the times of another GPU. Nothing is computed and none of
    the model's memory is taken: a laptop can trace what fits on no GPU.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if Path(model).exists() and output.exists() and output.samefile(model):
        raise InputError(f"{output}: is both an input and an output of this command")
    if every_rank:
        return _trace_every_rank(reporter, model, output, given)
    with reporter.progress("Tracing") as progress:
        made = _trace(model, given, progress)
    made.save(output)
    return trace_result(made, output, {"notes": made.metadata.known_differences})


def _trace(model: str, options: Mapping[str, Any], progress: Progress | None) -> Trace:
    from teraio.profiler import trace as trace_model

    return trace_model(model, progress=progress, **options)


def _trace_every_rank(
    reporter: Reporter, model: str, output: Path, given: dict[str, Any]
) -> Result:
    from teraio.contracts.output import check_replaceable
    from teraio.profiler.fake.tracing import is_saved_trace
    from teraio.profiler.training.setup import every_rank

    if is_saved_trace(model):
        raise InputError(f"every_rank: {model} is recorded already, of one rank")
    for name in _RANKS:
        if name in given:
            raise InputError(f"{name}: does not go with --every-rank, which traces all of them")
    ranks = every_rank(**{name: given[name] for name in _SIZES if name in given})
    files = [output.with_name(f"{output.stem}.rank{r}{output.suffix}") for r in range(len(ranks))]
    for file in files:
        check_replaceable(file)
    rows = []
    for rank, (part, file) in enumerate(zip(ranks, files, strict=True)):
        with reporter.progress(f"Tracing rank {rank} of {len(ranks)}") as progress:
            made = _trace(model, {**given, **part}, progress)
        made.save(file)
        notes = made.metadata.known_differences
        rows.append({"rank": rank, **part, **trace_data(made, file), "notes": notes})
    return Result({"rows": rows}, lambda console: console.print(_table(rows)))


def _table(rows: list[dict[str, Any]]) -> Any:
    columns = ("rank", "kernels", "ideal iteration", "peak allocated", "file")
    cells = [
        (
            str(row["rank"]),
            f"{row['kernels']:,}",
            duration(row["ideal_seconds"]),
            size(row["peak_allocated_bytes"]),
            row["file"],
        )
        for row in rows
    ]
    return grid("Every rank", columns, cells)
