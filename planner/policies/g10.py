"""G10: periods by the pressure that they relieve, SSD first, then host, fetched back eagerly.

Source: G10 (MICRO 2023), its smart tensor migrations, and its artifact (platformxlab/G10 at
de2c8c6, function ``scheduling_prefetch``), whose constants are used.

Modelled:

1. Candidates are inactive periods between two accesses; memory is freed at death by itself. The
   target is 99 % of the GPU.
2. Again and again the period of the highest benefit is taken: its bytes, times the time above
   capacity from when half of them can be written until half must come back, at what bandwidth is
   left. There is no division by cost: that is the later paper's (:mod:`teraio.planner.greedy`).
   Equal benefits: the larger bytes times seconds, then the earlier period.
3. A period must last 2.5 times one SSD transfer. Then it goes to the SSD, or to the host if the SSD
   can take nothing while the offload would run. A shorter one that lasts 2.5 times a host transfer
   goes to the host. Both transfers are booked; if they meet, the period stays. A weight's period
   over the end of the iteration goes to the SSD, is fetched 1.5 transfer times ahead, and books
   nothing (as in the artifact).
4. Then memory is given back as late as the target allows, since unified memory makes no kernel
   wait for an eviction whose room it does not need; and, in the order of their fetches, all are
   fetched as early as the target allows.

What it leaves above capacity is paged on demand (G10: unified memory), so a plan need not fit:
``evictions`` and ``demand_fetches`` of the simulation say how much. Evicted is the storage whose
next use is furthest, where unified memory evicts the oldest page: to G10's advantage. So are clean
copies, which it writes again.

Limits: whole storages, not pages; the planner of the artifact has its bandwidths 7 % too high
(GiB for GB) and its own rule for the SSD variants, hidden factors included: not modelled. Several
SSDs count as the first. Bins of time as in the greedy planner.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from teraio.contracts.hardware import HOST, Hardware
from teraio.contracts.plan import Moves, Plan
from teraio.contracts.table import IntArray
from teraio.errors import CapacityError
from teraio.planner.candidates import find_candidates
from teraio.planner.channel_reservations import open_reservations, time_bins
from teraio.planner.critical_pressure import open_pressure
from teraio.planner.drafts import draft_moves
from teraio.planner.greedy_choice import open_choice
from teraio.planner.greedy_search import MAX_BINS
from teraio.planner.plan_building import build_plan
from teraio.planner.policies.g10_choice import choose_like_g10
from teraio.planner.policies.paging import with_paged_account
from teraio.planner.residency import cyclic_sum, resident_bytes
from teraio.planner.retiming import Windows, grow_offloads, grow_prefetches, kernel_of_bin
from teraio.planner.slack_tree import slack_tree
from teraio.traces.lifetimes import InactivePeriods
from teraio.traces.trace import Trace

NAME = "g10"
_TARGET_SHARE = 0.99

_HOST_MARGINS = (1.0, 0.95, 0.85, 0.7)
"""Shares of the host budget to plan with, in turn, until packing leaves no hole too many."""


def plan_g10(trace: Trace, hardware: Hardware, *, bandwidth_share: float = 1.0) -> Plan:
    """The plan for ``trace``; ``hardware`` holds the budgets. It need not fit.

    ``bandwidth_share`` scales the rates that shape the plan. Raises CapacityError if paging finds
    no room in the tiers, InfeasibleError if one kernel needs more than the GPU has.
    """
    started = time.perf_counter()
    error: CapacityError | None = None
    for margin in _HOST_MARGINS:
        moves = _draft(trace, hardware, bandwidth_share, margin)
        try:
            made = build_plan(
                trace,
                moves,
                hardware,
                planner=NAME,
                options={"bandwidth_share": bandwidth_share},
            )
        except CapacityError as caught:
            error = error or caught
            continue
        if made.metadata.peak_gpu_bytes > made.metadata.gpu_memory_bytes:
            made = with_paged_account(made, trace, hardware)
        seconds = time.perf_counter() - started
        return replace(made, metadata=replace(made.metadata, planning_seconds=seconds))
    assert error is not None, "every margin ends in a plan or in an error"
    raise error


def _draft(trace: Trace, hardware: Hardware, bandwidth_share: float, host_margin: float) -> Moves:
    """Moves with a share of the host budget."""
    ssds = hardware.ssds_of_rank(trace.metadata.rank)[:1]
    host_bytes = int(host_margin * hardware.host.memory_bytes)
    machine = replace(hardware, ssd=ssds).with_budgets(host_memory=host_bytes)
    periods, rows, device, windows = _choose(trace, machine, bandwidth_share)
    return draft_moves(
        trace,
        periods,
        rows,
        offload_start=periods.after_kernel[rows],
        free_by=windows.free_by,
        prefetch_start=windows.prefetch_start,
        device=np.array([HOST, *(ssd.name for ssd in ssds)], dtype=object)[device],
    )


class _Choice(NamedTuple):
    """Rows of ``periods`` that leave, the device of each (0: host), and when they are away."""

    periods: InactivePeriods
    rows: IntArray
    device: IntArray
    windows: Windows


def _choose(trace: Trace, hardware: Hardware, bandwidth_share: float) -> _Choice:
    """(1 to 4), on a machine of one SSD at most."""
    rank = trace.metadata.rank
    capacity = hardware.gpu_of_rank(rank).memory_bytes
    bins = time_bins(trace, MAX_BINS)
    candidates, periods, rows = find_candidates(trace, bins, hardware)
    between = ~candidates["is_tail"]
    candidates, rows = candidates[between], rows[between]
    # Rows have changed, and siblings are not followed here.
    candidates["next_sibling"] = -1
    resident = resident_bytes(
        trace.storages, trace.kernels.workspace_bytes, Moves.empty(), trace.num_kernels
    )
    highest = np.maximum.reduceat(resident, bins.first_kernel[:-1])
    choice = open_choice(candidates, _room_bytes(hardware), len(bins.seconds))
    is_weight = trace.is_persistent[periods.storage[rows]]
    choose_like_g10(
        candidates,
        choice,
        open_reservations(bins, hardware, rank, bandwidth_share),
        open_pressure(highest - capacity, bins.seconds),
        int((1 - _TARGET_SHARE) * capacity),
        is_weight & (periods.end_kernel[rows] >= trace.num_kernels),
    )
    chosen = choice.chosen_rows()
    windows = Windows(
        kernel_of_bin(choice.periods["away_first_bin"][chosen], bins.first_kernel),
        kernel_of_bin(choice.periods["away_end_bin"][chosen], bins.first_kernel),
    )
    size = candidates["relief_bytes"][chosen]
    _fetch_eagerly(windows, size, int(_TARGET_SHARE * capacity) - resident)
    return _Choice(periods, rows[chosen], choice.periods["device"][chosen], windows)


def _room_bytes(hardware: Hardware) -> IntArray:
    """What the host and the SSD can hold; the host keeps room for a bounce buffer."""
    bounce = sum(0 if ssd.gds else ssd.bounce_bytes for ssd in hardware.ssd)
    host = max(0, hardware.host.memory_bytes - bounce)
    return np.array([host, *(ssd.capacity_bytes for ssd in hardware.ssd)])


def _fetch_eagerly(windows: Windows, size: IntArray, room_bytes: IntArray) -> None:
    """(4) Evict late and fetch early, as ``room_bytes`` int64 (K,), those without moves, allow."""
    num_kernels = len(room_bytes)
    shift = windows.free_by // num_kernels * num_kernels
    away = cyclic_sum(windows.free_by - shift, windows.prefetch_start - shift, size, num_kernels)
    order = np.argsort(windows.prefetch_start, kind="stable")
    tree = slack_tree(room_bytes + away)
    latest = np.argsort(-windows.free_by, kind="stable")
    grow_offloads(tree, num_kernels, windows, size, latest, windows.prefetch_start - 1)
    grow_prefetches(tree, num_kernels, windows, size, order, windows.free_by + 1)
