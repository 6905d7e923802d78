"""The stress policy: everything leaves in every inactive period and returns at the last moment."""

from __future__ import annotations

import time
from typing import Literal

import numpy as np

from teraio.contracts.hardware import HOST, Hardware
from teraio.contracts.plan import Plan
from teraio.errors import InputError
from teraio.planner.drafts import ANY_SSD, draft_moves
from teraio.planner.plan_building import build_plan
from teraio.traces.lifetimes import inactive_periods
from teraio.traces.trace import Trace

Tiers = Literal["host", "ssd", "both"]


def evict_everything(
    trace: Trace,
    hardware: Hardware,
    *,
    minimum_bytes: int = 256,
    tiers: Tiers = "host",
    predicted_seconds: float | None = None,
) -> Plan:
    """Offload each resizable storage of at least ``minimum_bytes`` in each of its inactive periods.

    Tails and periods that wrap into the next iteration included. The offload is issued at once,
    memory is given back before the next kernel, and the prefetch starts at the kernel that needs
    it, so that every transfer stalls: a test of correctness, not a way to train. ``both`` sends
    storages to host and SSD in turn. Raises InputError and CapacityError as ``build_plan`` does.
    """
    if tiers not in ("host", "ssd", "both"):
        raise InputError(f"tiers: must be host, ssd or both, got {tiers!r}")
    started = time.perf_counter()
    periods = inactive_periods(trace)
    storages = trace.storages
    rows = np.flatnonzero(
        storages.resizable[periods.storage]
        & (storages.nbytes[periods.storage] >= max(1, minimum_bytes))
    )
    # By storage, not by period: a copy serves later periods only on the same device.
    to_host = np.full(len(rows), tiers == "host")
    if tiers == "both":
        to_host = periods.storage[rows] % 2 == 0
    after = periods.after_kernel[rows]
    moves = draft_moves(
        trace,
        periods,
        rows,
        offload_start=after,
        free_by=after + 1,
        prefetch_start=periods.end_kernel[rows],
        device=np.where(to_host, HOST, ANY_SSD),
    )
    return build_plan(
        trace,
        moves,
        hardware,
        planner="evict-everything",
        options={"minimum_bytes": minimum_bytes, "tiers": tiers},
        planning_seconds=time.perf_counter() - started,
        predicted_seconds=predicted_seconds,
    )
