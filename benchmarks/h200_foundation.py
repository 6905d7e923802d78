"""One GPU, one Llama in fp32: profiled, planned for the host tier, executed, compared bit by bit.

Prints hardware, versions and options, then one JSON object with the figures. Ratios are taken in
one process. Needs a CUDA GPU; ``--smoke`` runs the same on a CPU at toy size.

    python benchmarks/h200_foundation.py --layers 24 --share 0.8
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# As docs/execution.md advises: the caching allocator then counts what was asked for.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch

import teraio
from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Plan
from teraio.profiler.models import build_model
from teraio.traces.trace import Trace


@dataclass(frozen=True)
class Options:
    """Size of the model and of the run."""

    layers: int
    micro_batch_size: int
    sequence: int
    steps: int
    share: float
    host_memory: str
    fused: bool
    planner: str
    transform: str | None
    device: str

    @property
    def model(self) -> dict[str, int]:
        """Dimensions: those of bench-0.7b with more layers, or a toy on a CPU."""
        if self.device == "cpu":
            return {"vocabulary": 256, "hidden": 128, "intermediate": 344, "heads": 4, "layers": 4}
        return {"layers": self.layers}


class Training:
    """The same training, however often it is made."""

    def __init__(self, options: Options) -> None:
        torch.manual_seed(0)
        self.options = options
        name = "tiny-llama" if options.device == "cpu" else "bench-0.7b"
        with torch.device(options.device):
            # Scaled-dot-product attention in fp32 has a backward that is not deterministic on CUDA.
            self.model = build_model(name, attention="math", **options.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=options.fused)
        self.vocabulary = 256 if options.device == "cpu" else 32000

    def step(self, number: int) -> torch.Tensor:
        """One iteration; the loss stays on the device, so that the host does not wait."""
        options = self.options
        generator = torch.Generator().manual_seed(number)
        shape = (options.micro_batch_size, options.sequence + 1)
        tokens = torch.randint(0, self.vocabulary, shape, generator=generator).to(options.device)
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def timed_steps(
    training: Training, steps: int, after: Callable[[], Any] = lambda: None
) -> tuple[list[float], list[float]]:
    """Losses, and seconds of each step with the device idle before and after."""
    losses, seconds = [], []
    for number in range(steps):
        synchronize()
        start = time.perf_counter()
        loss = training.step(number)
        after()
        synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss))
    return losses, seconds


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def reset_memory() -> None:
    """Forget peaks and cached memory of an earlier phase."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peaks() -> dict[str, int]:
    """Allocated and reserved peaks since the last reset, in bytes; empty on a CPU."""
    if not torch.cuda.is_available():
        return {}
    return {
        "max_memory_allocated": torch.cuda.max_memory_allocated(),
        "max_memory_reserved": torch.cuda.max_memory_reserved(),
    }


def run_plain(options: Options) -> dict[str, Any]:
    """The reference: losses, step time, peak, and a checksum of the parameters."""
    reset_memory()
    training = Training(options)
    losses, seconds = timed_steps(training, options.steps)
    return {
        "losses": losses,
        "seconds": statistics.median(seconds[2:]),
        "checksum": checksum(training),
        **peaks(),
    }


def checksum(training: Training) -> list[int]:
    """Exact integer sums of the bits of every parameter and of the optimizer's state."""
    state = [v for s in training.optimizer.state.values() for v in s.values()]
    tensors = [*training.model.parameters(), *[v for v in state if v.dim() > 0]]
    return [int(t.detach().view(torch.int32).sum(dtype=torch.int64)) for t in tensors]


def run_profiled(options: Options) -> tuple[Trace, dict[str, Any]]:
    """The trace, and what recording it cost the steps that were timed."""
    reset_memory()
    training = Training(options)
    seconds = []
    with teraio.profile(training.model, training.optimizer) as profile:
        number = 0
        while not profile.done:
            synchronize()
            start = time.perf_counter()
            loss = training.step(number)
            profile.step()
            synchronize()
            seconds.append(time.perf_counter() - start)
            float(loss)
            number += 1
    trace = profile.trace
    return trace, {"step_seconds": seconds, "iterations": number}


