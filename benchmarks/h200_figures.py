"""What benchmarks/h200.py keeps of a plan and of a run under it, and says of them in a line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.h200_rows import Contender
else:  # A script's own folder is on its path, the repository's root is not.
    from h200_rows import Contender

from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Plan
from teraio.executor.report import RunReport
from teraio.units import format_bytes, format_seconds


def plan_figures(plan: Plan) -> dict[str, Any]:
    """What a plan promises, and how it was made."""
    metadata, moves = plan.metadata, plan.moves
    return {
        "planner": metadata.planner,
        "budget_bytes": metadata.gpu_memory_bytes,
        "planned_peak_bytes": metadata.peak_gpu_bytes,
        "predicted_seconds": metadata.predicted_seconds,
        "lower_bound_seconds": metadata.lower_bound_seconds,
        "bound_kind": metadata.bound_kind,
        "planning_seconds": metadata.planning_seconds,
        "bound_seconds": metadata.bound_seconds,
        "moves": len(moves),
        "offloaded_bytes": int(moves.nbytes[moves.writes].sum()),
        "prefetched_bytes": int(moves.nbytes[moves.prefetch_start >= 0].sum()),
        "arena_bytes": dict(metadata.arena_bytes),
    }


def hardware_figures(hardware: Hardware) -> dict[str, float]:
    """What plans and predictions count on: bytes per second and seconds of the host tier, and by
    which factor kernels slow down beside transfers.
    """
    host, slowdown = hardware.host, hardware.slowdown
    rates = ("read_rate", "write_rate", "duplex_read_rate", "duplex_write_rate", "latency_seconds")
    return {name: getattr(host, name) for name in rates} | {
        f"slowdown_{name}": getattr(slowdown, name) for name in ("read", "write", "both")
    }


def run_figures(report: RunReport) -> dict[str, Any]:
    """What the run says of itself; its books of the GPU's memory among it."""
    names = (
        "drift",
        "first_drift",
        "moves_planned",
        "moves_found",
        "substituted_kernels",
        "demand_fetches",
        "demand_fetch_bytes",
        "evictions",
        "dropped_prefetches",
        "relocated_bytes",
        "cold_start_seconds",
    )
    stalls = report.timeline.stall_seconds
    return {name: getattr(report, name) for name in names} | {
        "report_seconds": report.measured_seconds,
        "report_peak_bytes": report.peak_bytes,
        "report_reserved_bytes": report.reserved_bytes,
        "stall_seconds": {name: float(value) for name, value in dict(stalls).items()},
        "recent": [asdict(iteration) for iteration in report.recent],
    }


RESERVED_SHARE = 1.05
"""Of the budget: what the allocator may reserve at most."""


def comparison(row: Mapping[str, Any], ideal_seconds: float) -> dict[str, Any]:
    """Shares of the ideal and of the bound, the prediction's error, what fragmentation takes."""
    seconds = row["step_seconds"]
    peak = row.get("max_memory_allocated", row["report_peak_bytes"])
    reserved = row.get("max_memory_reserved", row["report_reserved_bytes"])
    return {
        "ideal_seconds": ideal_seconds,
        "share_of_ideal": ideal_seconds / seconds,
        "share_of_bound": row["lower_bound_seconds"] / seconds,
        "prediction_error": row["simulated_seconds"] / seconds - 1,
        "within_budget": peak <= row["budget_bytes"],
        "reserved_within_budget": reserved <= RESERVED_SHARE * row["budget_bytes"],
    }


def memory_text(memory: Mapping[str, Any]) -> str:
    """Peaks of the GPU's allocator, where there is a GPU."""
    names = ("max_memory_allocated", "max_memory_reserved")
    return ", ".join(f"{name} {format_bytes(memory[name])}" for name in names if name in memory)


def outcome_text(contender: Contender, row: Mapping[str, Any]) -> str:
    """What came of executing a plan."""
    return (
        f"{contender.label}: step {format_seconds(row['step_seconds'])}, "
        f"{row['share_of_ideal']:.2%} of ideal, {row['share_of_bound']:.2%} of the bound, "
        f"prediction {row['prediction_error']:+.2%}, {memory_text(row)} (predicted "
        f"{format_bytes(row['predicted_reserved_bytes'])} reserved) of "
        f"{format_bytes(row['budget_bytes'])}, drift {row['drift']}, demand fetches "
        f"{row['demand_fetches']}, evictions {row['evictions']}, dropped prefetches "
        f"{row['dropped_prefetches']}, bit-identical {row['bit_identical']} over "
        f"{row['compared_steps']} steps, opened in {row['opening_seconds']:.1f} s, cold start "
        f"{row['cold_start_seconds']:.1f} s"
    )


def promise_text(contender: Contender, row: Mapping[str, Any]) -> str:
    """What is known of a plan before it is executed."""
    return (
        f"{contender.label}: budget {format_bytes(row['budget_bytes'])}, bound "
        f"{format_seconds(row['lower_bound_seconds'])} ({row['bound_kind']}), predicted "
        f"{format_seconds(row['simulated_seconds'])}, {row['moves']} moves, "
        f"{format_bytes(row['predicted_reserved_bytes'])} reserved; planned in "
        f"{row['planning_seconds']:.1f} s, bounded in {row['bound_seconds']:.1f} s"
    )
