"""What a replay plays: a plan and the trace that it is about, at the scale that was asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from teraio.contracts.hardware import Hardware, Slowdown, as_hardware
from teraio.contracts.plan import Plan
from teraio.contracts.plan_checks import find_violations
from teraio.contracts.timeline import Timeline
from teraio.errors import InputError
from teraio.executor.replaying.scaling import scaled_plan, scaled_trace
from teraio.executor.replaying.unplanned import plan_without_moves
from teraio.simulator import simulate
from teraio.traces.trace import Trace
from teraio.traces.transforms import trace_of_plan

Memory = int | str | None
"""A budget: bytes, or text such as ``94GB``; None for the plan's."""


class Scene(NamedTuple):
    """A trace, and a plan about it that names no transform; whether the plan fits its budgets, and
    whether it was given: else it has no moves.
    """

    trace: Trace
    plan: Plan
    fits: bool
    is_planned: bool

    def predicted(
        self, hardware: Hardware | str | Path | None, *, has_memory_traffic: bool
    ) -> Timeline:
        """What the simulator says, without events; ``hardware``: another than the plan's.

        Stand-in kernels that move no memory are not slowed down by transfers. Raises CapacityError
        and InfeasibleError.
        """
        rates = self.plan.hardware if hardware is None else as_hardware(hardware)
        metadata = self.plan.metadata
        machine = rates.with_budgets(metadata.gpu_memory_bytes, metadata.host_memory_bytes)
        if not has_memory_traffic:
            machine = replace(machine, slowdown=Slowdown())
        plan = self.plan if self.is_planned else None
        return simulate(self.trace, plan, machine, record=False)


def make_scene(
    trace: Trace,
    plan: Plan | None,
    hardware: Hardware | str | Path | None,
    gpu_memory: Memory,
    host_memory: Memory,
    scale: float,
) -> Scene:
    """A given plan, or paging on demand over the tiers of ``hardware``; ``trace``: as recorded.

    Raises InputError for a plan of another trace, for one whose structure is wrong, and where there
    is neither plan nor hardware.
    """
    if plan is not None:
        played, whole, fits = _planned(trace, plan, gpu_memory, host_memory)
    elif hardware is not None:
        machine = as_hardware(hardware).with_budgets(gpu_memory, host_memory)
        played, whole, fits = trace, plan_without_moves(trace, machine), False
    else:
        raise InputError("hardware: needed where there is no plan; a file or a preset")
    smaller = scaled_trace(played, scale)
    smaller_plan = scaled_plan(whole, smaller, scale)
    return Scene(smaller, smaller_plan, fits, is_planned=plan is not None)


def _planned(
    trace: Trace, plan: Plan, gpu_memory: Memory, host_memory: Memory
) -> tuple[Trace, Plan, bool]:
    """The trace that the plan is about, the plan without its transform, whether it fits."""
    if plan.metadata.trace_hash != trace.hash:
        raise InputError(
            "plan: made for another trace (their hashes differ); replay it with its own, or plan "
            "this trace"
        )
    plan = _under_budgets(plan, gpu_memory, host_memory)
    verdict = find_violations(plan).verification()
    if not verdict.valid:
        first = verdict.violations[0]
        raise InputError(f"plan: {first} ({verdict.num_violations} violations; not replayed)")
    played = trace_of_plan(trace, plan)
    metadata = replace(plan.metadata, transform=None, transform_options={}, trace_hash=played.hash)
    return played, replace(plan, metadata=metadata), verdict.fits


def _under_budgets(plan: Plan, gpu_memory: Memory, host_memory: Memory) -> Plan:
    metadata = plan.metadata
    machine = plan.hardware.with_budgets(
        metadata.gpu_memory_bytes if gpu_memory is None else gpu_memory,
        metadata.host_memory_bytes if host_memory is None else host_memory,
    )
    metadata = replace(
        metadata,
        hardware=machine.to_toml(),
        gpu_memory_bytes=machine.gpu_of_rank(metadata.rank).memory_bytes,
        host_memory_bytes=machine.host.memory_bytes,
    )
    return replace(plan, metadata=metadata)
