r"""Two ranks under plans of their own: as fast as predicted, and the same numbers to the bit?

    torchrun --nproc-per-node 2 benchmarks/two_gpus.py --output two_gpus     # all three ways
    torchrun --nproc-per-node 2 benchmarks/two_gpus.py --parallel fsdp2 --model bench-3.4b
    torchrun --nproc-per-node 2 benchmarks/two_gpus.py --parallel pipeline --micro-batches 4
    torchrun --nproc-per-node 2 benchmarks/two_gpus.py --parallel ddp --device cpu \
        --model tiny-llama --sequence 32 --hardware cpu --host-memory 1GB

Each rank trains without a plan (twice: two plain runs must agree first), records its trace, plans
for its share of the node and of its own peak, and trains under its plan. Each prints one JSON
object for each way: seconds of a step plain, executed and predicted, peaks, the budget, and what
differs. --output FOLDER keeps them as they come; what all ranks have there is not run again.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.partial_results import Findings
else:  # A script's own folder is on its path, the repository's root is not.
    from partial_results import Findings

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from torch import distributed, nn

import teraio
from teraio.contracts.hardware import HOST, Hardware
from teraio.contracts.plan import Plan
from teraio.planner import plan_ranks
from teraio.profiler.training import Training, TrainingSetup, build_training
from teraio.profiler.training.loop import accumulate_gradients
from teraio.traces.trace import Trace

WAYS = ("ddp", "fsdp2", "pipeline")
SPARE_HOST_BYTES = 10**9
PROFILED_STEPS = 12
"""Enough for the recorder everywhere; all ranks must take as many."""

REPORTED = (
    "peak_bytes",
    "moves_planned",
    "moves_found",
    "drift",
    "first_drift",
    "demand_fetches",
    "evictions",
    "dropped_prefetches",
)


SUBJECT = (
    *("model", "sequence", "micro_batch_size", "micro_batches", "dtype", "share", "planner"),
    *("steps", "device"),
)
"""Options that decide what is found."""


def main() -> None:
    """Train in every way on this rank and print what came of it."""
    options = _arguments()
    _prepare(options)
    try:
        findings = _findings(options)
        hardware: Hardware | None = None
        for parallel in options.parallel:
            options.way = parallel
            if not _all_have(findings, parallel, options):
                hardware = hardware or _node(options)
                findings.add(parallel, _figures(options, *_trained(options, hardware)))
            print(json.dumps(findings[parallel], default=str), flush=True)
    finally:
        distributed.destroy_process_group()


def _findings(options: argparse.Namespace) -> Findings:
    rank = distributed.get_rank()
    path = None if options.output is None else options.output / f"two_gpus.rank{rank}.json"
    return Findings(path, {name: getattr(options, name) for name in SUBJECT})


def _all_have(findings: Findings, parallel: str, options: argparse.Namespace) -> bool:
    """Whether no rank needs the others to find it again."""
    is_there = torch.tensor(int(parallel in findings), device=options.device)
    distributed.all_reduce(is_there, op=distributed.ReduceOp.MIN)
    return bool(is_there.item())


def _trained(
    options: argparse.Namespace, hardware: Hardware
) -> tuple[Trace, Plan, list[dict[str, Any]], dict[str, Any]]:
    """Trace, plan, both plain runs and the one under the plan."""
    plain, expected = _measured(options, None)
    again, found = _measured(options, None)
    plain["same_again"] = _differences(expected, found) == []
    trace = _profiled(options)
    plan = _planned(options, trace, hardware)
    executed, found = _measured(options, plan)
    executed["differences"] = _differences(expected, found)
    return trace, plan, [plain, again], executed


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--parallel", default=",".join(WAYS), help="some of them")
    parser.add_argument("--model", default="bench-0.7b")
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, help="[4 in a pipeline, else 1]")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--share", type=float, default=0.6, help="of its peak that a rank may use")
    parser.add_argument("--hardware", help="file or preset of the node [probed]")
    parser.add_argument("--host-memory", help="of the node, for all ranks [the hardware's]")
    parser.add_argument("--ssd-path", help="folder of all ranks' SSD files")
    parser.add_argument("--planner", default="optimal")
    parser.add_argument("--time-limit", type=float, default=60.0, help="of planning, seconds")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, help="folder for each rank's figures")
    options = parser.parse_args()
    options.parallel = options.parallel.split(",")
    for parallel in options.parallel:
        if parallel not in WAYS:
            parser.error(f"--parallel: {parallel!r} is not one of {', '.join(WAYS)}")
    return options


def _prepare(options: argparse.Namespace) -> None:
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if options.device == "cuda" else "gloo")
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory changes no result here, and would be timed.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _build(options: argparse.Namespace) -> Training:
    """This rank's part, with the same weights every time."""
    torch.manual_seed(0)
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    sizes: dict[str, Any] = {
        "model": options.model,
        "sequence": options.sequence,
        "micro_batch_size": options.micro_batch_size,
        "micro_batches": options.micro_batches or (4 if options.way == "pipeline" else 1),
        "dtype": options.dtype,
    }
    if options.way == "fsdp2":
        sizes |= {"data_parallel": world_size, "data_parallel_rank": rank}
    elif options.way == "pipeline":
        sizes |= {"stages": world_size, "stage": rank}
    training = build_training(TrainingSetup(**sizes), options.device)
    return _with_ddp(training, options) if options.way == "ddp" else training


