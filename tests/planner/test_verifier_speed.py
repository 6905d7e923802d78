"""The verifier keeps up with the largest traces."""

from __future__ import annotations

import time

import numpy as np

from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import (
    Accesses,
    Copies,
    Moves,
    Plan,
    PlanKernels,
    PlanMetadata,
    PlanStorages,
)
from teraio.contracts.plan_checks import check_plan
from teraio.contracts.table import MISSING

NUM_KERNELS = 100_000


def nested_plan(num_kernels: int) -> Plan:
    """Two storages per forward kernel, read again in backward, nested; nearly all leave between."""
    num_storages = num_kernels
    storage = np.arange(num_storages)
    forward, backward = storage // 2, num_kernels - 1 - storage // 2
    sizes = np.random.default_rng(0).integers(1, 2**24, num_storages)
    ends = np.cumsum(-(-sizes // 4096) * 4096)
    moved = storage[backward - forward > 3]
    moves = Moves(
        storage=moved,
        after_kernel=forward[moved],
        before_kernel=backward[moved],
        offload_start=forward[moved],
        free_by=forward[moved] + 1,
        prefetch_start=backward[moved] - 1,
        tier=np.full(len(moved), "ssd", dtype=object),
        device=np.full(len(moved), "ssd0", dtype=object),
        tier_offset_bytes=np.r_[0, ends[:-1]][moved],
        nbytes=sizes[moved],
        writes=np.ones(len(moved), dtype=bool),
    )
    nowhere = np.full(num_storages, MISSING)
    storages = PlanStorages(
        storage=storage,
        name=np.array([f"s{s}" for s in storage], dtype=object),
        kind=np.full(num_storages, "parameter", dtype=object),
        birth=nowhere,
        birth_ordinal=nowhere,
        death=nowhere,
        nbytes=sizes,
        allocated_bytes=sizes,
        placement=np.full(num_storages, "gpu", dtype=object),
        device=np.full(num_storages, "", dtype=object),
        tier_offset_bytes=nowhere,
    )
    kernel = np.r_[forward, backward]
    order = np.argsort(kernel, kind="stable")
    is_write = (kernel >= num_kernels // 2)[order]
    accesses = Accesses(kernel[order], np.r_[storage, storage][order], ~is_write, is_write)
    kernels = PlanKernels(
        kernel=np.arange(num_kernels),
        op=np.full(num_kernels, "aten.mm.default", dtype=object),
        signature=np.zeros(num_kernels, dtype=np.int64),
        phase=np.full(num_kernels, "forward", dtype=object),
        module=np.full(num_kernels, "", dtype=object),
        workspace_bytes=np.zeros(num_kernels, dtype=np.int64),
    )
    metadata = PlanMetadata(
        trace_hash="",
        hardware=Hardware.preset("paper").to_toml(),
        planner="nested",
        gpu_memory_bytes=2**60,
        host_memory_bytes=0,
        ideal_seconds=0.0,
        predicted_seconds=0.0,
        lower_bound_seconds=0.0,
        bound_kind="ideal",
        peak_gpu_bytes=0,
        peak_host_bytes=0,
        planning_seconds=0.0,
        arena_bytes={"ssd0": int(ends[-1])},
    )
    return Plan(moves, kernels, storages, accesses, Copies.empty(), metadata)


def test_a_hundred_thousand_kernels_and_moves_take_seconds() -> None:
    plan = nested_plan(NUM_KERNELS)
    assert len(plan.moves) > 0.99 * NUM_KERNELS
    start = time.process_time()
    violations = check_plan(plan)
    seconds = time.process_time() - start
    assert violations == []
    assert seconds < 5, "half a second on an idle core"
