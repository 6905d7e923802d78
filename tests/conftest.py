"""Values that tests of several folders share: one small machine, trace and plan, made by hand."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import Any

# Test workers share the cores: threads of torch that wait for each other made them five times
# slower. Read when torch is imported, also by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What PyTorch asks of matrix products on a GPU that must be repeatable to the bit.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import numpy as np
import pytest

from teraio.contracts.hardware import Gpu, Hardware, Host, Link, Ssd
from teraio.contracts.plan import (
    Accesses,
    Copies,
    Moves,
    Plan,
    PlanKernels,
    PlanMetadata,
    PlanStorages,
)
from teraio.contracts.table import MISSING
from teraio.traces.trace import Kernels, Storages, Trace, TraceMetadata

KB = 1000
SHARED_DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked ``gpu`` are skipped where there is none."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real traces beside the checkout; skips the test where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip("the folder shared/data is not beside this checkout")
    return SHARED_DATA


@pytest.fixture
def allocator_sees_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a store's thread was the last to hold goes back in the thread that trains, where
    its death is booked: torch's profiler does not report what other threads free.
    """
    from teraio.executor.residency import Residency
    from teraio.executor.stores.queues import ThreadTransfer

    held: deque[Any] = deque()
    finish, bury = ThreadTransfer.finish, Residency.bury

    def finish_and_hold(transfer: ThreadTransfer, error: Any) -> None:
        held.append(transfer._buffer)
        finish(transfer, error)

    def let_go_and_bury(residency: Residency) -> None:
        held.clear()
        bury(residency)

    monkeypatch.setattr(ThreadTransfer, "finish", finish_and_hold)
    monkeypatch.setattr(Residency, "bury", let_go_and_bury)


@pytest.fixture(scope="session")
def small_hardware() -> Hardware:
    """Two GPUs; ``near`` bounces and serves both, ``far`` is reached by GPU 1 only."""
    return Hardware(
        name="small",
        gpu=(
            Gpu(name="gpu 0", memory_bytes=20 * KB, link="pcie"),
            Gpu(name="gpu 1", memory_bytes=20 * KB, link="pcie"),
        ),
        link=(Link(name="pcie", read_rate=4e6, write_rate=4e6, latency_seconds=1e-4),),
        host=Host(memory_bytes=100 * KB, read_rate=4e6, write_rate=4e6, memory_rate=20e6),
        ssd=(
            Ssd(
                name="near",
                read_rate=2e6,
                write_rate=1.5e6,
                duplex_read_rate=1e6,
                duplex_write_rate=1e6,
                latency_seconds=2e-4,
                capacity_bytes=1000 * KB,
                bounce_bytes=8192,
            ),
            Ssd(
                name="far",
                read_rate=2e6,
                write_rate=2e6,
                capacity_bytes=1000 * KB,
                gpus=(1,),
                gds=True,
            ),
        ),
    )


@pytest.fixture(scope="session")
def small_trace() -> Trace:
    """Eight kernels, seven storages: every kind of inactive period occurs.

    ``frozen`` is never written; ``weight`` is written once and read by three kernels; ``state`` is
    accessed once; ``wrapping`` lives over the cut; ``logits`` has a tail that wraps; ``fixed``
    cannot be given back.
    """
    ops = ["zero", "mm", "add", "relu", "loss", "mul", "mm_backward", "step"]
    not_collective = (None, None, None)
    kernels = Kernels.from_rows(
        [
            (k, f"aten.{op}", "model", "forward", 0, 1e-3, 1e-4, 64, 100 + k, 0, *not_collective)
            for k, op in enumerate(ops)
        ]
    )
    storages = Storages.from_rows(
        [
            (0, 1000, 1024, "parameter", "frozen", None, None, None, "float32", True),
            (1, 2000, 2048, "parameter", "weight", None, None, None, "float32", True),
            (2, 3000, 3072, "optimizer_state", "state", None, None, None, "float32", True),
            (3, 4000, 4096, "activation", "hidden", 3, 0, 6, "float32", True),
            (4, 4000, 4096, "activation", "wrapping", 5, 0, 3, "float32", True),
            (5, 500, 512, "activation", "logits", 3, 1, 1, "float32", True),
            (6, 100, 512, "buffer", "fixed", None, None, None, "float32", False),
        ]
    )
    accesses = Accesses.from_rows(
        [
            (1, 0, True, False),
            (1, 1, True, False),
            (3, 3, False, True),
            (3, 4, True, False),
            (3, 5, False, True),
            (4, 1, True, False),
            (4, 5, True, False),
            (5, 0, True, False),
            (5, 4, False, True),
            (6, 2, True, True),
            (6, 3, True, False),
            (6, 6, True, False),
            (7, 1, True, True),
        ]
    )
    metadata = TraceMetadata(source="measured", model="small", allocator_rounding_bytes=512)
    return Trace(kernels=kernels, storages=storages, accesses=accesses, metadata=metadata)


