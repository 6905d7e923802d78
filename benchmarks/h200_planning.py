"""Plans of benchmarks/h200.py, each made in a process of its own while the GPU does other work.

What is known before a plan runs, its promise, comes with it: bound, predicted seconds and memory,
for the hardware that was probed, also where the plan was made with an earlier probe.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.h200_figures import hardware_figures, plan_figures
else:  # A script's own folder is on its path, the repository's root is not.
    from h200_figures import hardware_figures, plan_figures

import teraio
from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Plan
from teraio.planner import lower_bound
from teraio.simulator.reserved_memory import predict_reserved_memory
from teraio.traces.trace import Trace
from teraio.traces.transforms import trace_of_plan

MOVELESS = "ideal"
"""The planner of a plan without moves, which shows what the executor costs by itself."""


@dataclass(frozen=True, kw_only=True)
class PlanWork:
    """One plan to make, or to take from ``kept`` if that is of the same trace.

    ``trace``, ``hardware``: files. ``gpu_memory``: bytes; ``host_memory``: bytes or text.
    ``headroom``: share of ``gpu_memory`` that the plan leaves free; the bound is for all of it.
    ``output``: where the plan goes. ``planner``: :data:`MOVELESS` or one that proves a bound.
    """

    trace: Path
    hardware: Path
    output: Path
    kept: Path | None
    planner: str
    gpu_memory: int
    headroom: float
    host_memory: int | str
    transform: str | None
    time_limit: float | None

    def promise(self) -> dict[str, Any]:
        """Make and save the plan; what is known of it before it runs, in seconds and bytes."""
        trace = Trace.load(self.trace)
        # The disk takes no part in this benchmark.
        hardware = replace(Hardware.load(self.hardware), ssd=())
        plan, is_kept = self._plan(trace, hardware)
        budget = plan.metadata
        budget_bytes = self.gpu_memory if len(plan.moves) else budget.gpu_memory_bytes
        now = hardware.with_budgets(budget_bytes, budget.host_memory_bytes)
        simulated = teraio.simulate(trace, plan, now, record=False)
        promise = plan_figures(plan) | {
            "budget_bytes": budget_bytes,
            "headroom": self.headroom,
            "simulated_seconds": simulated.iteration_seconds,
            "simulated_evictions": simulated.metadata.evictions,
            "predicted_reserved_bytes": predict_reserved_memory(
                plan, budget_bytes=budget_bytes
            ).reserved_bytes,
            "trace_ideal_seconds": trace.ideal_seconds,
            "trace_peak_allocated_bytes": trace.peak_allocated_bytes,
            "plan_of_earlier_run": is_kept,
            "probed": hardware_figures(hardware),
        }
        if not len(plan.moves):
            # Kernels alone take so long.
            promise["lower_bound_seconds"] = trace.ideal_seconds
        elif now != plan.hardware:
            bound = lower_bound(trace_of_plan(trace, plan), now, time_limit=self.time_limit)
            promise |= {
                "lower_bound_seconds": bound.seconds,
                "bound_kind": bound.kind,
                "bound_seconds": bound.solving_seconds,
            }
        return promise

    def _plan(self, trace: Trace, hardware: Hardware) -> tuple[Plan, bool]:
        if self.kept is not None and self.kept.exists():
            plan = Plan.load(self.kept)
            if plan.metadata.trace_hash == trace.hash:
                if self.kept != self.output:
                    plan.save(self.output)
                return plan, True
        if self.planner == MOVELESS:
            plan = teraio.plan(trace, hardware, planner=MOVELESS)
        else:
            plan = teraio.plan(
                trace,
                hardware,
                planner=self.planner,
                gpu_memory=int(self.gpu_memory * (1 - self.headroom)),
                host_memory=self.host_memory,
                transform=self.transform,
                time_limit=self.time_limit,
                bound=True,
            )
        plan.save(self.output)
        return plan, False


class Planners:
    """Processes that make plans; they import what they need before there is anything to do."""

    def __init__(self, most: int) -> None:
        # Forked ones would share the GPU's context. Half of the cores are left to the training.
        count = max(1, min(most, (os.cpu_count() or 1) // 2))
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(
            count, mp_context=context, initializer=_end_with_the_process_that_asked
        )
        for _ in range(count):  # One begins whenever there is more to do than there are.
            self._pool.submit(os.getpid)

    def start(self, work: PlanWork) -> Future[dict[str, Any]]:
        """The promise to come; planning's error is raised where it is read."""
        return self._pool.submit(work.promise)

    def close(self) -> None:
        """Wait for what is under way, and end the processes."""
        self._pool.shutdown()


def _end_with_the_process_that_asked() -> None:
    """One that was killed would leave this one waiting, and whoever reads its output."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
