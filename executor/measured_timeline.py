"""The timeline of executed iterations: the same table that the simulator predicts."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from teraio.contracts.table import FloatArray
from teraio.contracts.timeline import Events, Timeline, TimelineMetadata, channel_name
from teraio.executor.iteration_log import IterationLog, IterationRecord


def steady_records(log: IterationLog) -> list[IterationRecord]:
    """Iterations that speak for the run: on plan if there are any, else all after the warm-up."""
    warm = [r for r in log.records if not r.is_warm_up]
    return [r for r in warm if r.is_on_plan] or warm or log.records


def median_seconds(records: Sequence[IterationRecord]) -> float:
    """Median length of an iteration; 0 if there is none."""
    return statistics.median(r.seconds for r in records) if records else 0.0


def build_timeline(
    log: IterationLog, *, rank: int, ideal_seconds: float, capacity_bytes: int
) -> Timeline:
    """Events of the newest steady iteration that still has details, account by medians of it.

    On a GPU kernels have no times of their own here: the account then holds the iteration only.
    """
    records = steady_records(log)
    detailed = [r for r in records if r.kernels] or records[-1:]
    record = detailed[-1] if detailed else IterationRecord(0, 0.0)
    busy = _transfer_intervals(record)
    account = _account(record, busy)
    metadata = TimelineMetadata(
        source="measured",
        iteration_seconds=record.seconds,
        ideal_seconds=ideal_seconds,
        cycle_iterations=1,
        steady=len(records) > 0 and record.is_on_plan,
        peak_gpu_bytes=max((r.peak_bytes for r in records), default=0),
        capacity_bytes=capacity_bytes,
        channel_utilisation=_utilisation(record),
        channel_bytes=_channel_bytes(record),
        demand_fetches=record.traffic.demand_fetches,
        demand_fetch_bytes=record.traffic.demand_fetch_bytes,
        evictions=record.traffic.evictions,
        eviction_bytes=record.traffic.eviction_bytes,
        cold_start_seconds=log.cold_start_seconds,
        **account,
    )
    return Timeline(events=Events.from_rows(list(_rows(record, rank))), metadata=metadata)


def _rows(record: IterationRecord, rank: int) -> Iterable[tuple[Any, ...]]:
    origin = record.start_seconds
    for kernel, start, end in record.kernels:
        yield 0, rank, "kernel", kernel, None, None, start - origin, end - origin, 0, None
    for (kernel, start, end), held in zip(record.kernels, record.memory_bytes, strict=True):
        yield 0, rank, "memory", kernel, None, None, start - origin, end - origin, held, None
    for t in record.traffic.transfers:
        if np.isfinite(t.transfer.end_seconds):
            channel = channel_name(t.device, is_write=t.transfer.is_write)
            start, end = t.transfer.start_seconds - origin, t.transfer.end_seconds - origin
            row = t.row if t.row >= 0 else None
            nbytes = t.transfer.nbytes
            yield 0, rank, "transfer", t.kernel, row, channel, start, end, nbytes, t.cause
    for w in record.traffic.waits:
        row = w.row if w.row >= 0 else None
        start, end = w.start_seconds - origin, w.end_seconds - origin
        yield 0, rank, "stall", w.kernel, row, None, start, end, 0, w.cause


def _transfer_intervals(record: IterationRecord) -> FloatArray:
    """Disjoint, ordered [start, end) during which any transfer was under way, (n, 2)."""
    spans = sorted(
        (t.transfer.start_seconds, t.transfer.end_seconds)
        for t in record.traffic.transfers
        if np.isfinite(t.transfer.end_seconds)
    )
    merged: list[list[float]] = []
    for start, end in spans:
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return np.array(merged, dtype=np.float64).reshape(-1, 2)


def _account(record: IterationRecord, busy: FloatArray) -> dict[str, Any]:
    kernels = np.array([(s, e) for _, s, e in record.kernels], dtype=np.float64).reshape(-1, 2)
    running = float(np.sum(kernels[:, 1] - kernels[:, 0]))
    overlapped = float(np.sum(_covered(kernels[:, 1], busy) - _covered(kernels[:, 0], busy)))
    waits = record.traffic.waits
    stalls = {
        cause: sum(w.end_seconds - w.start_seconds for w in waits if w.cause == cause)
        for cause in ("read", "memory")
    }
    rest = record.seconds - running - sum(stalls.values())
    return {
        "compute_alone_seconds": running - overlapped,
        "compute_overlapped_seconds": overlapped,
        "stall_read_seconds": stalls["read"],
        "stall_memory_seconds": stalls["memory"],
        "stall_host_seconds": 0.0,
        "gap_seconds": max(rest, 0.0),
    }


def _covered(times: FloatArray, busy: FloatArray) -> FloatArray:
    """Seconds of ``busy`` that lie before each time."""
    if not len(busy):
        return np.zeros(len(times))
    lengths = np.r_[0.0, np.cumsum(busy[:, 1] - busy[:, 0])]
    index = np.searchsorted(busy[:, 0], times, side="right")
    inside = np.where(index > 0, np.maximum(busy[np.maximum(index - 1, 0), 1] - times, 0.0), 0.0)
    covered: FloatArray = lengths[index] - inside
    return covered


def _utilisation(record: IterationRecord) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for t in record.traffic.transfers:
        if np.isfinite(t.transfer.end_seconds):
            channel = channel_name(t.device, is_write=t.transfer.is_write)
            length = t.transfer.end_seconds - t.transfer.start_seconds
            seconds[channel] = seconds.get(channel, 0.0) + length
    total = record.seconds
    return {c: s / total for c, s in sorted(seconds.items())} if total > 0 else {}


def _channel_bytes(record: IterationRecord) -> dict[str, int]:
    totals: dict[str, int] = {}
    for t in record.traffic.transfers:
        channel = channel_name(t.device, is_write=t.transfer.is_write)
        totals[channel] = totals.get(channel, 0) + t.transfer.nbytes
    return dict(sorted(totals.items()))