def run_executed(options: Options, plan: Plan) -> dict[str, Any]:
    """The same training under the plan."""
    reset_memory()
    training = Training(options)
    with teraio.execute(plan, training.model, training.optimizer) as run:
        losses, seconds = timed_steps(training, options.steps)
        memory = peaks()
    report = run.report
    return {
        "losses": losses,
        "seconds": statistics.median(seconds[2:]),
        "event_seconds": report.measured_seconds,
        "checksum": checksum(training),
        "drift": report.drift,
        "first_drift": report.first_drift,
        "demand_fetches": report.demand_fetches,
        "evictions": report.evictions,
        "dropped_prefetches": report.dropped_prefetches,
        "books_peak_bytes": report.peak_bytes,
        "cold_start_seconds": report.cold_start_seconds,
        "all_seconds": seconds,
        **memory,
    }


def machine(options: Options, trace: Trace) -> Hardware:
    """This machine, probed, with the budgets of the run."""
    device = "cpu" if options.device == "cpu" else "cuda"
    probed = teraio.probe(device=device, quick=True)
    return probed.with_budgets(
        gpu_memory=int(options.share * trace.peak_allocated_bytes),
        host_memory=options.host_memory,
    )


def parse_options() -> Options:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--share", type=float, default=0.8)
    parser.add_argument("--host-memory", default="24GB")
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--planner", default="optimal")
    parser.add_argument("--transform", help="such as optimizer-in-backward")
    parser.add_argument("--smoke", action="store_true", help="toy size on the CPU")
    given = vars(parser.parse_args())
    if given.pop("smoke"):
        given |= {"device": "cpu", "sequence": 32, "host_memory": "200MB"}
    return Options(**{"device": "cuda", **given})


def main() -> None:
    """Run all phases and print the figures."""
    options = parse_options()
    torch.use_deterministic_algorithms(True)
    print(f"options {options}")
    print(f"torch {torch.__version__}, python {platform.python_version()}, {device_name()}")
    plain = run_plain(options)
    again = run_plain(options)
    trace, profiling = run_profiled(options)
    hardware = machine(options, trace)
    print(hardware.to_toml())
    plan = teraio.plan(
        trace, hardware, planner=options.planner, transform=options.transform, bound=True
    )
    predicted = teraio.simulate(trace, plan, hardware, record=False)
    executed = run_executed(options, plan)
    print(json.dumps(figures(plain, again, trace, profiling, plan, executed), indent=1))
    print(f"predicted stalls {predicted.stall_seconds}")


def device_name() -> str:
    """What the figures were measured on."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()


def figures(
    plain: dict[str, Any],
    again: dict[str, Any],
    trace: Trace,
    profiling: dict[str, Any],
    plan: Plan,
    executed: dict[str, Any],
) -> dict[str, Any]:
    """Everything that a report quotes."""
    same = ("losses", "checksum")
    budget_bytes = plan.metadata.gpu_memory_bytes
    peak_bytes = executed.get("max_memory_allocated", executed["books_peak_bytes"])
    # The first step creates the optimizer's state, the fourth measures scratch memory, and after
    # the fifth nothing is watched.
    seconds = profiling["step_seconds"]
    recorded = [*seconds[1:3], *seconds[4:5]]
    return {
        "kernels": trace.num_kernels,
        "storages": len(trace.storages),
        "trace_ideal_seconds": trace.ideal_seconds,
        "trace_peak_allocated_bytes": trace.peak_allocated_bytes,
        "plain_peak": {k: v for k, v in plain.items() if k.startswith("max_")},
        "plain_seconds": [plain["seconds"], again["seconds"]],
        "two_plain_runs_identical": all(plain[k] == again[k] for k in same),
        "recorded_step_seconds": profiling["step_seconds"],
        "recording_overhead": statistics.median(recorded) / again["seconds"] - 1,
        "whole_profile_overhead": sum(seconds[1:]) / len(seconds[1:]) / again["seconds"] - 1,
        "moves": len(plan.moves),
        "budget_bytes": budget_bytes,
        "planned_peak_bytes": plan.metadata.peak_gpu_bytes,
        "arena_bytes": dict(plan.metadata.arena_bytes),
        "planning_seconds": plan.metadata.planning_seconds,
        "predicted_seconds": plan.predicted_seconds,
        "measured_seconds": executed["seconds"],
        "fraction_of_plain": again["seconds"] / executed["seconds"],
        "bit_identical": all(plain[k] == executed[k] for k in same),
        "within_budget": peak_bytes <= budget_bytes,
        "executed": {k: v for k, v in executed.items() if k not in same},
        "losses": executed["losses"],
    }


if __name__ == "__main__":
    main()
