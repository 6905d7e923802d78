"""Planners side by side: one row each, with what was planned and what the simulator says of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teraio.contracts.hardware import Hardware, as_hardware
from teraio.contracts.plan import Plan
from teraio.contracts.timeline import Timeline
from teraio.errors import CapacityError, InfeasibleError
from teraio.planner.cost import dollars_per_million_tokens, years_of_ssds
from teraio.planner.planning import Progress, plan
from teraio.simulator import simulate
from teraio.traces.trace import Trace, as_trace

if TYPE_CHECKING:
    import pandas as pd

DEFAULT_PLANNERS = ("ideal", "optimal", "greedy", "on-demand")


def compare(
    trace: Trace | str | Path,
    hardware: Hardware | str | Path,
    planners: Sequence[str] = DEFAULT_PLANNERS,
    *,
    gpu_memory: int | str | None = None,
    host_memory: int | str | None = None,
    bandwidth_share: float = 1.0,
    ssd_years: float | None = None,
    time_limit: float | None = None,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Plan and simulate with each planner: one row per planner, in the order given.

    Columns are the keys of :func:`plan_summary` and of the simulated account, in seconds and bytes,
    and ``note``. A planner that finds no plan has nulls and says why in its note. Arguments are
    those of :func:`teraio.planner.plan`, which also states the InputError cases.
    """
    import pandas as pd

    trace, hardware = as_trace(trace), as_hardware(hardware)
    rows = []
    for planner in planners:
        try:
            made = plan(
                trace,
                hardware,
                planner=planner,
                gpu_memory=gpu_memory,
                host_memory=host_memory,
                bandwidth_share=bandwidth_share,
                ssd_years=ssd_years,
                time_limit=time_limit,
                progress=progress,
            )
            # The plan's own hardware holds its budgets; the ideal one's GPU is unlimited.
            timeline = simulate(trace, made, made.hardware, record=False)
        except (InfeasibleError, CapacityError) as error:
            rows.append({"planner": planner, "note": str(error)})
            continue
        rows.append(plan_summary(made) | _account(timeline) | {"note": ""})
    return pd.DataFrame(rows, columns=_COLUMNS).astype(dict.fromkeys(_INTEGER_COLUMNS, "Int64"))


def plan_summary(plan: Plan) -> dict[str, Any]:
    """The keys that ``teraio plan --json`` promises; None where a value is unknown.

    ``ssd_years`` is infinite where nothing is written. Prices are spread over
    :data:`teraio.planner.cost.LIFE_YEARS`, without electricity.
    """
    metadata = plan.metadata
    return {
        "planner": metadata.planner,
        "predicted_seconds": metadata.predicted_seconds,
        "ideal_seconds": metadata.ideal_seconds,
        "lower_bound_seconds": metadata.lower_bound_seconds,
        "bound_kind": metadata.bound_kind,
        "gap": plan.gap,
        "fraction_of_ideal": plan.fraction_of_ideal,
        "peak_gpu_bytes": metadata.peak_gpu_bytes,
        "peak_host_bytes": metadata.peak_host_bytes,
        "ssd_bytes_written": sum(metadata.ssd_bytes_written.values()),
        "planning_seconds": metadata.planning_seconds,
        "bound_seconds": metadata.bound_seconds,
        "value_of_gb": dict(metadata.value_of_gb) or None,
        "value_of_gb_per_second": dict(metadata.value_of_gb_per_second) or None,
        "dollars_per_million_tokens": dollars_per_million_tokens(plan),
        "ssd_years": years_of_ssds(plan),
    }


def _account(timeline: Timeline) -> dict[str, Any]:
    metadata = timeline.metadata
    return {
        "iteration_seconds": metadata.iteration_seconds,
        "stall_read_seconds": metadata.stall_read_seconds,
        "stall_memory_seconds": metadata.stall_memory_seconds,
        "stall_host_seconds": metadata.stall_host_seconds,
        "compute_overlapped_seconds": metadata.compute_overlapped_seconds,
        "compute_alone_seconds": metadata.compute_alone_seconds,
        "gap_seconds": metadata.gap_seconds,
        "demand_fetches": metadata.demand_fetches,
        "evictions": metadata.evictions,
    }


_COLUMNS = [
    "planner",
    "predicted_seconds",
    "ideal_seconds",
    "lower_bound_seconds",
    "bound_kind",
    "gap",
    "fraction_of_ideal",
    "peak_gpu_bytes",
    "peak_host_bytes",
    "ssd_bytes_written",
    "planning_seconds",
    "bound_seconds",
    "value_of_gb",
    "value_of_gb_per_second",
    "dollars_per_million_tokens",
    "ssd_years",
    "iteration_seconds",
    "stall_read_seconds",
    "stall_memory_seconds",
    "stall_host_seconds",
    "compute_overlapped_seconds",
    "compute_alone_seconds",
    "gap_seconds",
    "demand_fetches",
    "evictions",
    "note",
]
_INTEGER_COLUMNS = (
    "peak_gpu_bytes",
    "peak_host_bytes",
    "ssd_bytes_written",
    "demand_fetches",
    "evictions",
)
