"""The front door of planning: a planner by name, its plan verified before it is returned."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from teraio.contracts.hardware import Hardware, as_hardware
from teraio.contracts.plan import Moves, Plan
from teraio.errors import InputError
from teraio.planner.cost import check_endurance
from teraio.planner.fluid.bound import lower_bound
from teraio.planner.greedy import plan_greedy
from teraio.planner.milp.exact import plan_milp
from teraio.planner.optimal.optimal import plan_optimal
from teraio.planner.plan_building import build_plan, plan_of_original
from teraio.planner.policies.paging import with_paged_account
from teraio.planner.policies.registry import PAGED_POLICIES, POLICIES, Policy
from teraio.planner.verifier import verify
from teraio.traces.trace import Trace, as_trace
from teraio.traces.transforms import trace_of_plan, transform_trace

Planner = Callable[[Trace, Hardware, float, float | None], Plan]
"""Takes the trace, the hardware with budgets, the bandwidth share and the time limit in seconds."""

Progress = Callable[[str], None]
"""Told in a few words what a planner is doing."""

_SEARCH_SHARE = 0.8
_AT_IDEAL = 1 + 1e-9
_LEAST_BOUND_SHARE = 0.2
"""Of a time limit: what the search may use, and what the bound gets at least."""


def plan(
    trace: Trace | str | Path,
    hardware: Hardware | str | Path,
    *,
    planner: str = "optimal",
    gpu_memory: int | str | None = None,
    host_memory: int | str | None = None,
    bandwidth_share: float = 1.0,
    ssd_years: float | None = None,
    transform: str | None = None,
    time_limit: float | None = None,
    start: Plan | str | Path | None = None,
    bound: bool | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Decide which storages leave the GPU when, so that the iteration fits and waits least.

    ``trace`` and ``hardware`` are values, paths or a preset's name. ``gpu_memory`` and
    ``host_memory`` are final budgets (bytes or text such as ``94GB``) in place of the hardware's.
    ``bandwidth_share`` plans for that share of the rates; the prediction uses all of them.
    ``ssd_years`` lets the plan write so little to each SSD that it lasts that long in training
    without a pause (:meth:`Hardware.with_budgets`); optimal, greedy and milp plan for it, of
    other planners a plan that writes more is refused.
    ``transform`` changes the trace before planning (``teraio.traces.transforms``): the plan names
    it, is about the result, and refers to ``trace`` by hash and ideal.
    ``time_limit`` in seconds is for planners that search: they return the best plan found by then,
    and at least their first one. ``start`` is an earlier plan of the same trace, from which planner
    optimal plans for other budgets in a fraction of the time. ``bound`` proves how fast any plan
    could be (:func:`lower_bound`) and keeps it in the plan, which is the same with and without;
    planner optimal does so unless told not to, in what its search has left of the time limit.

    Raises InputError for wrong arguments, InfeasibleError if one kernel needs more than the GPU
    has, CapacityError if the tiers are too small or the SSDs must be written more than they may be
    (naming the SSD, needed and allowed bytes), RuntimeError if the planner made a plan that the
    independent verifier refuses (a defect, never the user's).
    """
    bound = planner == "optimal" if bound is None else bound
    _check_arguments(planner, bandwidth_share, time_limit, start, bound)
    trace = as_trace(trace)
    budgeted = as_hardware(hardware).with_budgets(gpu_memory, host_memory, ssd_years)
    report = progress or _silent
    report(f"planning ({planner})")
    started = time.monotonic()
    transformed = trace if transform is None else transform_trace(trace, transform)
    make = PLANNERS[planner] if start is None else _starting_from(start)
    result = make(transformed, budgeted, bandwidth_share, time_limit)
    if transform is not None:
        result = plan_of_original(result, trace, transform)
    check_endurance(result)
    if bound:
        report("bounding")
        left = _left_of(time_limit, started)
        result = _with_bound(trace_of_plan(trace, result), result, left)
    report("verifying")
    _check_plan(trace, result, planner)
    return result


def _check_arguments(
    planner: str,
    share: float,
    time_limit: float | None,
    start: Plan | str | Path | None,
    bound: bool,
) -> None:
    if planner not in PLANNERS:
        raise InputError(f"planner: {planner!r} is not one of {sorted(PLANNERS)}")
    if not 0 < share <= 1:
        raise InputError(f"bandwidth_share: must be above 0 and at most 1, got {share}")
    if time_limit is not None and time_limit <= 0:
        raise InputError(f"time_limit: must be above 0 seconds, got {time_limit}")
    if start is not None and planner != "optimal":
        raise InputError(f"start: only planner optimal starts from a plan, not {planner}")
    if bound and planner in _MAY_NOT_FIT:
        raise InputError(f"bound: holds for plans that fit, which {planner} need not; leave it out")


