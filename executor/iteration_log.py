"""What each executed iteration did: kernels, transfers, waits, drift, and how long it took."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import torch

from teraio.executor.residency import Residency, Traffic

_DETAILED_ITERATIONS = 8
"""Iterations of which every kernel is kept for the timeline; older ones keep their totals."""


@dataclass
class IterationRecord:
    """One iteration. Times are host times (perf_counter) on a CPU; a GPU's come from its events."""

    number: int
    start_seconds: float
    end_seconds: float = 0.0
    is_warm_up: bool = False
    drift: int = 0
    first_drift: str = ""
    peak_bytes: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    kernels: list[tuple[int, float, float]] = field(default_factory=list)
    memory_bytes: list[int] = field(default_factory=list)
    start_event: torch.cuda.Event | None = None
    end_event: torch.cuda.Event | None = None

    @property
    def is_on_plan(self) -> bool:
        """Nothing had to be done that the plan does not say."""
        t = self.traffic
        return not (self.drift or t.demand_fetches or t.evictions or t.dropped_prefetches)

    @property
    def seconds(self) -> float:
        """Length of the iteration, cut to cut; waits for the GPU where there is one."""
        if self.start_event is not None and self.end_event is not None:
            self.end_event.synchronize()
            return float(self.start_event.elapsed_time(self.end_event)) / 1e3
        return self.end_seconds - self.start_seconds


class IterationLog:
    """Collects the records of a run; ``last`` is the newest complete one."""

    def __init__(self, device_type: str) -> None:
        self._is_gpu = device_type == "cuda"
        self.records: list[IterationRecord] = []
        self.cold_start_seconds = 0.0
        self._detailed: deque[IterationRecord] = deque()
        self.current = IterationRecord(0, time.perf_counter(), start_event=self._event())

    @property
    def last(self) -> IterationRecord:
        """The newest complete iteration."""
        return self.records[-1]

    def kernel(self, kernel: int, start_seconds: float, end_seconds: float) -> None:
        """An operator ran on the host's clock."""
        if not self._is_gpu:
            self.current.kernels.append((kernel, start_seconds, end_seconds))

    def memory(self, used_bytes: int) -> None:
        """Bytes held on the GPU after a kernel."""
        if not self._is_gpu:
            self.current.memory_bytes.append(used_bytes)

    def drift(self, kernel: int, what: str) -> None:
        """A kernel was not the planned one."""
        self.current.drift += 1
        if not self.current.first_drift:
            self.current.first_drift = f"kernel {kernel}: {what}"

    def end_iteration(self, residency: Residency, *, is_warm_up: bool) -> None:
        """Close the current record and open the next."""
        record, event = self.current, self._event()
        record.end_seconds = time.perf_counter()
        record.end_event = event
        record.is_warm_up = is_warm_up
        record.traffic, residency.traffic = residency.traffic, Traffic()
        record.peak_bytes = residency.take_peak()
        self.records.append(record)
        self._detailed.append(record)
        if len(self._detailed) > _DETAILED_ITERATIONS:
            old = self._detailed.popleft()
            old.kernels, old.memory_bytes = [], []
            old.traffic.transfers, old.traffic.waits = [], []
        self.current = IterationRecord(record.number + 1, record.end_seconds, start_event=event)

    def restart_clock(self) -> None:
        """The current iteration begins now: what came before (a cold start) is not part of it."""
        self.current.start_seconds = time.perf_counter()
        self.current.start_event = self._event()

    def _event(self) -> torch.cuda.Event | None:
        if not self._is_gpu:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
