"""How fast and how good planning is: a long synthetic trace, and the traces of G10 (MICRO'23).

    python benchmarks/planning.py            # 100,000 kernels, and G10's traces if they are there
    python benchmarks/planning.py --smoke    # a small run, for tests

Prints one JSON object. Planning includes every simulation that judges a variant and the verifier. A
first plan compiles (or loads machine code from the cache) and is reported apart. G10's published
fractions are of its page-level simulator; ours are of storages in a static order.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import resource
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numba
import numpy as np

import teraio
from teraio.contracts.hardware import Hardware
from teraio.planner import plan
from teraio.simulator import simulate
from teraio.traces.importers.g10 import import_g10
from teraio.traces.trace import Trace

if TYPE_CHECKING:
    from benchmarks.synthetic import HUNDRED_THOUSAND_KERNELS, SyntheticModel, synthetic_trace
else:  # A script's own folder is on its path, the repository's root is not.
    from synthetic import HUNDRED_THOUSAND_KERNELS, SyntheticModel, synthetic_trace

_SMOKE = SyntheticModel(layers=4, micro_batches=4, vocabulary=32000)
_G10_TRACES = Path(__file__).resolve().parents[1].parent / "shared" / "data" / "g10"
_G10_POLICY = "prefetch_lru"


def main() -> None:
    """Print machine, versions, options and measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a small trace, none of G10's")
    parser.add_argument("--hardware", default="paper", help="preset or file")
    parser.add_argument("--gpu-memory", default=None, help="default: half of what the trace needs")
    parser.add_argument("--host-memory", default=None, help="default: the hardware's")
    parser.add_argument("--g10", type=Path, default=_G10_TRACES, help="folder of G10's traces")
    options = parser.parse_args()
    model = _SMOKE if options.smoke else HUNDRED_THOUSAND_KERNELS
    synthetic = _measure_synthetic(model, options)
    result = {
        "machine": {"cpu": _cpu_model(), "system": platform.platform()},
        "versions": {
            "teraio": teraio.__version__,
            "python": platform.python_version(),
            "numba": numba.__version__,
            "numpy": np.__version__,
        },
        "options": {name: str(value) for name, value in vars(options).items()},
        "model": asdict(model),
        "synthetic": synthetic,
        "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "g10": [] if options.smoke else _measure_g10(options.g10),
    }
    print(json.dumps(result, indent=2))


def _measure_synthetic(model: SyntheticModel, options: argparse.Namespace) -> dict[str, Any]:
    """Plan and simulate one long iteration."""
    trace = synthetic_trace(model)
    gpu_memory = options.gpu_memory or trace.peak_allocated_bytes // 2
    hardware = Hardware.load(options.hardware).with_budgets(gpu_memory, options.host_memory)
    measured = _measure_planning(trace, hardware)
    made = plan(trace, hardware)
    begun = time.perf_counter()
    timeline = simulate(trace, made, hardware, record=False)
    return measured | {
        "kernels": trace.num_kernels,
        "storages": len(trace.storages),
        "gpu_memory_bytes": hardware.gpu[0].memory_bytes,
        "simulating_seconds": time.perf_counter() - begun,
        "iteration_seconds": timeline.iteration_seconds,
    }


def _measure_planning(trace: Trace, hardware: Hardware) -> dict[str, Any]:
    begun = time.perf_counter()
    plan(trace, hardware)
    first_seconds = time.perf_counter() - begun
    begun, begun_cpu = time.perf_counter(), time.process_time()
    made = plan(trace, hardware)
    return {
        "first_call_seconds": first_seconds,
        "planning_seconds": time.perf_counter() - begun,
        "planning_cpu_seconds": time.process_time() - begun_cpu,
        "moves": len(made.moves),
        "fraction_of_ideal": made.fraction_of_ideal,
        "arena_bytes": dict(made.metadata.arena_bytes),
        "variant": dict(made.metadata.options),
    }


def _measure_g10(folder: Path) -> list[dict[str, Any]]:
    """Every published run of G10's own policy at its default machine; ours beside it."""
    file = folder / "expected_results.csv"
    if not file.is_file():
        return []
    rows = []
    for published in csv.DictReader(file.read_text().splitlines()):
        if published["source"] != "overall_batchsize" or published["policy"] != _G10_POLICY:
            continue
        name = f"{published['model']}-{published['batch']}"
        trace = import_g10(folder / "derived" / f"{name}.json.gz")
        measured = _measure_planning(trace, Hardware.preset("g10"))
        rows.append(
            {
                "trace": name,
                "published": float(published["frac_ideal"]),
                "ours": measured["fraction_of_ideal"],
                "planning_seconds": measured["planning_seconds"],
                "variant": measured["variant"],
            }
        )
    return rows


def _cpu_model() -> str:
    """The processor's name where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