@pytest.fixture(scope="session")
def small_plan(small_trace: Trace, small_hardware: Hardware) -> Plan:
    """A right plan for the small trace, whose budget holds to the byte.

    Away per kernel: frozen 6 7 0, weight 0 2 3 5 6, state 0..4 and 7, hidden 4 5, wrapping 1 2,
    logits 6 7 0 1. The slot of hidden [3, 6) and that of wrapping [6, 3 + 8) are the same bytes.
    """
    moves = [
        # storage, after, before, offload_start, free_by, prefetch_start, tier, device, offset,
        # nbytes, writes
        (0, 5, 1, 5, 6, 1, "host", "host", 0, 1000, False),
        (1, 7, 1, 7, 0, 1, "host", "host", 1024, 2000, True),
        (1, 1, 4, 1, 2, 4, "host", "host", 1024, 2000, False),
        (1, 4, 7, 4, 5, 7, "host", "host", 1024, 2000, False),
        (2, 6, 6, 6, 7, 5, "ssd", "near", 0, 3000, True),
        (3, 3, 6, 3, 4, 6, "ssd", "near", 4096, 4000, True),
        (4, 5, 3, 6, 1, 3, "ssd", "near", 4096, 4000, True),
        (5, 4, None, 4, 6, None, "host", "host", 3072, 500, True),
    ]
    places = {
        0: ("host", "host", 0),
        1: ("host", "host", 1024),
        2: ("ssd", "near", 0),
        3: ("", "", MISSING),
        4: ("gpu", "", MISSING),
        5: ("host", "host", 3072),
        6: ("gpu", "", MISSING),
    }
    s, k = small_trace.storages, small_trace.kernels
    storages = PlanStorages(
        storage=s.storage,
        name=s.name,
        kind=s.kind,
        birth=s.birth,
        birth_ordinal=s.birth_ordinal,
        death=s.death,
        nbytes=s.nbytes,
        allocated_bytes=s.allocated_bytes,
        placement=np.array([place[0] for place in places.values()], dtype=object),
        device=np.array([place[1] for place in places.values()], dtype=object),
        tier_offset_bytes=np.array([place[2] for place in places.values()]),
    )
    kernels = PlanKernels(k.kernel, k.op, k.signature, k.phase, k.module, k.workspace_bytes)
    return Plan(
        moves=Moves.from_rows(moves),
        kernels=kernels,
        storages=storages,
        accesses=small_trace.accesses,
        copies=Copies.from_rows([(4, "ssd", "near", 4096)]),
        metadata=PlanMetadata(
            trace_hash=small_trace.hash,
            hardware=small_hardware.to_toml(),
            planner="by hand",
            gpu_memory_bytes=SMALL_PLAN_PEAK_BYTES,
            host_memory_bytes=12 * KB,
            ideal_seconds=small_trace.ideal_seconds,
            predicted_seconds=15e-3,
            lower_bound_seconds=small_trace.ideal_seconds,
            bound_kind="ideal",
            peak_gpu_bytes=SMALL_PLAN_PEAK_BYTES,
            peak_host_bytes=3584 + 8192,
            planning_seconds=0.0,
            arena_bytes={"host": 3584 + 8192, "near": 8192},
            ssd_bytes_written={"near": 11000},
            allocator_rounding_bytes=512,
        ),
    )


# Kernel 6 holds state 3072, hidden 4096, wrapping 4096, fixed 512 and 64 of workspace.
SMALL_PLAN_PEAK_BYTES = 3072 + 4096 + 4096 + 512 + 64
