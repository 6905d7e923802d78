"""From chosen moves to a complete plan: slots, clean copies, the state at kernel 0, the account."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from teraio.contracts.hardware import HOST, Hardware, Ssd
from teraio.contracts.plan import (
    Accesses,
    Copies,
    Moves,
    Plan,
    PlanKernels,
    PlanMetadata,
    PlanStorages,
)
from teraio.contracts.table import MISSING, IntArray, TextArray
from teraio.errors import CapacityError, InputError
from teraio.planner.clean_copies import Chains, chain_moves
from teraio.planner.cost import tokens_of
from teraio.planner.drafts import ANY_SSD
from teraio.planner.residency import away_intervals, resident_bytes
from teraio.planner.slot_packing import align_up, pack_slots
from teraio.simulator import simulate
from teraio.traces.trace import Storages, Trace
from teraio.units import format_bytes


def build_plan(
    trace: Trace,
    moves: Moves,
    hardware: Hardware,
    *,
    planner: str,
    options: Mapping[str, Any] | None = None,
    planning_seconds: float = 0.0,
    predicted_seconds: float | None = None,
) -> Plan:
    """Complete a draft: any table of moves of which ``writes`` and offsets are not read.

    ``hardware`` holds the budgets (:meth:`Hardware.with_budgets`); a move of tier ``ssd`` may leave
    its device as ANY_SSD. Slots are packed, clean copies found, placement and copies at kernel 0
    listed, and the iteration time predicted by simulation unless ``predicted_seconds`` is given.
    Raises CapacityError if a tier has too little room, InputError for an unknown device.
    """
    rank = trace.metadata.rank
    moves, arena_bytes = complete_moves(
        moves, trace.storages, trace.accesses, trace.num_kernels, hardware, rank
    )
    storages, copies = state_at_cut(moves, trace.storages, trace.accesses, trace.num_kernels)
    metadata = replace(
        _metadata(trace, hardware, moves, arena_bytes),
        planner=planner,
        options=dict(options or {}),
        planning_seconds=planning_seconds,
        predicted_seconds=trace.ideal_seconds if predicted_seconds is None else predicted_seconds,
    )
    plan = Plan(
        moves=moves,
        kernels=_plan_kernels(trace),
        storages=storages,
        accesses=trace.accesses,
        copies=copies,
        metadata=metadata,
    )
    return plan if predicted_seconds is not None else predicted(plan, trace, hardware)


def _metadata(
    trace: Trace, hardware: Hardware, moves: Moves, arena_bytes: Mapping[str, int]
) -> PlanMetadata:
    """All that follows from the moves and their origin; planner and prediction are still open."""
    origin = trace.metadata
    resident = resident_bytes(
        trace.storages, trace.kernels.workspace_bytes, moves, trace.num_kernels
    )
    return PlanMetadata(
        trace_hash=trace.hash,
        hardware=hardware.to_toml(),
        planner="",
        gpu_memory_bytes=hardware.gpu_of_rank(origin.rank).memory_bytes,
        host_memory_bytes=hardware.host.memory_bytes,
        ideal_seconds=trace.ideal_seconds,
        predicted_seconds=trace.ideal_seconds,
        lower_bound_seconds=trace.ideal_seconds,
        bound_kind="ideal",
        peak_gpu_bytes=int(resident.max(initial=0)),
        peak_host_bytes=arena_bytes.get(HOST, 0),
        planning_seconds=0.0,
        arena_bytes=arena_bytes,
        ssd_bytes_written=_ssd_bytes_written(moves),
        rank=origin.rank,
        world_size=origin.world_size,
        device=origin.device,
        micro_batches=origin.micro_batches,
        optimizer_steps=origin.optimizer_steps,
        bucket_bytes=origin.bucket_bytes,
        gap_seconds=float(trace.kernels.gap_before_seconds.sum()),
        allocator_rounding_bytes=origin.allocator_rounding_bytes,
        tokens=tokens_of(trace),
    )


def predicted(plan: Plan, trace: Trace, hardware: Hardware) -> Plan:
    """The same plan with the iteration time that the simulator gives it."""
    seconds = simulate(trace, plan, hardware, record=False).iteration_seconds
    return replace(plan, metadata=replace(plan.metadata, predicted_seconds=seconds))


def plan_of_original(
    plan: Plan, original: Trace, transform: str, options: Mapping[str, Any] | None = None
) -> Plan:
    """A plan made for a transformed trace, as the plan for the ``original`` that users hold.

    It names the transform, its options, and hash and ideal of the original. Raises InputError for a
    plan that names a transform already.
    """
    if plan.metadata.transform is not None:
        raise InputError(
            f"transform: planner {plan.metadata.planner} applies {plan.metadata.transform} itself; "
            f"leave {transform} out"
        )
    metadata = replace(
        plan.metadata,
        transform=transform,
        transform_options=dict(options or {}),
        trace_hash=original.hash,
        ideal_seconds=original.ideal_seconds,
    )
    return replace(plan, metadata=metadata)


def rebuild_plan(plan: Plan, moves: Moves) -> Plan:
    """The plan with its table of moves edited, and all that depends on it computed again.

    Slots, clean copies, placement, copies, arenas, peaks and bytes written follow the new moves.
    The predicted seconds stay those of the old ones, since a plan holds no kernel durations.
    Raises CapacityError as :func:`build_plan` does.
    """
    num_kernels = len(plan.kernels)
    moves, arena_bytes = complete_moves(
        moves, plan.storages, plan.accesses, num_kernels, plan.hardware, plan.metadata.rank
    )
    storages, copies = state_at_cut(moves, plan.storages, plan.accesses, num_kernels)
    peak_bytes = resident_bytes(plan.storages, plan.kernels.workspace_bytes, moves, num_kernels)
    metadata = replace(
        plan.metadata,
        arena_bytes=arena_bytes,
        ssd_bytes_written=_ssd_bytes_written(moves),
        peak_gpu_bytes=int(peak_bytes.max(initial=0)),
        peak_host_bytes=arena_bytes.get(HOST, 0),
    )
    return replace(plan, moves=moves, storages=storages, copies=copies, metadata=metadata)


def complete_moves(
    moves: Moves,
    storages: Storages | PlanStorages,
    accesses: Accesses,
    num_kernels: int,
    hardware: Hardware,
    rank: int,
) -> tuple[Moves, dict[str, int]]:
    """Moves with devices, ``writes`` and offsets set, and the arena's bytes per device.

    The host arena includes the bounce buffers of SSDs in use without GPUDirect Storage. Raises
    CapacityError that names the device.
    """
    ssds = {ssd.name: ssd for ssd in hardware.ssds_of_rank(rank)}
    moves = replace(moves, device=_resolve_devices(moves, list(ssds.values())))
    chains = chain_moves(moves, storages, accesses, num_kernels)
    offsets = np.zeros(len(chains.storage), dtype=np.int64)
    arena_bytes: dict[str, int] = {}
    for device in sorted(set(moves.device.tolist())):
        on_device = np.flatnonzero(chains.device == device)
        sizes = align_up(
            storages.nbytes[chains.storage[on_device]], hardware.alignment_bytes(device)
        )
        end = np.where(chains.is_permanent, chains.first_kernel + num_kernels, chains.end_kernel)[
            on_device
        ]
        offsets[on_device] = pack_slots(chains.first_kernel[on_device], end, sizes, num_kernels)
        arena_bytes[device] = int((offsets[on_device] + sizes).max(initial=0))
    bounce_bytes = sum(ssds[d].bounce_bytes for d in arena_bytes if d != HOST and not ssds[d].gds)
    if bounce_bytes:
        arena_bytes[HOST] = arena_bytes.get(HOST, 0) + bounce_bytes
    _check_capacity(arena_bytes, hardware)
    moves = replace(moves, writes=chains.writes, tier_offset_bytes=offsets[chains.chain])
    return moves, arena_bytes


def _resolve_devices(moves: Moves, ssds: list[Ssd]) -> TextArray:
    """Devices with ANY_SSD replaced: storage by storage, the SSD with the smaller backlog."""
    device = moves.device.copy()
    is_open = (moves.tier == "ssd") & (device == ANY_SSD)
    device[moves.tier == HOST] = HOST
    known = {HOST, *(ssd.name for ssd in ssds)}
    if is_open.any() and not ssds:
        raise InputError("moves.device: a move goes to an SSD, but this GPU reaches none")
    backlog_seconds = [0.0] * len(ssds)
    chosen: dict[int, int] = {}
    for row in np.flatnonzero(is_open):
        storage = int(moves.storage[row])
        if storage not in chosen:
            chosen[storage] = int(np.argmin(backlog_seconds))
        ssd = ssds[chosen[storage]]
        backlog_seconds[chosen[storage]] += moves.nbytes[row] * (
            1 / ssd.write_rate + 1 / ssd.read_rate
        )
        device[row] = ssd.name
    unknown = sorted(set(device.tolist()) - known)
    if unknown:
        raise InputError(f"moves.device: {unknown[0]!r} is not one of {sorted(known)}")
    return device


def _check_capacity(arena_bytes: Mapping[str, int], hardware: Hardware) -> None:
    capacity = {ssd.name: ssd.capacity_bytes for ssd in hardware.ssd}
    capacity[HOST] = hardware.host.memory_bytes
    for device, needed in arena_bytes.items():
        if needed > capacity[device]:
            raise CapacityError(
                f"{device}: the plan needs {needed} bytes ({format_bytes(needed)}) of it, "
                f"but {capacity[device]} are available"
            )


def state_at_cut(
    moves: Moves, storages: Storages | PlanStorages, accesses: Accesses, num_kernels: int
) -> tuple[PlanStorages, Copies]:
    """Where each storage is while kernel 0 runs, and the copies that will serve again."""
    away_start, away_end = away_intervals(moves, storages, num_kernels)
    away = np.flatnonzero((away_start <= num_kernels) & (num_kernels < away_end))
    placement = np.full(len(storages), "", dtype=object)
    span = (storages.death - storages.birth) % num_kernels
    alive = (storages.birth < 0) | ((-storages.birth) % num_kernels <= span)
    placement[alive] = "gpu"
    device = np.full(len(storages), "", dtype=object)
    offset = np.full(len(storages), MISSING, dtype=np.int64)
    placement[moves.storage[away]] = moves.tier[away]
    device[moves.storage[away]] = moves.device[away]
    offset[moves.storage[away]] = moves.tier_offset_bytes[away]
    rows = PlanStorages(
        storage=storages.storage,
        name=storages.name,
        kind=storages.kind,
        birth=storages.birth,
        birth_ordinal=storages.birth_ordinal,
        death=storages.death,
        nbytes=storages.nbytes,
        allocated_bytes=storages.allocated_bytes,
        placement=placement,
        device=device,
        tier_offset_bytes=offset,
    )
    chains = chain_moves(moves, storages, accesses, num_kernels)
    return rows, _copies_at_cut(moves, chains, rows, num_kernels)


def _copies_at_cut(moves: Moves, chains: Chains, rows: PlanStorages, num_kernels: int) -> Copies:
    """A copy is listed if it was begun before a cut and is still used by a move that leaves after.

    A move with free_by at the cut itself has left: the placement speaks for its copy, though not
    for another copy of the same storage elsewhere.
    """
    serves = chains.is_permanent.copy()
    for cut in (num_kernels, 2 * num_kernels):
        serves |= (chains.first_kernel < cut) & (cut < chains.last_free_by)
    row: IntArray = np.zeros(len(chains.storage), dtype=np.int64)
    row[chains.chain] = np.arange(len(moves))
    is_placement = (rows.device[chains.storage] == moves.device[row]) & (
        rows.tier_offset_bytes[chains.storage] == moves.tier_offset_bytes[row]
    )
    listed = np.flatnonzero(serves & ~is_placement)
    return Copies(
        storage=chains.storage[listed],
        tier=moves.tier[row[listed]],
        device=moves.device[row[listed]],
        tier_offset_bytes=moves.tier_offset_bytes[row[listed]],
    )


def _ssd_bytes_written(moves: Moves) -> dict[str, int]:
    """Bytes written per iteration, for each SSD in use."""
    is_ssd = moves.tier == "ssd"
    return {
        device: int(moves.nbytes[is_ssd & moves.writes & (moves.device == device)].sum())
        for device in sorted(set(moves.device[is_ssd].tolist()))
    }


def _plan_kernels(trace: Trace) -> PlanKernels:
    kernels = trace.kernels
    return PlanKernels(
        kernel=kernels.kernel,
        op=kernels.op,
        signature=kernels.signature,
        phase=kernels.phase,
        module=kernels.module,
        workspace_bytes=kernels.workspace_bytes,
    )
