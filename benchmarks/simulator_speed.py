"""How fast the simulator is: kernels per second with a plan in force and on demand, and memory.

    python benchmarks/simulator_speed.py            # 100,000 kernels
    python benchmarks/simulator_speed.py --smoke    # a small run, for tests

The plan follows a rule of its own, so that no planner is measured: every inactive period of at
least L kernels moves, half of the storages to the host and half to the SSD, with the largest L that
fits the GPU. A first call compiles (or loads machine code from the cache) and is not measured.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numba
import numpy as np

import teraio
from teraio.contracts.hardware import HOST, Hardware
from teraio.contracts.plan import Moves, Plan
from teraio.contracts.table import IntArray
from teraio.contracts.timeline import Timeline
from teraio.planner.drafts import draft_moves
from teraio.planner.plan_building import build_plan
from teraio.planner.residency import resident_bytes
from teraio.simulator import simulate
from teraio.traces.lifetimes import InactivePeriods, inactive_periods
from teraio.traces.trace import Trace

if TYPE_CHECKING:
    from benchmarks.synthetic import HUNDRED_THOUSAND_KERNELS, SyntheticModel, synthetic_trace
else:  # A script's own folder is on its path, the repository's root is not.
    from synthetic import HUNDRED_THOUSAND_KERNELS, SyntheticModel, synthetic_trace

_SMOKE = SyntheticModel(layers=4, micro_batches=4, vocabulary=32000)
SMALLEST_MOVE_BYTES = 10**6


def main() -> None:
    """Print one JSON object: machine, versions, options and measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a small trace")
    parser.add_argument("--hardware", default="paper", help="preset or file")
    parser.add_argument("--gpu-memory", default=None, help="default: half of what the trace needs")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    model = _SMOKE if options.smoke else HUNDRED_THOUSAND_KERNELS
    trace = synthetic_trace(model)
    gpu_memory = options.gpu_memory or trace.peak_allocated_bytes // 2
    hardware = Hardware.load(options.hardware).with_budgets(gpu_memory, "10TB")
    plan = _plan_by_length(trace, hardware)
    result = {
        "machine": {"cpu": _cpu_model(), "system": platform.platform()},
        "versions": {
            "teraio": teraio.__version__,
            "python": platform.python_version(),
            "numba": numba.__version__,
            "numpy": np.__version__,
        },
        "options": vars(options) | {"gpu_memory": gpu_memory, "model": asdict(model)},
        "kernels": trace.num_kernels,
        "storages": len(trace.storages),
        "accesses": len(trace.accesses),
        "moves": len(plan.moves),
        "measured": {
            name: _measure(trace, run, options.repeats)
            for name, run in _cases(trace, plan, hardware).items()
        },
        "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(json.dumps(result, indent=2))


def _cases(
    trace: Trace, plan: Plan, hardware: Hardware
) -> dict[str, Callable[[Callable[[int], None]], Timeline]]:
    """What is timed; each takes a progress function."""
    tight = int(plan.metadata.gpu_memory_bytes * 0.9)
    return {
        "plan": lambda p: simulate(trace, plan, hardware, record=False, progress=p),
        "plan, events recorded": lambda p: simulate(trace, plan, hardware, progress=p),
        "plan at 90 % of its memory": lambda p: simulate(
            trace, plan, hardware, gpu_memory=tight, record=False, progress=p
        ),
        "on demand": lambda p: simulate(trace, None, hardware, record=False, progress=p),
    }


def _measure(
    trace: Trace, run: Callable[[Callable[[int], None]], Timeline], repeats: int
) -> dict[str, float]:
    """Median wall time of a call, set-up included, and kernels simulated per second of it."""
    iterations: list[int] = []
    begun = time.perf_counter()
    timeline = run(iterations.append)
    first_seconds = time.perf_counter() - begun
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        timeline = run(iterations.append)
        seconds.append(time.perf_counter() - begun)
    median = statistics.median(seconds)
    return {
        "first_call_seconds": first_seconds,
        "call_seconds": median,
        "iterations_simulated": iterations[-1],
        "kernels_per_second": trace.num_kernels * iterations[-1] / median,
        "iteration_seconds": timeline.iteration_seconds,
        "fraction_of_ideal": trace.ideal_seconds / timeline.iteration_seconds,
        "steady": timeline.metadata.steady,
        "demand_fetches": timeline.metadata.demand_fetches,
        "evictions": timeline.metadata.evictions,
    }


def _plan_by_length(trace: Trace, hardware: Hardware) -> Plan:
    """All periods of at least L kernels move, with the largest L for which the plan fits."""
    periods = inactive_periods(trace)
    capacity = hardware.gpu_of_rank(0).memory_bytes
    length = periods.end_kernel - periods.after_kernel
    low, high = 3, trace.num_kernels + 1
    while low + 1 < high:
        middle = (low + high) // 2
        moves = _moves(trace, periods, np.flatnonzero(length >= middle), hardware)
        gpu_bytes = resident_bytes(
            trace.storages, trace.kernels.workspace_bytes, moves, trace.num_kernels
        )
        low, high = (middle, high) if gpu_bytes.max() <= capacity else (low, middle)
    moves = _moves(trace, periods, np.flatnonzero(length >= low), hardware)
    return build_plan(
        trace, moves, hardware, planner="by length", predicted_seconds=trace.ideal_seconds
    )


def _moves(trace: Trace, periods: InactivePeriods, rows: IntArray, hardware: Hardware) -> Moves:
    """Out at once, gone two kernels later, back a sixteenth of the period before its end."""
    storage = periods.storage[rows]
    rows = rows[(trace.storages.nbytes[storage] >= SMALLEST_MOVE_BYTES) & ~periods.is_tail[rows]]
    after, end = periods.after_kernel[rows], periods.end_kernel[rows]
    is_ssd = periods.storage[rows] % 2 == 1
    return draft_moves(
        trace,
        periods,
        rows,
        offload_start=after,
        free_by=after + 2,
        prefetch_start=np.maximum(end - (end - after) // 16, after + 3),
        device=np.where(is_ssd, hardware.ssds_of_rank(0)[0].name, HOST).astype(object),
    )


def _cpu_model() -> str:
    """The processor's name where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
