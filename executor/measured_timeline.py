"""The timeline of executed iterations: the same table that the simulator predicts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from teraio.contracts.timeline import Events, Timeline, TimelineMetadata, channel_name
from teraio.executor.device_stalls import stalls_between
from teraio.executor.holding import TransferRecord
from teraio.executor.iteration_log import IterationLog, IterationRecord

Spans = list[tuple[float, float]]
"""Intervals [start, end) in seconds."""


def build_timeline(
    log: IterationLog,
    *,
    rank: int,
    ideal_seconds: float,
    gap_seconds: float,
    capacity_bytes: int,
    num_storages: int,
) -> Timeline:
    """Events and account of the median iteration among the newest that went by the plan.

    ``gap_seconds``: idle time per iteration that the trace has too. ``num_storages``: rows of the
    plan; what only the run has is no storage of the timeline. Kernels are numbered as the run has
    them. On a GPU it is the iteration whose kernels were watched, if there was one; without it the
    account holds the iteration only, as gap.
    """
    records = [r for r in log.recent if not r.is_warm_up] or list(log.recent)
    steady = [r for r in records if r.is_on_plan] or records
    steady = sorted(steady, key=lambda r: r.seconds)
    chosen = steady[len(steady) // 2] if steady else IterationRecord(0, 0.0)
    record = log.resolved(log.watched or chosen)
    if record.kernel_events:
        # What was recorded stays as it is: another timeline may be made of it.
        waits = stalls_between(record.start_seconds, record.kernels, record.traffic.waits)
        record = replace(record, traffic=replace(record.traffic, waits=waits))
    metadata = TimelineMetadata(
        source="measured",
        iteration_seconds=record.seconds,
        ideal_seconds=ideal_seconds,
        cycle_iterations=1,
        steady=len(steady) > 0 and record.is_on_plan,
        peak_gpu_bytes=max((r.peak_bytes for r in steady), default=0),
        capacity_bytes=capacity_bytes,
        channel_utilisation=_utilisation(record),
        channel_bytes=_channel_bytes(record),
        demand_fetches=record.traffic.demand_fetches,
        demand_fetch_bytes=record.traffic.demand_fetch_bytes,
        evictions=record.traffic.evictions,
        eviction_bytes=record.traffic.eviction_bytes,
        cold_start_seconds=log.cold_start_seconds,
        **_account(record, gap_seconds if record.kernels else math.inf),
    )
    return Timeline(
        events=Events.from_rows(list(_rows(record, rank, num_storages))), metadata=metadata
    )


def _rows(record: IterationRecord, rank: int, num_storages: int) -> Iterable[tuple[Any, ...]]:
    origin = record.start_seconds
    for kernel, start, end in record.kernels:
        yield 0, rank, "kernel", kernel, None, None, start - origin, end - origin, 0, None
    for (kernel, start, end), held in zip(record.kernels, record.memory_bytes, strict=True):
        yield 0, rank, "memory", kernel, None, None, start - origin, end - origin, held, None
    for t in record.traffic.transfers:
        if np.isfinite(t.transfer.end_seconds):
            channel = channel_name(t.device, is_write=t.transfer.is_write)
            start, end = t.transfer.start_seconds - origin, t.transfer.end_seconds - origin
            row = t.row if 0 <= t.row < num_storages else None
            nbytes = t.transfer.nbytes
            yield 0, rank, "transfer", t.kernel, row, channel, start, end, nbytes, t.cause
    for w in record.traffic.waits:
        row = w.row if 0 <= w.row < num_storages else None
        start, end = w.start_seconds - origin, w.end_seconds - origin
        yield 0, rank, "stall", w.kernel, row, None, start, end, 0, w.cause


def _inside(record: IterationRecord) -> Iterator[tuple[TransferRecord, float, float]]:
    """Transfers and the part of their time that lies in the iteration, whoever issued them."""
    for t in (*record.earlier_transfers, *record.traffic.transfers):
        start = max(t.transfer.start_seconds, record.start_seconds)
        end = min(t.transfer.end_seconds, record.end_seconds)
        if end > start:  # False also for NaN: not done yet.
            yield t, start, end


def _merged(spans: Iterable[tuple[float, float]]) -> Spans:
    """Disjoint, ordered spans that cover what any of the given ones covers."""
    merged: Spans = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _account(record: IterationRecord, gap_seconds: float) -> dict[str, Any]:
    """Six disjoint parts of the iteration that add up to it, seconds.

    A kernel that waits inside (a pointer taken by its own code) is waiting then, not running; what
    is neither is the gap as far as the trace has one (``gap_seconds``), and beyond that the host's
    stall: the executor's own time.
    """
    kernels = _merged((start, end) for _, start, end in record.kernels)
    busy = _merged((start, end) for _, start, end in _inside(record))
    waits = [
        (wait.cause, max(wait.start_seconds, record.start_seconds), wait.end_seconds)
        for wait in record.traffic.waits
        if wait.end_seconds > record.start_seconds
    ]
    waiting = _intersection(kernels, _merged((start, end) for _, start, end in waits))
    running = _length(kernels) - _length(waiting)
    overlapped = _length(_intersection(kernels, busy)) - _length(_intersection(waiting, busy))
    stalls = {
        kind: sum(end - start for cause, start, end in waits if cause == kind)
        for kind in ("read", "memory")
    }
    idle = max(float(record.seconds - running - sum(stalls.values())), 0.0)
    return {
        "compute_alone_seconds": float(running - overlapped),
        "compute_overlapped_seconds": float(overlapped),
        "stall_read_seconds": stalls["read"],
        "stall_memory_seconds": stalls["memory"],
        "stall_host_seconds": max(idle - gap_seconds, 0.0),
        "gap_seconds": min(idle, gap_seconds),
    }


def _intersection(one: Spans, other: Spans) -> Spans:
    """What two lists of disjoint, ordered spans have in common."""
    common: Spans = []
    i = j = 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if end > start:
            common.append((start, end))
        if one[i][1] <= other[j][1]:
            i += 1
        else:
            j += 1
    return common


def _length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)


def _utilisation(record: IterationRecord) -> dict[str, float]:
    spans: dict[str, Spans] = {}
    for t, start, end in _inside(record):
        channel = channel_name(t.device, is_write=t.transfer.is_write)
        spans.setdefault(channel, []).append((start, end))
    total = record.seconds
    return {c: _length(_merged(s)) / total for c, s in sorted(spans.items())} if total > 0 else {}


def _channel_bytes(record: IterationRecord) -> dict[str, int]:
    totals: dict[str, int] = {}
    for t in record.traffic.transfers:
        channel = channel_name(t.device, is_write=t.transfer.is_write)
        totals[channel] = totals.get(channel, 0) + t.transfer.nbytes
    return dict(sorted(totals.items()))
