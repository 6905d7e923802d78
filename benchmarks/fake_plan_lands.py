"""A plan made without the GPU, executed on it: do its moves find their storages?

    python benchmarks/fake_plan_lands.py --model llama3.2-3b --micro-batch-size 2 --share 0.8

The model is traced with fake tensors, its kernels priced from the table of GPUs or a timing file,
planned for a share of its peak, and trained under that plan; beside it the same training without
one. Prints hardware, versions and one JSON object; --output gets each run as it ends, and a run
that is there is not repeated. (The row fake-trace of h200.py is the same beside a plan of the
measured trace.)
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.partial_results import Findings
else:  # A script's own folder is on its path, the repository's root is not.
    from partial_results import Findings

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch

import teraio
from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Plan
from teraio.profiler.costs.timings import Timings
from teraio.profiler.fake.tracing import trace
from teraio.profiler.training import Training, TrainingSetup, build_training
from teraio.traces.trace import Trace


def main() -> None:
    """Trace, plan, train with and without the plan, compare."""
    options = _arguments()
    torch.use_deterministic_algorithms(True)
    sizes = {"sequence": options.sequence, "micro_batch_size": options.micro_batch_size}
    timings = Timings.load(options.timings) if options.timings is not None else None
    fake = trace(options.model, **sizes, dtype=options.dtype, gpu=options.gpu, timings=timings)
    setup = TrainingSetup(model=options.model, dtype=options.dtype, **sizes)
    hardware = _machine(options, fake)
    plan = teraio.plan(fake, hardware)
    findings = Findings(options.output, {"plan": plan.metadata.trace_hash, **_subject(options)})
    plain = findings.find("plain", lambda: _train(setup, options, None))
    executed = findings.find("executed", lambda: _train(setup, options, plan))
    print(json.dumps(_figures(options, fake, plan, plain, executed), indent=1))


def _subject(options: argparse.Namespace) -> dict[str, str]:
    """Options that decide what is found."""
    return {name: str(value) for name, value in vars(options).items() if name != "output"}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="llama3.2-3b")
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--timings", type=Path)
    parser.add_argument("--share", type=float, default=0.8)
    parser.add_argument("--host-memory", default="24GB")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--hardware", help="file or preset [default: measure this machine]")
    parser.add_argument("--output", type=Path, help="file of the runs so far")
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


def _machine(options: argparse.Namespace, fake: Trace) -> Hardware:
    if options.hardware is not None:
        machine = Hardware.load(options.hardware)
    else:
        machine = teraio.probe(device=options.device, directory=(), quick=True)
    budget_bytes = int(options.share * fake.peak_allocated_bytes)
    return replace(machine, ssd=()).with_budgets(
        gpu_memory=budget_bytes, host_memory=options.host_memory
    )


def _train(setup: TrainingSetup, options: argparse.Namespace, plan: Plan | None) -> dict[str, Any]:
    torch.manual_seed(0)
    is_gpu = options.device == "cuda"
    if is_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    training = build_training(setup, options.device)
    result: dict[str, Any] = {}
    if plan is None:
        result["seconds"] = _laps(training, options)
    else:
        with teraio.execute(plan, training.model, training.optimizer) as run:
            result["seconds"] = _laps(training, options)
        result |= {name: getattr(run.report, name) for name in _REPORTED}
    result["max_memory_allocated"] = torch.cuda.max_memory_allocated() if is_gpu else 0
    result["checksum"] = [int(p.detach().view(torch.int32).sum()) for p in _all(training)]
    return result


_REPORTED = (
    "moves_planned",
    "moves_found",
    "substituted_kernels",
    "first_substituted",
    "drift",
    "first_drift",
    "demand_fetches",
    "evictions",
    "dropped_prefetches",
    "peak_bytes",
)


def _laps(training: Training, options: argparse.Namespace) -> list[float]:
    laps = []
    for _ in range(options.steps):
        began = time.perf_counter()
        training.run_iteration()
        if options.device == "cuda":
            torch.cuda.synchronize()
        laps.append(time.perf_counter() - began)
    return laps


def _all(training: Training) -> list[torch.Tensor]:
    states = training.optimizer.state.values()
    return [*training.model.parameters(), *(s[key] for s in states for key in sorted(s))]


def _figures(
    options: argparse.Namespace,
    fake: Trace,
    plan: Plan,
    plain: dict[str, Any],
    executed: dict[str, Any],
) -> dict[str, Any]:
    is_gpu = options.device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if is_gpu else platform.processor(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "options": {name: str(value) for name, value in vars(options).items()},
        "predicted_ideal_seconds": fake.ideal_seconds,
        "predicted_seconds": plan.predicted_seconds,
        "plain_seconds": statistics.median(plain["seconds"][2:]),
        "executed_seconds": statistics.median(executed["seconds"][2:]),
        "all_executed_seconds": executed["seconds"],
        "trace_peak_allocated_bytes": fake.peak_allocated_bytes,
        "plain_max_memory_allocated": plain["max_memory_allocated"],
        "executed_max_memory_allocated": executed["max_memory_allocated"],
        "budget_bytes": plan.metadata.gpu_memory_bytes,
        "bit_identical": plain["checksum"] == executed["checksum"],
        **{name: executed[name] for name in _REPORTED},
    }


if __name__ == "__main__":
    main()
