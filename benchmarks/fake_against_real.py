"""A trace made without a GPU beside the real run on one: kernels, storages, peak, and time.

    python benchmarks/fake_against_real.py --model llama3.2-3b --micro-batch-size 2 --dtype bf16

Prints one JSON object: versions, how the operator sequences differ, peaks, the plain iteration
measured with no mode active. ``--save FOLDER`` keeps both traces.
"""

from __future__ import annotations

import argparse
import difflib
import json
import platform
import statistics
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from teraio.profiler.fake.recording import record
from teraio.profiler.profiling import Profile
from teraio.profiler.recorder import Recorder
from teraio.profiler.training import Training, build_training, make_setup
from teraio.traces.trace import Trace

PLAIN_ITERATIONS = 5


def main() -> None:
    """Trace, train, record, compare, print."""
    options = _arguments()
    setup = make_setup(
        options.model,
        sequence=options.sequence,
        micro_batch_size=options.micro_batch_size,
        micro_batches=options.micro_batches,
        dtype=options.dtype,
        optimizer_implementation=options.optimizer_implementation,
        attention=options.attention,
        compile_blocks=options.compile_blocks,
    )
    began = time.perf_counter()
    fake = record(setup)
    tracing_seconds = time.perf_counter() - began
    training = build_training(setup, options.device)
    measured = measure_plain(training, options.device)
    real = record_real(training, options.device)
    report = {
        "machine": describe_machine(options.device),
        "setup": setup.describe(),
        "tracing_seconds": tracing_seconds,
        **measured,
        "real_ideal_seconds": real.ideal_seconds,
        **compare(fake, real),
    }
    print(json.dumps(report, indent=1))
    if options.save is not None:
        options.save.mkdir(parents=True, exist_ok=True)
        fake.save(options.save / "fake.trace")
        real.save(options.save / "real.trace")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="llama3.2-3b")
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--optimizer-implementation", default="fused")
    parser.add_argument("--attention")
    parser.add_argument("--compile-blocks", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--save", type=Path)
    return parser.parse_args()


def measure_plain(training: Training, device: str) -> dict[str, Any]:
    """Median seconds of an iteration that nothing watches, and the allocator's peak."""
    for _ in range(2):
        training.run_iteration()
    is_gpu = torch.device(device).type == "cuda"
    if is_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    laps = []
    for _ in range(PLAIN_ITERATIONS):
        began = time.perf_counter()
        training.run_iteration()
        if is_gpu:
            torch.cuda.synchronize()
        laps.append(time.perf_counter() - began)
    return {
        "plain_seconds": statistics.median(laps),
        "plain_laps_seconds": laps,
        "max_memory_allocated": torch.cuda.max_memory_allocated() if is_gpu else 0,
    }


def record_real(training: Training, device: str) -> Trace:
    """The trace of the real loop, its operator calls described."""
    recorder = Recorder(device_type=torch.device(device).type, describe_calls=True)
    recorder.names.add_model(training.model)
    with warnings.catch_warnings(), Profile(recorder, model="real") as session:
        warnings.simplefilter("ignore")
        for _ in range(10):
            training.run_iteration()
            if session.done:
                break
    return session.trace


def compare(fake: Trace, real: Trace) -> dict[str, Any]:
    """Where the fake trace's operators, calls, storages and peak differ from the real one's."""
    a, b = fake.kernels.op.tolist(), real.kernels.op.tolist()
    blocks = difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    changes = Counter(
        f"{' '.join(a[i:j][:6])} -> {' '.join(b[k:m][:6])}"
        for tag, i, j, k, m in blocks
        if tag != "equal"
    )
    equal = sum(j - i for tag, i, j, _, _ in blocks if tag == "equal")
    sizes = Counter(fake.storages.nbytes.tolist()), Counter(real.storages.nbytes.tolist())
    return {
        "kernels": [len(a), len(b)],
        "equal_kernels": equal,
        "changes": dict(changes.most_common(40)),
        "storages": [len(fake.storages), len(real.storages)],
        "storage_sizes_only_fake": dict((sizes[0] - sizes[1]).most_common(20)),
        "storage_sizes_only_real": dict((sizes[1] - sizes[0]).most_common(20)),
        "peak_live_bytes": [fake.peak_live_bytes, real.peak_live_bytes],
        "peak_allocated_bytes": [fake.peak_allocated_bytes, real.peak_allocated_bytes],
        "same_call_texts": len(set(_calls(fake)) & set(_calls(real))),
        "calls": [len(fake.calls), len(real.calls)],
        "calls_only_real": sorted(set(_calls(real)) - set(_calls(fake)))[:40],
    }


def _calls(trace: Trace) -> list[str]:
    rows = zip(trace.calls.op.tolist(), trace.calls.arguments.tolist(), strict=True)
    return [f"{op} {arguments[:300]}".replace('"cuda"', '"cpu"') for op, arguments in rows]


def describe_machine(device: str) -> dict[str, str]:
    """Hardware and versions."""
    is_gpu = torch.device(device).type == "cuda"
    name = torch.cuda.get_device_name() if is_gpu else platform.processor() or platform.machine()
    return {"device": name, "torch": str(torch.__version__), "python": platform.python_version()}


if __name__ == "__main__":
    main()
