"""A trace and its plan made smaller together: sizes, durations and budgets by one factor.

Rates stay as they are, so every transfer keeps its share of the iteration, and a plan for a GPU of
94 GB can be played where there are 2. What does not shrink is said by the simulated prediction of
the scaled plan: latencies, and the host's own time for each kernel.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from teraio.contracts.hardware import HOST, Hardware
from teraio.contracts.plan import Copies, Moves, Plan, PlanStorages
from teraio.contracts.table import IntArray
from teraio.traces.trace import Trace


def scaled_trace(trace: Trace, scale: float) -> Trace:
    """Sizes rounded up to whole bytes, and as the trace's allocator rounds."""
    if scale == 1.0:
        return trace
    kernels, storages, metadata = trace.kernels, trace.storages, trace.metadata
    rounding_bytes = metadata.allocator_rounding_bytes
    nbytes = _scaled(storages.nbytes, scale)
    allocated = np.maximum(_scaled(storages.allocated_bytes, scale), nbytes)
    return Trace(
        kernels=replace(
            kernels,
            duration_seconds=kernels.duration_seconds * scale,
            gap_before_seconds=kernels.gap_before_seconds * scale,
            workspace_bytes=_scaled(kernels.workspace_bytes, scale),
        ),
        storages=replace(
            storages, nbytes=nbytes, allocated_bytes=_round_up(allocated, rounding_bytes)
        ),
        accesses=trace.accesses,
        metadata=replace(metadata, dispatch_seconds=metadata.dispatch_seconds * scale),
        calls=trace.calls,
    )


def scaled_plan(plan: Plan, trace: Trace, scale: float) -> Plan:
    """The plan for the scaled ``trace``; slots that were disjoint are, and begin where they may.

    A GPU budget that was met still is: it gets room for the rounding of every storage.
    """
    if scale == 1.0:
        return plan
    places = _Places(plan, scale)
    nbytes, storages, metadata = trace.storages.nbytes, plan.storages, plan.metadata
    gpu_bytes = _budget(metadata.gpu_memory_bytes, scale)
    gpu_bytes += len(storages) * metadata.allocator_rounding_bytes
    host_bytes = max(_budget(metadata.host_memory_bytes, scale), places.arena_bytes.get(HOST, 0))
    hardware = plan.hardware.with_budgets(gpu_bytes, host_bytes)
    return replace(
        plan,
        moves=replace(
            plan.moves,
            nbytes=nbytes[plan.moves.storage],
            tier_offset_bytes=places.moved(plan.moves),
        ),
        kernels=replace(plan.kernels, workspace_bytes=trace.kernels.workspace_bytes),
        storages=replace(
            storages,
            nbytes=nbytes,
            allocated_bytes=trace.storages.allocated_bytes,
            tier_offset_bytes=places.moved(storages),
        ),
        copies=replace(plan.copies, tier_offset_bytes=places.moved(plan.copies)),
        metadata=replace(
            metadata,
            trace_hash=trace.hash,
            hardware=hardware.to_toml(),
            gpu_memory_bytes=gpu_bytes,
            host_memory_bytes=host_bytes,
            ideal_seconds=metadata.ideal_seconds * scale,
            gap_seconds=metadata.gap_seconds * scale,
            arena_bytes=places.arena_bytes,
        ),
    )


class _Places:
    """Where the bytes of each device go: cut at every border of a slot, each piece shrunk alone."""

    def __init__(self, plan: Plan, scale: float) -> None:
        hardware = plan.hardware
        self.arena_bytes: dict[str, int] = {}
        self._cuts: dict[str, tuple[IntArray, IntArray]] = {}
        for device in sorted({*plan.moves.device.tolist(), *plan.storages.device.tolist()} - {""}):
            alignment = hardware.alignment_bytes(device)
            cuts = _borders(plan, hardware, device)
            pieces = _round_up(_scaled(np.diff(cuts), scale), alignment)
            self._cuts[device] = cuts, np.r_[0, np.cumsum(pieces)].astype(np.int64)
            self.arena_bytes[device] = int(self._cuts[device][1][-1])
        # Bounce buffers stay as they are: they serve a transfer of any size.
        bounce_bytes = sum(
            ssd.bounce_bytes for ssd in hardware.ssd if ssd.name in self._cuts and not ssd.gds
        )
        if bounce_bytes:
            self.arena_bytes[HOST] = self.arena_bytes.get(HOST, 0) + bounce_bytes

    def moved(self, rows: Moves | PlanStorages | Copies) -> IntArray:
        """The offsets of a table, each where its bytes now lie."""
        offsets = rows.tier_offset_bytes.copy()
        for device, (cuts, places) in self._cuts.items():
            there = rows.device == device
            offsets[there] = places[np.searchsorted(cuts, offsets[there])]
        return offsets


def _borders(plan: Plan, hardware: Hardware, device: str) -> IntArray:
    borders = [np.zeros(1, dtype=np.int64)]
    for rows in (plan.moves, plan.storages, plan.copies):
        there = rows.device == device
        begin = rows.tier_offset_bytes[there]
        size = plan.storages.nbytes[rows.storage[there]]
        borders += [begin, begin + _round_up(size, hardware.alignment_bytes(device))]
    return np.unique(np.concatenate(borders))


def _scaled(values: IntArray, scale: float) -> IntArray:
    result: IntArray = np.ceil(values * scale).astype(np.int64)
    return result


def _budget(num_bytes: int, scale: float) -> int:
    return int(np.ceil(num_bytes * scale))


def _round_up(values: IntArray, multiple: int) -> IntArray:
    result: IntArray = -(-values // multiple) * multiple
    return result
