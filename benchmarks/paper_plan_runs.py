"""One planner on one of the paper's settings, measured in a process of its own.

``python benchmarks/paper_plan_runs.py RUN`` (one JSON object, the fields of :class:`Run`) prints
what came of it as one JSON object; benchmarks/paper_planning.py starts these and keeps the rows.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from teraio.contracts.hardware import Hardware, Host, Link, Ssd
from teraio.contracts.plan import Plan
from teraio.errors import CapacityError, InfeasibleError
from teraio.planner import plan
from teraio.planner.planning import Progress
from teraio.simulator import simulate
from teraio.traces.trace import Trace

if TYPE_CHECKING:
    from benchmarks.paper_models import GPU, LANGUAGE_MODELS, Setting
    from benchmarks.synthetic import SyntheticModel, synthetic_trace
else:  # A script's own folder is on its path, the repository's root is not.
    from paper_models import GPU, LANGUAGE_MODELS, Setting
    from synthetic import SyntheticModel, synthetic_trace

_BY_NAME = {setting.model: setting for setting in LANGUAGE_MODELS}
MODELS: Mapping[str, Setting] = MappingProxyType(
    {
        "8b": _BY_NAME["llama3-8b"],
        "granite": Setting("granite-code-8b", "Granite-code-base-8B", 128, 4096, 2, 2),
        "70b": _BY_NAME["llama3-70b"],
    }
)
"""The models that the paper plans, in the order of its Table 1; stage 0 of 2."""

FIRST_PLAN_LIMIT_SECONDS = 0.05
"""A time limit that leaves time for nothing but the first plan."""

_SMALL = SyntheticModel(layers=2, micro_batches=6, vocabulary=4000)
_RATES = ("read_rate", "write_rate", "duplex_read_rate", "duplex_write_rate")
_LEAST_FACTOR = 0.1
"""Noise makes no kernel faster than this share of its time."""

Part = TypeVar("Part", Host, Link, Ssd)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is planned and how: the key of a row.

    ``jitter`` is the standard deviation of the noise on every kernel's duration, as a share of it.
    ``real_bandwidth``: the plan is also simulated with this share of all rates.
    """

    model: str
    dtype: str
    host_memory: str
    planner: str
    micro_batches: int = 64
    gpu_memory: str | None = None
    time_limit: float | None = None
    bandwidth_share: float = 1.0
    jitter: float = 0.0
    real_bandwidth: float = 1.0


def load_trace(run: Run, folder: Path | None) -> Trace:
    """The trace of a run's setting: kept in ``folder``, or traced (and kept there if given)."""
    name = f"{run.model}-{run.dtype}-{run.micro_batches}.trace"
    path = None if folder is None else folder / name
    if path is not None and path.exists():
        return Trace.load(path)
    from teraio.profiler import trace as fake_trace

    setting = MODELS[run.model]
    made = fake_trace(
        setting.model,
        sequence=setting.sequence,
        micro_batch_size=setting.micro_batch_size,
        micro_batches=run.micro_batches,
        stages=setting.stages,
        stage=0,
        dtype=run.dtype,
        gpu=GPU,
    )
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        made.save(path)
    return made


def with_jitter(trace: Trace, share: float, seed: int = 0) -> Trace:
    """The trace with noise on each kernel of each micro-batch: normal, of mean 1."""
    kernels = trace.kernels
    noise = np.random.default_rng(seed).normal(1.0, share, len(kernels.duration_seconds))
    durations = kernels.duration_seconds * np.maximum(noise, _LEAST_FACTOR)
    return replace(trace, kernels=replace(kernels, duration_seconds=durations))


def slowed(hardware: Hardware, share: float) -> Hardware:
    """The machine with a share of the rates of host, links and SSDs."""

    def part(of: Part) -> Part:
        return replace(of, **{name: share * getattr(of, name) for name in _RATES})

    return replace(
        hardware,
        host=part(hardware.host),
        link=tuple(map(part, hardware.link)),
        ssd=tuple(map(part, hardware.ssd)),
    )


