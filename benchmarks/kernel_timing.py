"""Predicts an iteration that was traced without a GPU and timed kernel by kernel; then runs it.

Prints hardware, versions and setting, predicted and measured seconds and peak memory, and where
the time goes by operator. Needs a CUDA GPU; ``--smoke`` runs the same on a CPU at toy size.

    python benchmarks/kernel_timing.py --dtype fp32
    python benchmarks/kernel_timing.py --dtype bf16 --micro-batch-size 4
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from teraio.errors import OffloadWarning
from teraio.profiler.costs.arguments import base_name
from teraio.profiler.costs.kernel_timing import time_kernels
from teraio.profiler.costs.pricing import price
from teraio.profiler.costs.timings import Timings
from teraio.profiler.fake.recording import record
from teraio.profiler.training import TrainingSetup, build_training
from teraio.traces.trace import Trace

WARM_UP_ITERATIONS = 2


def time_trace(trace: Trace, setup: TrainingSetup, device: str) -> tuple[Timings, float]:
    """Times of the trace's distinct calls, and the seconds that taking them took."""
    began = time.perf_counter()
    timings = time_kernels(trace, device=device, precision=setup.dtype)
    return timings, time.perf_counter() - began


def measure(setup: TrainingSetup, device: str, iterations: int) -> dict[str, Any]:
    """Iterations without any mode: seconds of each, their median, and the most memory allocated."""
    training = build_training(setup, device)
    for _ in range(WARM_UP_ITERATIONS):
        training.run_iteration()
    if device == "cpu":
        seconds = [wall_seconds(training.run_iteration) for _ in range(iterations)]
        return {"seconds": statistics.median(seconds), "each": seconds, "peak_bytes": 0}
    torch.cuda.reset_peak_memory_stats()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(iterations + 1)]
    events[0].record()
    for event in events[1:]:
        training.run_iteration()
        event.record()
    torch.cuda.synchronize()
    pairs = itertools.pairwise(events)
    seconds = [first.elapsed_time(last) * 1e-3 for first, last in pairs]
    peak_bytes = torch.cuda.max_memory_allocated()
    return {"seconds": statistics.median(seconds), "each": seconds, "peak_bytes": peak_bytes}


def wall_seconds(run: Any) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def profiled_seconds(setup: TrainingSetup) -> dict[str, float]:
    """Device seconds of one real iteration by operator, as torch's profiler attributes them."""
    training = build_training(setup, "cuda")
    for _ in range(WARM_UP_ITERATIONS):
        training.run_iteration()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        training.run_iteration()
        torch.cuda.synchronize()
    return {
        row.key.removeprefix("aten::"): row.self_device_time_total * 1e-6
        for row in profiler.key_averages()
        if row.self_device_time_total and row.key.startswith("aten::")
    }


def predicted_seconds(trace: Trace) -> dict[str, float]:
    """Kernel seconds by operator."""
    kernels = trace.kernels
    sums: dict[str, float] = {}
    for op in np.unique(kernels.op):
        name = base_name(str(op))
        seconds = float(kernels.duration_seconds[kernels.op == op].sum())
        sums[name] = sums.get(name, 0.0) + seconds
    return sums


def free_memory() -> None:
    """Give back what the phase before held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def run(setup: TrainingSetup, device: str, gpu: str, iterations: int) -> dict[str, Any]:
    """The whole comparison of one setting."""
    began = time.perf_counter()
    trace = record(setup)
    recording_seconds = time.perf_counter() - began
    timings, timing_seconds = time_trace(trace, setup, device)
    free_memory()
    predicted = price(trace, gpu=gpu, precision=setup.dtype, timings=timings)
    reckoned = price(trace, gpu=gpu, precision=setup.dtype)
    measured = measure(setup, device, iterations)
    free_memory()
    by_operator = {"predicted": predicted_seconds(predicted)}
    if device == "cuda":
        by_operator["measured"] = profiled_seconds(setup)
        free_memory()
    return {
        "setting": setup.describe(),
        "machine": timings.machine.describe(),
        "clocks": timings.machine.clocks,
        "host_seconds_per_kernel": timings.machine.host_seconds_per_kernel,
        "kernels": trace.num_kernels,
        "calls": len(trace.calls),
        "timed": len(timings),
        "recording_seconds": recording_seconds,
        "timing_seconds": timing_seconds,
        "predicted_seconds": predicted.ideal_seconds,
        "predicted_gap_seconds": float(predicted.kernels.gap_before_seconds.sum()),
        "roofline_seconds": reckoned.ideal_seconds,
        "measured_seconds": measured["seconds"],
        "measured_each_seconds": measured["each"],
        "error": predicted.ideal_seconds / measured["seconds"] - 1,
        "roofline_error": reckoned.ideal_seconds / measured["seconds"] - 1,
        "predicted_peak_bytes": predicted.peak_allocated_bytes,
        "measured_peak_bytes": measured["peak_bytes"],
        "by_operator_seconds": by_operator,
    }


def show(result: dict[str, Any]) -> None:
    """The figures, and the operators that take most, for people."""
    for name, value in result.items():
        if not isinstance(value, dict):
            print(f"{name}: {value}")
    predicted = result["by_operator_seconds"]["predicted"]
    measured = result["by_operator_seconds"].get("measured", {})
    names = sorted({*predicted, *measured}, key=lambda n: -max(_both(predicted, measured, n)))
    for name in names[:20]:
        told, seen = _both(predicted, measured, name)
        print(f"  {name:48s} predicted {told * 1e3:9.3f} ms   measured {seen * 1e3:9.3f} ms")


def _both(
    predicted: dict[str, float], measured: dict[str, float], name: str
) -> tuple[float, float]:
    return predicted.get(name, 0.0), measured.get(name, 0.0)


def main() -> None:
    """Read the setting, run it, print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama3.2-3b")
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--micro-batch-size", type=int, default=3)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "tf32", "bf16"])
    parser.add_argument("--compile-blocks", action="store_true")
    parser.add_argument("--gpu", default="h200", help="whose roofline prices what is not timed")
    parser.add_argument("--iterations", type=int, default=7)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    parser.add_argument("--smoke", action="store_true", help="toy size on a CPU")
    options = parser.parse_args()
    if options.smoke:
        options.model, options.sequence, options.micro_batch_size = "tiny-llama", 32, 2
        warnings.simplefilter("ignore", OffloadWarning)  # CPUs lack the GPU's attention.
    setup = TrainingSetup(
        model=options.model,
        sequence=options.sequence,
        micro_batch_size=options.micro_batch_size,
        micro_batches=options.micro_batches,
        dtype=options.dtype,
        compile_blocks=options.compile_blocks,
    )
    result = run(setup, "cpu" if options.smoke else "cuda", options.gpu, options.iterations)
    show(result)
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
