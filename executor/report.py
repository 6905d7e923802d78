"""What an executed run did, in numbers."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from teraio.contracts.plan import Plan
from teraio.contracts.timeline import Timeline
from teraio.executor.iteration_log import IterationLog, IterationRecord
from teraio.executor.landing import Landing
from teraio.executor.measured_timeline import build_timeline
from teraio.executor.stores import FileUse
from teraio.executor.tiers import Tiers


@dataclass(frozen=True)
class IterationFigures:
    """One complete iteration of a run.

    ``host_lead_seconds`` is how far the training thread was ahead of the GPU at its end (None on a
    CPU): near 0 the GPU waits for Python, or the loop has just waited for it (``loss.item()``).
    ``relocated_bytes`` were copied within the GPU; ``allocator_looks``: how often its allocator was
    asked how its memory is laid out, some milliseconds each.
    """

    seconds: float
    is_on_plan: bool
    host_lead_seconds: float | None
    relocated_bytes: int
    allocator_looks: int


@dataclass(frozen=True)
class RunReport:
    """What an executed run did. Seconds, bytes; counts are totals after the warm-up.

    ``measured_seconds`` is the median length of its steady iterations, ``drift`` the number of
    kernels that were not the expected ones, ``first_drift`` says what the first of them was.
    ``reserved_bytes`` is what a GPU's allocator held at most, 0 on a CPU; ``relocated_bytes`` were
    copied within the GPU in a steady iteration so that it need not hold more.
    Of a steady iteration: ``moves_found`` of the ``moves_planned`` found their storage, and
    ``substituted_kernels`` were not those of the plan's trace, but taken for them, extra or left
    out (``first_substituted``); they do not count as drift. ``ssd_files``: each file of the SSD
    tier with its backend and rates, over the whole run; ``verified_reads``: those whose checksum
    was compared, if that was asked for. ``recent``: the newest iterations, at most eight.
    """

    steps: int
    warm_up_steps: int
    measured_seconds: float
    peak_bytes: int
    budget_bytes: int
    reserved_bytes: int
    relocated_bytes: int
    drift: int
    first_drift: str
    moves_planned: int
    moves_found: int
    substituted_kernels: int
    first_substituted: str
    demand_fetches: int
    demand_fetch_bytes: int
    evictions: int
    eviction_bytes: int
    dropped_prefetches: int
    cold_start_seconds: float
    ssd_files: tuple[FileUse, ...]
    verified_reads: int
    recent: tuple[IterationFigures, ...]
    timeline: Timeline

    @property
    def host_lead_seconds(self) -> float | None:
        """The least of the recent iterations that went by the plan; None if there is none."""
        leads = [each.host_lead_seconds for each in self.recent if each.is_on_plan]
        return min((lead for lead in leads if lead is not None), default=None)


def make_report(
    log: IterationLog,
    plan: Plan,
    landing: Landing | None,
    tiers: Tiers,
    *,
    budget_bytes: int,
    peak_bytes: int,
) -> RunReport:
    """The report of what a log holds so far; ``landing``: how the run follows the plan, if not as
    it is; ``peak_bytes``: of the iteration under way.
    """
    totals, steady_seconds, steady = log.totals, log.steady_seconds(), log.newest_steady
    metadata = plan.metadata
    return RunReport(
        steps=log.num_iterations,
        warm_up_steps=log.num_warm_up,
        measured_seconds=statistics.median(steady_seconds) if steady_seconds else 0.0,
        peak_bytes=max(log.peak_bytes, peak_bytes),
        budget_bytes=budget_bytes,
        reserved_bytes=log.reserved_bytes,
        relocated_bytes=0 if steady is None else steady.traffic.relocated_bytes,
        drift=totals.drift,
        first_drift=totals.first_drift or log.current.first_drift,
        moves_planned=len(plan.moves),
        moves_found=0 if steady is None else steady.moves_found,
        substituted_kernels=0 if landing is None else landing.num_substituted,
        first_substituted="" if landing is None else landing.first_substituted,
        demand_fetches=totals.demand_fetches,
        demand_fetch_bytes=totals.demand_fetch_bytes,
        evictions=totals.evictions,
        eviction_bytes=totals.eviction_bytes,
        dropped_prefetches=totals.dropped_prefetches,
        cold_start_seconds=log.cold_start_seconds,
        ssd_files=tuple(tiers.file_uses),
        verified_reads=tiers.num_verified,
        recent=tuple(map(_figures, log.recent, log.host_lead_seconds())),
        timeline=build_timeline(
            log,
            rank=metadata.rank,
            ideal_seconds=metadata.ideal_seconds,
            gap_seconds=metadata.gap_seconds,
            capacity_bytes=budget_bytes,
            num_storages=len(plan.storages),
        ),
    )


def _figures(record: IterationRecord, host_lead_seconds: float | None) -> IterationFigures:
    return IterationFigures(
        seconds=record.seconds,
        is_on_plan=record.is_on_plan and not record.is_warm_up,
        host_lead_seconds=host_lead_seconds,
        relocated_bytes=record.traffic.relocated_bytes,
        allocator_looks=record.traffic.allocator_looks,
    )