def _with_ddp(training: Training, options: argparse.Namespace) -> Training:
    setup, device = training.setup, torch.device(options.device)
    model = nn.parallel.DistributedDataParallel(training.model, gradient_as_bucket_view=True)

    def run_micro_batches(count: int) -> None:
        accumulate_gradients(model, setup, device, count)

    return Training(setup, model, training.optimizer, run_micro_batches)


def _measured(
    options: argparse.Namespace, plan: Plan | None
) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """(what was measured, sums over all parameters and optimizer state at the end)."""
    _forget(options)
    training = _build(options)
    figures: dict[str, Any] = {}
    if plan is None:
        seconds = _laps(training, options)
    else:
        run = teraio.execute(
            plan,
            training.model,
            training.optimizer,
            host_memory=_host_bytes(plan),
            ssd_path=options.ssd_path,
        )
        with run:
            seconds = _laps(training, options)
        figures |= {name: getattr(run.report, name) for name in REPORTED}
    figures["step_seconds"] = statistics.median(seconds[len(seconds) // 2 :])
    figures["all_step_seconds"] = seconds
    if options.device == "cuda":
        figures["max_memory_allocated"] = torch.cuda.max_memory_allocated()
        figures["max_memory_reserved"] = torch.cuda.max_memory_reserved()
    states = training.optimizer.state.values()
    tensors: list[Any] = [*training.model.parameters(), *(s[k] for s in states for k in sorted(s))]
    return figures, [_sums(_local(tensor)) for tensor in tensors]


def _host_bytes(plan: Plan) -> int:
    """What the plan needs and some for what it misses: to pin all that it may use takes minutes."""
    metadata = plan.metadata
    bounce_bytes = sum(ssd.bounce_bytes for ssd in plan.hardware.ssds_of_rank(metadata.rank))
    needed_bytes = metadata.arena_bytes.get(HOST, 0) + bounce_bytes
    return min(metadata.host_memory_bytes, needed_bytes + SPARE_HOST_BYTES)


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()


def _sums(tensor: torch.Tensor) -> tuple[int, int]:
    """Exact sums of a tensor's words, and of each times its place: where a bit is, counts too.

    On the device: copies to the host would take longer than the training.
    """
    nbytes = tensor.numel() * tensor.element_size()
    words = tensor.contiguous().view(-1).view(torch.int32 if nbytes % 4 == 0 else torch.uint8)
    places = torch.arange(1, words.numel() + 1, device=words.device)
    return int(words.sum(dtype=torch.int64)), int((words * places).sum())


def _laps(training: Training, options: argparse.Namespace) -> list[float]:
    """Seconds of each step, from its end to the next one's; a GPU is not waited for in between."""
    marks = [_mark(options)]
    for number in range(options.steps):
        _step(training, number)
        marks.append(_mark(options))
    if options.device == "cuda":
        torch.cuda.synchronize()
    return [_between(*pair) for pair in itertools.pairwise(marks)]


def _mark(options: argparse.Namespace) -> Any:
    if options.device != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(begun: Any, ended: Any) -> float:
    if isinstance(begun, float):
        return float(ended - begun)
    return float(begun.elapsed_time(ended)) / 1e3


def _step(training: Training, number: int) -> None:
    # Stages of a pipeline draw the same tokens, replicas different ones.
    is_replica = training.setup.stages == 1
    torch.manual_seed(1000 * number + (distributed.get_rank() if is_replica else 0))
    training.run_iteration()


def _profiled(options: argparse.Namespace) -> Trace:
    _forget(options)
    training = _build(options)
    with teraio.profile(training.model, training.optimizer, device=options.device) as profile:
        for number in range(PROFILED_STEPS):
            _step(training, number)
    return profile.trace


def _planned(options: argparse.Namespace, trace: Trace, hardware: Hardware) -> Plan:
    """The plan of this rank, for its share of the node."""
    _forget(options)
    limits = {"time_limit": options.time_limit} if options.planner in ("optimal", "milp") else {}
    (plan,) = plan_ranks(
        [trace],
        hardware,
        planner=options.planner,
        gpu_memory=int(options.share * trace.peak_allocated_bytes),
        host_memory=options.host_memory,
        **limits,
    )
    return plan


def _node(options: argparse.Namespace) -> Hardware:
    """The machine, as rank 0 knows or measures it; a disk only if one was named."""
    text = [""]
    if distributed.get_rank() == 0:
        if options.hardware is not None:
            hardware = Hardware.load(options.hardware)
        else:
            directories = options.ssd_path or ()
            hardware = teraio.probe(device=options.device, directory=directories, quick=True)
        text = [hardware.to_toml()]
    distributed.broadcast_object_list(text)
    return Hardware.from_toml(text[0])


def _forget(options: argparse.Namespace) -> None:
    gc.collect()
    if options.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _differences(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> list[int]:
    """Numbers of the tensors whose sums are not the same."""
    pairs = enumerate(zip(one, other, strict=True))
    return [number for number, (a, b) in pairs if a != b]


def _figures(
    options: argparse.Namespace,
    trace: Trace,
    plan: Plan,
    plain: list[dict[str, Any]],
    executed: dict[str, Any],
) -> dict[str, Any]:
    ideal = min(run["step_seconds"] for run in plain)
    is_gpu = options.device == "cuda"
    return {
        "rank": trace.metadata.rank,
        "world_size": trace.metadata.world_size,
        "options": {name: str(value) for name, value in vars(options).items()},
        "parallel": options.way,
        "device": torch.cuda.get_device_name() if is_gpu else platform.processor(),
        "python": platform.python_version(),
        "teraio": teraio.__version__,
        "torch": torch.__version__,
        "kernels": trace.num_kernels,
        "ideal_seconds": trace.ideal_seconds,
        "plain_seconds": ideal,
        "executed_seconds": executed["step_seconds"],
        "predicted_seconds": plan.predicted_seconds,
        "prediction_error": plan.predicted_seconds / executed["step_seconds"] - 1,
        "lower_bound_seconds": plan.lower_bound_seconds,
        "fraction_of_plain": ideal / executed["step_seconds"],
        "budget_bytes": plan.metadata.gpu_memory_bytes,
        "host_bytes": plan.metadata.host_memory_bytes,
        "peak_allocated_bytes": trace.peak_allocated_bytes,
        "moves": len(plan.moves),
        "bit_identical": executed["differences"] == [],
        "plain_runs_agree": plain[0]["same_again"],
        "plain": plain,
        "executed": executed,
    }


if __name__ == "__main__":
    main()