class Stopwatch:
    """Wall and CPU seconds of each phase that a planner reports, by the report's first word."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        self._phase: str | None = None
        self._started = (0.0, 0.0)

    def __call__(self, report: str) -> None:
        """The phase before ends, another one begins."""
        now = (time.perf_counter(), time.process_time())
        if self._phase is not None:
            self.wall[self._phase] = now[0] - self._started[0]
            self.cpu[self._phase] = now[1] - self._started[1]
        self._phase, self._started = report.split(" ", 1)[0], now


def measure(run: Run, trace: Trace, hardware: Hardware) -> dict[str, Any]:
    """Plan (twice, for the planner that searches: its first plan apart), verify and simulate.

    A planner that finds no plan has ``no_plan`` and ``note`` instead of figures.
    """
    trace = with_jitter(trace, run.jitter) if run.jitter else trace
    kernels, ideal = trace.num_kernels, trace.ideal_seconds
    result: dict[str, Any] = {"kernels": kernels, "ideal_seconds": ideal}
    stopwatch = Stopwatch()
    try:
        if run.planner == "optimal":
            first = _plan(run, trace, hardware, time_limit=FIRST_PLAN_LIMIT_SECONDS)
            result["first_plan_seconds"] = first.metadata.planning_seconds
            result["first_fraction_of_ideal"] = first.fraction_of_ideal
        made = _plan(run, trace, hardware, time_limit=run.time_limit, progress=stopwatch)
        stopwatch("done")
        result |= _facts(run, trace, made)
    except (CapacityError, InfeasibleError) as error:
        return result | {"no_plan": type(error).__name__, "note": str(error)}
    result["planning_cpu_seconds"] = stopwatch.cpu["planning"]
    result["bound_cpu_seconds"] = stopwatch.cpu.get("bounding", 0.0)
    result["verifying_seconds"] = stopwatch.wall["verifying"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return result | {"peak_resident_bytes": peak}


def _plan(
    run: Run,
    trace: Trace,
    hardware: Hardware,
    *,
    time_limit: float | None,
    progress: Progress | None = None,
) -> Plan:
    is_bounded = progress is not None and run.planner == "optimal" and run.real_bandwidth == 1
    return plan(
        trace,
        hardware,
        planner=run.planner,
        time_limit=time_limit,
        bandwidth_share=run.bandwidth_share,
        bound=is_bounded,
        progress=progress,
    )


def _facts(run: Run, trace: Trace, made: Plan) -> dict[str, Any]:
    metadata = made.metadata
    timeline = simulate(trace, made, made.hardware, record=False)
    facts: dict[str, Any] = {
        "predicted_seconds": made.predicted_seconds,
        "simulated_seconds": timeline.iteration_seconds,
        "fraction_of_ideal": made.fraction_of_ideal,
        "lower_bound_seconds": metadata.lower_bound_seconds,
        "bound_kind": metadata.bound_kind,
        "gap": made.gap,
        "planning_seconds": metadata.planning_seconds,
        "bound_seconds": metadata.bound_seconds,
        "moves": len(made.moves),
        "evictions": timeline.metadata.evictions,
        "demand_fetches": timeline.metadata.demand_fetches,
        "ssd_bytes_written": sum(metadata.ssd_bytes_written.values()),
        "options": dict(metadata.options),
    }
    if run.real_bandwidth != 1:
        slower = slowed(made.hardware, run.real_bandwidth)
        facts["slower_seconds"] = simulate(trace, made, slower, record=False).iteration_seconds
    return facts


def measure_apart(run: Run, folder: Path | None, timeout_seconds: float | None) -> dict[str, Any]:
    """:func:`measure` in a process of its own, which ends after ``timeout_seconds``.

    Raises RuntimeError with its last words if it fails.
    """
    order = json.dumps({"run": asdict(run), "folder": None if folder is None else str(folder)})
    command = [sys.executable, str(Path(__file__).resolve()), order]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return {"no_plan": "timeout", "note": f"stopped after {timeout_seconds:g} s"}
    if done.returncode < 0:
        raise RuntimeError(f"ended by {signal.Signals(-done.returncode).name}")
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _warm_up(run: Run) -> None:
    """Load machine code (or compile it) on a small trace, so that no planner's time has it in."""
    trace = synthetic_trace(_SMALL)
    hardware = Hardware.preset("paper").with_budgets(trace.peak_allocated_bytes // 2)
    try:
        made = plan(trace, hardware, planner=run.planner)
        simulate(trace, made, made.hardware, record=False)
    except (CapacityError, InfeasibleError):
        pass  # What this policy cannot do is said of the run's own trace.


def main() -> None:
    """Do what the order on the command line says."""
    order = json.loads(sys.argv[1])
    run = Run(**order["run"])
    hardware = Hardware.preset("paper").with_budgets(run.gpu_memory, run.host_memory)
    trace = load_trace(run, None if order["folder"] is None else Path(order["folder"]))
    _warm_up(run)
    print(json.dumps(measure(run, trace, hardware)))


if __name__ == "__main__":
    main()
