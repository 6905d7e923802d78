"""What the recorder costs: microseconds per operator, and the share of a training step.

python benchmarks/recorder_overhead.py
python benchmarks/recorder_overhead.py --device cuda --model bench-3.4b
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from teraio.profiler import profile
from teraio.profiler.dispatch import KernelMode
from teraio.profiler.models import build_model, make_batch
from teraio.profiler.recorder import Recorder
from teraio.units import format_bytes, format_seconds

OPERATORS = 1_000


def main() -> None:
    """Print the machine, then the costs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--model", help="also time training steps of this reference model")
    parser.add_argument("--steps", type=int, default=6, help="steps of each kind with --model")
    options = parser.parse_args()
    print(f"{_processor()}, Python {platform.python_version()}, torch {torch.__version__}")
    if options.device == "cuda":
        print(torch.cuda.get_device_name())
    print_cost_per_operator(options.device)
    if options.model:
        print_cost_per_step(options.model, options.device, options.steps)


def print_cost_per_operator(device: str) -> None:
    """Time a loop of one small operator without a mode, under an empty one, under the recorder."""
    modes: dict[str, Callable[[], Any]] = {
        "no mode": contextlib.nullcontext,
        "empty KernelMode": lambda: KernelMode(device_type=device),
        "recorder": lambda: Recorder(device_type=device),
    }
    for name, make_mode in modes.items():
        with make_mode():
            seconds = min(_seconds_per_operator(device) for _ in range(20))
        print(f"{name:18} {seconds * 1e6:6.1f} us per operator")


def _seconds_per_operator(device: str) -> float:
    a, b = torch.ones(64, device=device), torch.ones(64, device=device)
    _wait(device)
    began = perf_counter()
    for _ in range(OPERATORS):
        torch.add(a, b)
    _wait(device)
    return (perf_counter() - began) / (OPERATORS)


def print_cost_per_step(name: str, device: str, steps: int) -> None:
    """Time training steps without any mode and under the recorder, and compare memory."""
    with torch.device(device):
        model = build_model(name)
    batch = make_batch(model)
    optimizer = torch.optim.AdamW(model.parameters())
    plain = list(_step_seconds(model, optimizer, batch, steps, device))
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        next(_step_seconds(model, optimizer, batch, 1, device))
        peak_bytes = torch.cuda.max_memory_allocated()
    recorded = []
    with profile(model, optimizer, progress=print) as session:
        for seconds in _step_seconds(model, optimizer, batch, steps, device):
            recorded.append(seconds)
            if session.done:
                break
    trace = session.trace
    # After the second step the recorder has found the steady state and starts to measure more.
    base, cost = statistics.median(plain[1:]), statistics.mean(recorded[:2])
    print(f"plain step {format_seconds(base)}, recorded {format_seconds(cost)}: {cost / base:.4f}x")
    print(f"all recorded steps: {', '.join(map(format_seconds, recorded))}")
    print(f"{trace.num_kernels} kernels, ideal iteration {format_seconds(trace.ideal_seconds)}")
    print(f"of it gaps {format_seconds(float(trace.kernels.gap_before_seconds.sum()))}")
    print(f"peak of the trace {format_bytes(trace.peak_allocated_bytes)}", end="")
    if device == "cuda":
        untracked = trace.storages.nbytes[trace.storages.name == "untracked"].sum()
        print(f", allocator's {format_bytes(peak_bytes)}, untracked {format_bytes(untracked)}")


def _step_seconds(
    model: Any, optimizer: Any, batch: Any, steps: int, device: str
) -> Iterator[float]:
    for _ in range(steps):
        began = perf_counter()
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        _wait(device)
        yield perf_counter() - began


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
