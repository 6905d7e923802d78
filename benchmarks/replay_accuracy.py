"""How well the simulator foretells a replay: plans of several planners, played on this machine.

    python benchmarks/replay_accuracy.py --device cuda --hardware hardware.toml
    python benchmarks/replay_accuracy.py --device cpu --scale 0.05 --slower 25
    python benchmarks/replay_accuracy.py --smoke    # seconds, on a CPU, for tests

--output gets each row as it comes, and a row that is there is not played again.
Prints one JSON object: per planner and budget the predicted and the replayed iteration, their
difference, what of it are waits for transfers, and both accounts of stalls. Transfers are real; a
stand-in takes each kernel's time.
Without ``--hardware`` the machine is measured first. ``--slower`` multiplies kernel times: a CPU's
memory is so much slower than a GPU's link.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import teraio
from teraio.contracts.hardware import Hardware
from teraio.errors import OffloadWarning
from teraio.executor import Replay
from teraio.executor.replaying.scaling import scaled_trace
from teraio.traces.trace import Trace

if TYPE_CHECKING:
    from benchmarks.partial_results import Findings
    from benchmarks.synthetic import SyntheticModel, synthetic_trace
else:  # A script's own folder is on its path, the repository's root is not.
    from partial_results import Findings
    from synthetic import SyntheticModel, synthetic_trace


def main() -> None:
    """Print machine, versions, options and one row per planner and budget."""
    options = _options()
    trace = _slower(_trace(options), options.slower)
    if options.scale != 1:
        trace = scaled_trace(trace, options.scale)
    hardware = Hardware.load(options.hardware) if options.hardware else _measured(options)
    subject = {"trace": trace.hash, "hardware": hardware.to_toml(), "options": _subject(options)}
    findings = Findings(options.output, subject)
    findings.add("machine", _machine(options.device))
    findings.add("versions", _versions())
    findings.add("options", {name: str(value) for name, value in vars(options).items()})
    findings.add("trace", _described(trace))
    findings.add("hardware", hardware.to_toml())
    rows = findings.get("rows", [])
    known = {(row["planner"], row["budget"]) for row in rows}
    for share, planner in itertools.product(options.budgets, options.planners):
        if (planner, share) not in known:
            rows.append(_row(trace, hardware, planner, share, options))
            findings.add("rows", rows)
    for name in ("error", "error_of_transfers"):
        errors = [abs(row[name]) for row in rows]
        findings.add(f"median_{name}", statistics.median(errors))
        findings.add(f"worst_{name}", max(errors))
    print(json.dumps(findings.values, indent=2))


def _subject(options: argparse.Namespace) -> dict[str, str]:
    """Options that decide what a row says, beside its planner and budget."""
    others = ("output", "planners", "budgets", "hardware", "trace")
    return {name: str(value) for name, value in vars(options).items() if name not in others}


def _versions() -> dict[str, str]:
    return {
        "teraio": teraio.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _described(trace: Trace) -> dict[str, Any]:
    return {
        "model": trace.metadata.model,
        "kernels": trace.num_kernels,
        "ideal_seconds": trace.ideal_seconds,
        "peak_bytes": trace.peak_allocated_bytes,
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="a small synthetic trace")
    parser.add_argument("--trace", type=Path, help="a saved trace, in place of --model")
    parser.add_argument("--model", default="bench-0.7b", help="a reference model")
    parser.add_argument("--gpu", default="h200", help="whose kernel times")
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--hardware", help="preset or file; default: measured")
    parser.add_argument("--host-memory", help="default: the hardware's")
    parser.add_argument("--ssd-path", type=Path)
    parser.add_argument("--ssd-backend", default="auto", help="auto, gds or file")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--slower", type=float, default=1.0)
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--verify", choices=("full", "sampled", "off"))
    parser.add_argument("--memory-traffic", action="store_true")
    parser.add_argument("--output", type=Path, help="file of the rows so far")
    parser.add_argument("--budgets", default="0.8,0.6", help="shares of the peak")
    parser.add_argument("--planners", default="optimal,greedy,zero-offload,on-demand")
    options = parser.parse_args()
    options.budgets = [float(share) for share in options.budgets.split(",")]
    options.planners = options.planners.split(",")
    if options.smoke:
        options.scale, options.slower, options.iterations = 0.002, 10.0, 1
        options.hardware = options.hardware or "cpu"
        options.host_memory = options.host_memory or "500MB"
        options.planners = ["greedy", "on-demand"]
    return options


def _trace(options: argparse.Namespace) -> Trace:
    if options.smoke:
        return synthetic_trace(SyntheticModel(layers=4, micro_batches=1, vocabulary=32000))
    if options.trace is not None:
        return Trace.load(options.trace)
    return teraio.trace(options.model, gpu=options.gpu, micro_batch_size=options.micro_batch_size)


def _slower(trace: Trace, factor: float) -> Trace:
    kernels = trace.kernels
    kernels = replace(
        kernels,
        duration_seconds=kernels.duration_seconds * factor,
        gap_before_seconds=kernels.gap_before_seconds * factor,
    )
    return replace(trace, kernels=kernels)


def _measured(options: argparse.Namespace) -> Hardware:
    # A disk that nobody named is not measured: on a GPU that takes most of a probe's time.
    return teraio.probe(device=options.device, directory=options.ssd_path or (), quick=True)


def _row(
    trace: Trace, hardware: Hardware, planner: str, share: float, options: argparse.Namespace
) -> dict[str, Any]:
    budget_bytes = int(share * trace.peak_allocated_bytes)
    plan = teraio.plan(
        trace,
        hardware,
        planner=planner,
        gpu_memory=budget_bytes,
        host_memory=options.host_memory,
    )
    with warnings.catch_warnings():
        # On demand nothing fits, and that is what is measured.
        warnings.simplefilter("ignore", OffloadWarning)
        replay = teraio.replay(
            trace,
            plan,
            device=options.device,
            ssd_path=options.ssd_path,
            ssd_backend=options.ssd_backend,
            iterations=options.iterations,
            verify=options.verify,
            memory_traffic=options.memory_traffic,
        )
    return {
        "planner": planner,
        "budget": share,
        "predicted_seconds": replay.predicted_seconds,
        "replayed_seconds": replay.iteration_seconds,
        "error": replay.error,
        "error_of_transfers": _of_transfers(replay),
        "predicted_stall_seconds": replay.predicted.stall_seconds,
        "replayed_stall_seconds": replay.timeline.stall_seconds,
        "all_iteration_seconds": replay.all_iteration_seconds,
        "moves_found": replay.moves_found,
        "moves_planned": replay.moves_planned,
        "demand_fetches": replay.timeline.metadata.demand_fetches,
        "predicted_demand_fetches": replay.predicted.metadata.demand_fetches,
        "kernel_error": replay.kernel_error,
        "transfers_checked": replay.transfers_checked,
    }


def _of_transfers(replay: Replay) -> float:
    """The part of the error that waits for transfers explain; the rest is the host's.

    A shared machine gives the replay's own thread too little time, which says nothing of plans.
    """
    measured, predicted = replay.timeline.stall_seconds, replay.predicted.stall_seconds
    missed = sum(measured[cause] - predicted[cause] for cause in ("read", "memory"))
    return missed / replay.predicted_seconds


def _machine(device: str) -> dict[str, Any]:
    if device == "cuda":
        return {"gpu": torch.cuda.get_device_name(), "system": platform.platform()}
    return {"system": platform.platform(), "processor": platform.processor()}


if __name__ == "__main__":
    main()
