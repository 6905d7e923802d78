"""``teraio.simulate``: the iteration time of a plan on a machine, and every stall in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from teraio.contracts.hardware import HOST, Hardware, as_hardware
from teraio.contracts.plan import Plan
from teraio.contracts.table import MISSING
from teraio.contracts.timeline import Events, Timeline
from teraio.errors import CapacityError, InputError
from teraio.simulator.engine_setup import build_engine, host_stall_seconds, infeasible
from teraio.simulator.machine_arrays import Machine, machine_arrays
from teraio.simulator.page_setup import overflow_room, planned_arena_bytes
from teraio.simulator.state import NO_CAPACITY, NO_VICTIM, Engine
from teraio.simulator.steady_state import find_cycle
from teraio.simulator.timeline_building import build_events, build_metadata
from teraio.traces.trace import Trace, as_trace
from teraio.traces.transforms import trace_of_plan


def simulate(
    trace: Trace | str | Path,
    plan: Plan | str | Path | None = None,
    hardware: Hardware | str | Path | None = None,
    *,
    gpu_memory: int | str | None = None,
    host_memory: int | str | None = None,
    record: bool = True,
    max_iterations: int = 8,
    progress: Callable[[int], None] | None = None,
) -> Timeline:
    """Play a plan on a machine until the iterations repeat; the mean over the cycle is reported.

    Without a plan, storages are paged on demand: what is missing is fetched, and the storage whose
    next access is furthest makes room. So is a plan that does not fit the budget, as far as it does
    not fit. Budgets (bytes, or text such as ``94GB``) default to the plan's, then the hardware's;
    ``hardware`` defaults to the plan's. ``record=False`` leaves the events out. ``progress`` is
    called after each simulated iteration with their number.

    The clock is in whole picoseconds, and states at two cuts are compared bit by bit: ``steady`` is
    exact. If the state has not repeated after ``max_iterations``, ``steady`` is false and the
    second half of the iterations is reported. ``cold_start_seconds`` is the first iteration.
    ``dispatch_seconds`` of the trace come before every kernel and are stall_host.

    ``trace`` is the one recorded: if the plan names a transform, the transformed one is played,
    and ``ideal_seconds`` stay those of the recorded one.

    Raises InputError (an argument, or a plan of another trace), InfeasibleError (one kernel needs
    more than the GPU has) and CapacityError (no tier has room for what must leave the GPU).
    """
    begun = time.perf_counter()
    if (
        isinstance(max_iterations, bool)
        or not isinstance(max_iterations, int)
        or max_iterations < 1
    ):
        raise InputError(f"max_iterations: must be a positive integer, got {max_iterations!r}")
    trace = as_trace(trace)
    plan = Plan.load(plan) if isinstance(plan, str | Path) else plan
    played = trace if plan is None else trace_of_plan(trace, plan)
    rank = trace.metadata.rank if plan is None else plan.metadata.rank
    machine = _machine(plan, hardware, gpu_memory, host_memory, rank)
    engine = build_engine(played, plan, machine, record=record)
    cycle = find_cycle(engine, max_iterations, partial(failure_of, played, machine), progress)
    host_room_bytes = int(overflow_room(plan, machine)[0])
    events = build_events(cycle, machine, rank) if record else Events.empty()
    metadata = build_metadata(
        cycle,
        machine,
        ideal_seconds=trace.ideal_seconds,
        stall_host_seconds=played.num_kernels * host_stall_seconds(played, plan),
        host_arena_bytes=0 if plan is None else planned_arena_bytes(plan, HOST),
        host_room_bytes=host_room_bytes,
        simulating_seconds=time.perf_counter() - begun,
    )
    return Timeline(events=events, metadata=metadata)


def _machine(
    plan: Plan | None,
    hardware: Hardware | str | Path | None,
    gpu_memory: int | str | None,
    host_memory: int | str | None,
    rank: int,
) -> Machine:
    """The hardware with budgets: the arguments', else the plan's, else its own capacities."""
    if plan is not None:
        gpu_memory = plan.metadata.gpu_memory_bytes if gpu_memory is None else gpu_memory
        host_memory = plan.metadata.host_memory_bytes if host_memory is None else host_memory
        hardware = plan.hardware if hardware is None else hardware
    if hardware is None:
        raise InputError(
            "hardware: needed where there is no plan; a file or a preset such as paper"
        )
    return machine_arrays(as_hardware(hardware).with_budgets(gpu_memory, host_memory), rank)


def failure_of(trace: Trace, machine: Machine, engine: Engine, failure: int) -> Exception:
    """What stopped the engine, as an error that a user can act on."""
    stream = engine.stream[0]
    kernel, op = int(stream["current"]), trace.kernels.op[stream["current"]]
    if failure == NO_CAPACITY:
        storage = int(stream["last_left"])
        return CapacityError(
            f"kernel {kernel} ({op}): storage {storage} must leave the GPU "
            f"({trace.storages.nbytes[storage]} bytes), but none of {machine.devices} has room "
            "left; give more host memory or SSD capacity"
        )
    if failure == NO_VICTIM:
        return infeasible(trace, kernel, int(stream["held"]), int(stream["capacity"]))
    return InputError(
        f"plan: kernel {kernel} ({op}) waits for storage {_awaited(engine, kernel)}, for which "
        "nothing is under way; check the plan with teraio verify"
    )


def _awaited(engine: Engine, kernel: int) -> int:
    """A storage whose planned transfer a kernel still requires; MISSING if it is not planned."""
    for channel, required in zip(engine.channels, engine.required[kernel].tolist(), strict=True):
        if channel["served"] < required:
            position = (required - 1) % channel["num_entries"]
            return int(engine.entries["storage"][channel["first_entry"] + position])
    return MISSING
