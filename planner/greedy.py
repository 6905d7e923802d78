"""The paper's planner: move what frees the most critical memory per second of transfer.

Steps, with the paper's section where it has one; *addition* marks what it leaves open:

1. Candidates are the inactive periods of all storages that can leave (3.2), wrapping ones and tails
   included.
2. The cost of a period is its offload plus its prefetch time (3.3); addition: the prefetch alone
   where an earlier move of the same version has left a clean copy on the device.
3. Its benefit is the time integral of the critical pressure that it removes between the end of its
   offload and the start of its prefetch (3.3).
4. Both times come from the traffic planned so far: the earliest offload and the latest safe
   prefetch that the channels still allow on the ideal timeline (3.3).
5. It goes to an SSD; to the host if the SSDs are saturated in its window and the host budget allows
   (3.3). Addition: the host is also preferred where an SSD would give less than a share
   ("patience") of its benefit; the plan is made for each of ``PATIENCES`` (0 is the paper's rule).
6. The period with the highest benefit per cost is taken, its traffic booked, the pressure lowered,
   until no pressure is left or nothing helps (3.3). Benefits only fall, so a heap of stale values
   replaces sorting; ties go to the larger storage, then to the earlier after_kernel, then to the
   lower storage.
7. Addition, the fallback: remaining pressure is removed by further periods, longest first, to the
   tier with the smaller backlog, and the iteration waits for them. Judged both with the windows of
   step 4 and with the longest absences for the periods chosen before.
8. Addition, retiming: memory is given back as late and taken as early as the slack in index space
   allows; a period whose absence would fit into the slack stays. Judged with and without prefetches
   earlier than the channels need.

9. Addition: where the SSDs have write budgets that the plan breaks, all of it once more; what
   would write more than is left then goes elsewhere or stays, and a version has one device.

The simulator judges every variant, and the fastest plan is returned.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Moves, Plan
from teraio.errors import CapacityError
from teraio.planner.cost import excess_writes
from teraio.planner.greedy_search import GreedySearch, Selection
from teraio.planner.plan_building import build_plan
from teraio.traces.trace import Trace

_HOST_MARGINS = (1.0, 0.95, 0.85, 0.7)
"""Shares of the host budget to plan with, in turn, until packing leaves no hole too many."""

_CLOSE_TO_IDEAL = 1 + 1e-6


def plan_greedy(trace: Trace, hardware: Hardware, *, bandwidth_share: float = 1.0) -> Plan:
    """The fastest plan among the variants of steps 5, 7 and 8; see the module's text.

    ``hardware`` holds the budgets. ``bandwidth_share`` scales the rates that shape the plan, not
    those that predict it. Raises InfeasibleError that names the kernel if one needs more than the
    GPU has, CapacityError if the tiers are too small or the SSDs may not be written so much.
    """
    started = time.perf_counter()
    search = GreedySearch.begin(trace, hardware, bandwidth_share)
    options: dict[str, Any] = {"bandwidth_share": bandwidth_share}
    if search.fits_already:
        best = build_plan(trace, Moves.empty(), hardware, planner="greedy", options=options)
    else:
        best = _within_write_budgets(trace, hardware, search, options)
    seconds = time.perf_counter() - started
    return replace(best, metadata=replace(best.metadata, planning_seconds=seconds))


def _within_write_budgets(
    trace: Trace, hardware: Hardware, search: GreedySearch, options: dict[str, Any]
) -> Plan:
    """(9) Within them for the time that the plan takes, or failing that for the ideal one."""
    first = _best_variant(trace, hardware, search, options)
    excess = excess_writes(first)
    if excess is None:
        return first
    for seconds in (first.predicted_seconds, trace.ideal_seconds):
        limited = replace(search, write_seconds=seconds)
        try:
            plan = _best_variant(trace, hardware, limited, options)
        except CapacityError:
            continue
        if excess_writes(plan) is None:
            return plan
    raise excess.error("greedy")


def _best_variant(
    trace: Trace, hardware: Hardware, search: GreedySearch, options: dict[str, Any]
) -> Plan:
    best: tuple[Plan, Selection] | None = None
    error: CapacityError | None = None

    def build(selection: Selection, prefetch_early: bool) -> Plan:
        chosen = options | selection.options | {"prefetch_early": prefetch_early}
        moves = search.draft(selection, prefetch_early=prefetch_early)
        return build_plan(trace, moves, hardware, planner="greedy", options=chosen)

    for margin in _HOST_MARGINS:
        for patience in search.patiences:
            chosen = search.choose(patience, margin)
            for reading in chosen.readings:
                try:
                    selection = search.select(chosen, reading)
                    plan = build(selection, prefetch_early=True)
                except CapacityError as caught:
                    error = error or caught
                    continue
                if best is None or plan.predicted_seconds < best[0].predicted_seconds:
                    best = plan, selection
                if _is_ideal(plan):
                    return plan
        if best is not None:
            late = build(best[1], prefetch_early=False)
            return min(best[0], late, key=lambda plan: plan.predicted_seconds)
    assert error is not None, "every variant ends in a plan or in an error"
    raise error


def _is_ideal(plan: Plan) -> bool:
    return plan.predicted_seconds <= plan.ideal_seconds * _CLOSE_TO_IDEAL
