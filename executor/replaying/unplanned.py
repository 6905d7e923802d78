"""The plan of no moves: a trace played on demand, by the same code that plays a plan."""

from __future__ import annotations

import numpy as np

from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Copies, Moves, Plan, PlanKernels, PlanMetadata, PlanStorages
from teraio.contracts.table import MISSING, TextArray
from teraio.traces.trace import Trace


def plan_without_moves(trace: Trace, hardware: Hardware) -> Plan:
    """Everything begins on the GPU as far as it fits; what lacks is fetched, what is too much goes.

    ``hardware`` holds the budgets. Nothing is predicted: the seconds are the ideal ones.
    """
    origin, kernels = trace.metadata, trace.kernels
    return Plan(
        moves=Moves.empty(),
        kernels=PlanKernels(
            kernel=kernels.kernel,
            op=kernels.op,
            signature=kernels.signature,
            phase=kernels.phase,
            module=kernels.module,
            workspace_bytes=kernels.workspace_bytes,
        ),
        storages=_all_on_gpu(trace),
        accesses=trace.accesses,
        copies=Copies.empty(),
        metadata=PlanMetadata(
            trace_hash=trace.hash,
            hardware=hardware.to_toml(),
            planner="on-demand",
            gpu_memory_bytes=hardware.gpu_of_rank(origin.rank).memory_bytes,
            host_memory_bytes=hardware.host.memory_bytes,
            ideal_seconds=trace.ideal_seconds,
            predicted_seconds=trace.ideal_seconds,
            lower_bound_seconds=trace.ideal_seconds,
            bound_kind="ideal",
            peak_gpu_bytes=trace.peak_allocated_bytes,
            peak_host_bytes=0,
            planning_seconds=0.0,
            rank=origin.rank,
            world_size=origin.world_size,
            device=origin.device,
            gap_seconds=float(kernels.gap_before_seconds.sum()),
            allocator_rounding_bytes=origin.allocator_rounding_bytes,
        ),
    )


def _all_on_gpu(trace: Trace) -> PlanStorages:
    storages = trace.storages
    is_alive = trace.is_persistent | (storages.birth == 0) | (storages.death < storages.birth)
    placement: TextArray = np.where(is_alive, "gpu", "").astype(object)
    return PlanStorages(
        storage=storages.storage,
        name=storages.name,
        kind=storages.kind,
        birth=storages.birth,
        birth_ordinal=storages.birth_ordinal,
        death=storages.death,
        nbytes=storages.nbytes,
        allocated_bytes=storages.allocated_bytes,
        placement=placement,
        device=np.full(len(storages), "", dtype=object),
        tier_offset_bytes=np.full(len(storages), MISSING, dtype=np.int64),
    )
