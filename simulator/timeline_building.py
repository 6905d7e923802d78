"""From the engine's sums and event rows to a Timeline: seconds, names, means over the cycle."""

from __future__ import annotations

import numpy as np

from teraio.contracts.table import MISSING, IntArray, TextArray
from teraio.contracts.timeline import Events, TimelineMetadata
from teraio.simulator.machine_arrays import Machine
from teraio.simulator.steady_state import Cycle
from teraio.units import PICOSECONDS_PER_SECOND

_WHAT = np.array(["kernel", "transfer", "stall", "memory"], dtype=object)
_CAUSE = np.array(
    ["read", "memory", "offload", "prefetch", "demand_fetch", "eviction", ""], dtype=object
)


def build_metadata(
    cycle: Cycle,
    machine: Machine,
    *,
    ideal_seconds: float,
    stall_host_seconds: float,
    host_arena_bytes: int,
    host_room_bytes: int,
    simulating_seconds: float,
) -> TimelineMetadata:
    """Means per iteration of the cycle; peaks are the highest in it."""
    accounts = np.concatenate([iteration.account for iteration in cycle.iterations])
    count = len(accounts)

    def mean_seconds(column: str) -> float:
        return int(accounts[column].sum()) / count / PICOSECONDS_PER_SECOND

    def mean_count(column: str) -> int:
        return round(int(accounts[column].sum()) / count)

    return TimelineMetadata(
        source="simulated",
        iteration_seconds=mean_seconds("iteration"),
        ideal_seconds=ideal_seconds,
        cycle_iterations=count,
        steady=cycle.is_steady,
        compute_alone_seconds=mean_seconds("alone"),
        compute_overlapped_seconds=mean_seconds("overlapped"),
        stall_read_seconds=mean_seconds("stall_read"),
        stall_memory_seconds=mean_seconds("stall_memory"),
        stall_host_seconds=stall_host_seconds,
        gap_seconds=mean_seconds("gap") - stall_host_seconds,
        peak_gpu_bytes=int(accounts["peak_bytes"].max()),
        peak_host_bytes=host_arena_bytes + _peak_overflow(cycle, host_room_bytes),
        capacity_bytes=machine.gpu_memory_bytes,
        channel_utilisation=_utilisation(cycle, machine, int(accounts["iteration"].sum())),
        channel_bytes=_channel_bytes(cycle, machine),
        demand_fetches=mean_count("demand_fetches"),
        demand_fetch_bytes=mean_count("demand_fetch_bytes"),
        evictions=mean_count("evictions"),
        eviction_bytes=mean_count("eviction_bytes"),
        cold_start_seconds=int(cycle.cold.account["iteration"][0]) / PICOSECONDS_PER_SECOND,
        simulating_seconds=simulating_seconds,
    )


def build_events(cycle: Cycle, machine: Machine, rank: int) -> Events:
    """Events of the cycle in order of their start; a transfer belongs to where it ends."""
    rows = np.concatenate([iteration.events for iteration in cycle.iterations])
    lengths = [len(iteration.events) for iteration in cycle.iterations]
    durations = [int(iteration.account["iteration"][0]) for iteration in cycle.iterations]
    iteration = np.repeat(np.arange(len(lengths)), lengths)
    origin = np.cumsum([0, *durations[:-1]])[iteration]
    start, end = rows["start"] + origin, rows["end"] + origin
    order = np.lexsort((rows["what"], start))
    channels = np.array([*machine.channel_names, ""], dtype=object)
    return Events(
        iteration=iteration[order],
        rank=np.full(len(rows), rank),
        what=_named(_WHAT, rows["what"][order]),
        kernel=rows["kernel"][order],
        storage=rows["storage"][order],
        channel=_named(channels, rows["channel"][order]),
        start_seconds=start[order] / PICOSECONDS_PER_SECOND,
        end_seconds=end[order] / PICOSECONDS_PER_SECOND,
        bytes=rows["nbytes"][order],
        cause=_named(_CAUSE, rows["cause"][order]),
    )


def _named(names: TextArray, codes: IntArray) -> TextArray:
    """Names by code; MISSING takes the last, which is empty."""
    result: TextArray = names[np.where(codes == MISSING, len(names) - 1, codes)]
    return result


def _peak_overflow(cycle: Cycle, host_room_bytes: int) -> int:
    lowest = [room for i in cycle.iterations if (room := i.lowest_host_room) is not None]
    return host_room_bytes - min(lowest) if lowest else 0


def _utilisation(cycle: Cycle, machine: Machine, total: int) -> dict[str, float]:
    busy = np.sum([iteration.busy for iteration in cycle.iterations], axis=0)
    return {
        name: int(busy[channel]) / total if total else 0.0
        for channel, name in enumerate(machine.channel_names)
    }


def _channel_bytes(cycle: Cycle, machine: Machine) -> dict[str, int]:
    moved = np.sum([iteration.moved_bytes for iteration in cycle.iterations], axis=0)
    return {
        name: round(int(moved[channel]) / len(cycle.iterations))
        for channel, name in enumerate(machine.channel_names)
    }
