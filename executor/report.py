"""What an executed run did, in numbers."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from teraio.contracts.plan import PlanMetadata
from teraio.contracts.timeline import Timeline
from teraio.executor.iteration_log import IterationLog
from teraio.executor.measured_timeline import build_timeline


@dataclass(frozen=True)
class RunReport:
    """What an executed run did. Seconds, bytes; counts are totals after the warm-up.

    ``measured_seconds`` is the median length of its steady iterations, ``drift`` the number of
    kernels that were not the planned ones, ``first_drift`` says what the first of them was.
    """

    steps: int
    warm_up_steps: int
    measured_seconds: float
    peak_bytes: int
    budget_bytes: int
    drift: int
    first_drift: str
    demand_fetches: int
    demand_fetch_bytes: int
    evictions: int
    eviction_bytes: int
    dropped_prefetches: int
    cold_start_seconds: float
    timeline: Timeline


def make_report(
    log: IterationLog, metadata: PlanMetadata, *, budget_bytes: int, peak_bytes: int
) -> RunReport:
    """The report of what a log holds so far; ``peak_bytes``: of the iteration under way."""
    totals, steady_seconds = log.totals, log.steady_seconds()
    return RunReport(
        steps=log.num_iterations,
        warm_up_steps=log.num_warm_up,
        measured_seconds=statistics.median(steady_seconds) if steady_seconds else 0.0,
        peak_bytes=max(log.peak_bytes, peak_bytes),
        budget_bytes=budget_bytes,
        drift=totals.drift,
        first_drift=totals.first_drift or log.current.first_drift,
        demand_fetches=totals.demand_fetches,
        demand_fetch_bytes=totals.demand_fetch_bytes,
        evictions=totals.evictions,
        eviction_bytes=totals.eviction_bytes,
        dropped_prefetches=totals.dropped_prefetches,
        cold_start_seconds=log.cold_start_seconds,
        timeline=build_timeline(
            log,
            rank=metadata.rank,
            ideal_seconds=metadata.ideal_seconds,
            gap_seconds=metadata.gap_seconds,
            capacity_bytes=budget_bytes,
        ),
    )
