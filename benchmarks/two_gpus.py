r"""Two ranks under plans of their own: as fast as predicted, and the same numbers to the bit?

    torchrun --nproc-per-node 2 benchmarks/two_gpus.py --parallel ddp
    torchrun --nproc-per-node 2 benchmarks/two_gpus.py --parallel fsdp2 --model bench-3.4b
    torchrun --nproc-per-node 2 benchmarks/two_gpus.py --parallel pipeline --micro-batches 4
    torchrun --nproc-per-node 2 benchmarks/two_gpus.py --parallel ddp --device cpu \
        --model tiny-llama --sequence 32 --hardware cpu --host-memory 1GB

Each rank trains without a plan (twice: two plain runs must agree first), records its trace, plans
for its share of the node and of its own peak, and trains under its plan. Each prints one JSON
object: seconds of a step plain, executed and predicted, peaks, the budget, and what differs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import time
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from torch import distributed, nn

import teraio
from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Plan
from teraio.planner import plan_ranks
from teraio.profiler.training import Training, TrainingSetup, build_training
from teraio.profiler.training.loop import accumulate_gradients
from teraio.traces.trace import Trace

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


def main() -> None:
    """Train in every way on this rank and print what came of it."""
    options = _arguments()
    _prepare(options)
    try:
        plain, expected = _measured(options, None)
        again, found = _measured(options, None)
        plain["same_again"] = _differences(expected, found) == []
        del found
        trace = _profiled(options)
        plan = _planned(options, trace)
        executed, found = _measured(options, plan)
        executed["differences"] = _differences(expected, found)
        print(json.dumps(_figures(options, trace, plan, [plain, again], executed)), flush=True)
    finally:
        distributed.destroy_process_group()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--parallel", choices=["ddp", "fsdp2", "pipeline"], required=True)
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
    return parser.parse_args()


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
        "micro_batches": options.micro_batches or (4 if options.parallel == "pipeline" else 1),
        "dtype": options.dtype,
    }
    if options.parallel == "fsdp2":
        sizes |= {"data_parallel": world_size, "data_parallel_rank": rank}
    elif options.parallel == "pipeline":
        sizes |= {"stages": world_size, "stage": rank}
    training = build_training(TrainingSetup(**sizes), options.device)
    return _with_ddp(training, options) if options.parallel == "ddp" else training


def _with_ddp(training: Training, options: argparse.Namespace) -> Training:
    setup, device = training.setup, torch.device(options.device)
    model = nn.parallel.DistributedDataParallel(training.model, gradient_as_bucket_view=True)

    def run_micro_batches(count: int) -> None:
        accumulate_gradients(model, setup, device, count)

    return Training(setup, model, training.optimizer, run_micro_batches)


def _measured(
    options: argparse.Namespace, plan: Plan | None
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """(what was measured, all parameters and optimizer state at the end, on the host)."""
    _forget(options)
    training = _build(options)
    figures: dict[str, Any] = {}
    if plan is None:
        seconds = _laps(training, options)
    else:
        run = teraio.execute(plan, training.model, training.optimizer, ssd_path=options.ssd_path)
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
    return figures, [_local(tensor).cpu().clone() for tensor in tensors]


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()


def _laps(training: Training, options: argparse.Namespace) -> list[float]:
    laps = []
    for number in range(options.steps):
        began = time.perf_counter()
        _step(training, number)
        if options.device == "cuda":
            torch.cuda.synchronize()
        laps.append(time.perf_counter() - began)
    return laps


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


def _planned(options: argparse.Namespace, trace: Trace) -> Plan:
    """The plan of this rank, for its share of a node that rank 0 has measured."""
    _forget(options)
    text = [_node(options).to_toml() if distributed.get_rank() == 0 else ""]
    distributed.broadcast_object_list(text)
    limits = {"time_limit": options.time_limit} if options.planner in ("optimal", "milp") else {}
    (plan,) = plan_ranks(
        [trace],
        Hardware.from_toml(text[0]),
        planner=options.planner,
        gpu_memory=int(options.share * trace.peak_allocated_bytes),
        host_memory=options.host_memory,
        **limits,
    )
    return plan


def _node(options: argparse.Namespace) -> Hardware:
    if options.hardware is not None:
        return Hardware.load(options.hardware)
    return teraio.probe(device=options.device, quick=True)


def _forget(options: argparse.Namespace) -> None:
    gc.collect()
    if options.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _differences(one: list[torch.Tensor], other: list[torch.Tensor]) -> list[int]:
    """Numbers of the tensors that are not the same to the bit."""
    pairs = enumerate(zip(one, other, strict=True))
    return [number for number, (a, b) in pairs if not torch.equal(a, b)]


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
        "options": vars(options),
        "device": torch.cuda.get_device_name() if is_gpu else platform.processor(),
        "torch": torch.__version__,
        "kernels": trace.num_kernels,
        "ideal_seconds": trace.ideal_seconds,
        "plain_seconds": ideal,
        "executed_seconds": executed["step_seconds"],
        "predicted_seconds": plan.predicted_seconds,
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