def _check_plan(trace: Trace, made: Plan, planner: str) -> None:
    """Raise RuntimeError for a plan that the independent verifier refuses."""
    verification = verify(trace, made)
    must_fit = planner not in _MAY_NOT_FIT
    if not verification.valid or (must_fit and not verification.fits):
        violation = verification.violations[0] if verification.violations else "no reason given"
        raise RuntimeError(f"planner {planner} made a plan that does not verify: {violation}")


def _left_of(time_limit: float | None, started: float) -> float | None:
    """Seconds for the bound, of a limit that began at ``started``."""
    if time_limit is None:
        return None
    return max(time_limit - (time.monotonic() - started), _LEAST_BOUND_SHARE * time_limit)


def _with_bound(trace: Trace, made: Plan, time_limit: float | None) -> Plan:
    """The plan with the bound on any plan for its hardware and budgets, at full rates."""
    if made.predicted_seconds <= trace.ideal_seconds * _AT_IDEAL:
        return made  # Its bound is the ideal, and nothing would make it faster.
    found = lower_bound(trace, made.hardware, time_limit=time_limit)
    metadata = replace(
        made.metadata,
        lower_bound_seconds=found.seconds,
        bound_kind=found.kind,
        bound_seconds=found.solving_seconds,
        value_of_gb=dict(found.value_of_gb),
        value_of_gb_per_second=dict(found.value_of_gb_per_second),
    )
    return replace(made, metadata=metadata)


def _silent(_: str) -> None:
    """Progress that nobody asked for."""


def _greedy(trace: Trace, hardware: Hardware, bandwidth_share: float, _: float | None) -> Plan:
    return plan_greedy(trace, hardware, bandwidth_share=bandwidth_share)


def _starting_from(start: Plan | str | Path) -> Planner:
    """Planner optimal with an earlier plan to begin with."""
    earlier = start if isinstance(start, Plan) else Plan.load(start)
    return lambda trace, hardware, share, limit: _optimal(trace, hardware, share, limit, earlier)


def _optimal(
    trace: Trace,
    hardware: Hardware,
    share: float,
    time_limit: float | None,
    start: Plan | None = None,
) -> Plan:
    search_limit = None if time_limit is None else _SEARCH_SHARE * time_limit
    return plan_optimal(
        trace, hardware, time_limit=search_limit, bandwidth_share=share, start=start
    )


def _milp(trace: Trace, hardware: Hardware, share: float, time_limit: float | None) -> Plan:
    return plan_milp(trace, hardware, time_limit=time_limit, bandwidth_share=share)


def _ideal(trace: Trace, hardware: Hardware, bandwidth_share: float, _: float | None) -> Plan:
    """No moves, and a GPU that holds everything."""
    unlimited = hardware.with_budgets(gpu_memory=trace.peak_allocated_bytes)
    return _without_moves(trace, unlimited, planner="ideal")


def _on_demand(trace: Trace, hardware: Hardware, bandwidth_share: float, _: float | None) -> Plan:
    """No moves under the real budget: what does not fit is evicted and fetched as it is needed."""
    made = _without_moves(trace, hardware, planner="on-demand")
    return with_paged_account(made, trace, hardware)


def _without_moves(trace: Trace, hardware: Hardware, **keywords: Any) -> Plan:
    started = time.perf_counter()
    result = build_plan(trace, Moves.empty(), hardware, **keywords)
    seconds = time.perf_counter() - started
    return replace(result, metadata=replace(result.metadata, planning_seconds=seconds))


def _from_policy(make: Policy) -> Planner:
    """A policy as one of :data:`PLANNERS`."""
    return lambda trace, hardware, share, _: make(trace, hardware, bandwidth_share=share)


PLANNERS: MappingProxyType[str, Planner] = MappingProxyType(
    {
        "optimal": lambda trace, hardware, share, limit: _optimal(trace, hardware, share, limit),
        "greedy": _greedy,
        "milp": _milp,
        "ideal": _ideal,
        "on-demand": _on_demand,
    }
    | {name: _from_policy(policy) for name, policy in POLICIES.items()}
)
"""Planners by name."""

_MAY_NOT_FIT = frozenset({"on-demand"}) | PAGED_POLICIES
