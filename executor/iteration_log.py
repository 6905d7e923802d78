"""What each executed iteration did: kernels, transfers, waits, drift, and how long it took."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, replace

import torch

from teraio.executor.holding import Traffic, TransferRecord
from teraio.executor.residency import Residency
from teraio.executor.stores.streams import CudaClock

_DETAILED_ITERATIONS = 8
"""Iterations of which every kernel is kept for the timeline; of older ones the totals are."""

_WATCHED_ITERATION = 3
"""On a GPU events around every kernel cost time, so of one iteration on plan only: caches are warm
by then.
"""


@dataclass
class IterationRecord:
    """One iteration. Times are host times (perf_counter) on a CPU; a GPU's come from its events.

    ``earlier_transfers`` were issued in the iteration before and were not done when this one began.
    """

    number: int
    start_seconds: float
    end_seconds: float = 0.0
    is_warm_up: bool = False
    drift: int = 0
    first_drift: str = ""
    moves_found: int = 0
    peak_bytes: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    earlier_transfers: list[TransferRecord] = field(default_factory=list)
    kernels: list[tuple[int, float, float]] = field(default_factory=list)
    memory_bytes: list[int] = field(default_factory=list)
    start_event: torch.cuda.Event | None = None
    end_event: torch.cuda.Event | None = None
    kernel_events: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = field(
        default_factory=list
    )

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


@dataclass
class Totals:
    """Sums over the iterations after the warm-up."""

    drift: int = 0
    first_drift: str = ""
    demand_fetches: int = 0
    demand_fetch_bytes: int = 0
    evictions: int = 0
    eviction_bytes: int = 0
    dropped_prefetches: int = 0

    def add(self, record: IterationRecord) -> None:
        """Count one more iteration."""
        traffic = record.traffic
        self.drift += record.drift
        self.first_drift = self.first_drift or record.first_drift
        self.demand_fetches += traffic.demand_fetches
        self.demand_fetch_bytes += traffic.demand_fetch_bytes
        self.evictions += traffic.evictions
        self.eviction_bytes += traffic.eviction_bytes
        self.dropped_prefetches += traffic.dropped_prefetches


class IterationLog:
    """Collects the records of a run; ``recent`` are the newest complete ones, oldest first.

    Of an older iteration its length remains, so a run of any length takes a few bytes for each.
    """

    def __init__(self, device_type: str) -> None:
        self._is_gpu = device_type == "cuda"
        self._clock = CudaClock() if self._is_gpu else None
        self._num_on_plan = 0
        self._is_watching = False
        self.watched: IterationRecord | None = None
        self.totals = Totals()
        self.num_iterations = 0
        self.num_warm_up = 0
        self.peak_bytes = 0
        self.reserved_bytes = 0
        self.cold_start_seconds = 0.0
        self.recent: deque[IterationRecord] = deque()
        self._older_seconds: list[float] = []
        self._older_steady_seconds: list[float] = []
        self._older_warm_seconds: list[float] = []
        self.current = IterationRecord(0, time.perf_counter(), start_event=self._event())

    @property
    def last(self) -> IterationRecord:
        """The newest complete iteration."""
        return self.recent[-1]

    def seconds(self) -> list[float]:
        """Length of every complete iteration, warm-up included."""
        return [*self._older_seconds, *(r.seconds for r in self.recent)]

    @property
    def newest_steady(self) -> IterationRecord | None:
        """The newest that went by the plan, else the newest after the warm-up."""
        warm = [r for r in self.recent if not r.is_warm_up]
        return next((r for r in reversed(warm) if r.is_on_plan), warm[-1] if warm else None)

    def steady_seconds(self) -> list[float]:
        """Of those that speak for the run: on plan if any are, else all after the warm-up."""
        warm = [r for r in self.recent if not r.is_warm_up]
        on_plan = [*self._older_steady_seconds, *(r.seconds for r in warm if r.is_on_plan)]
        return on_plan or [*self._older_warm_seconds, *(r.seconds for r in warm)] or self.seconds()

    def host_lead_seconds(self) -> list[float | None]:
        """How far the training thread was ahead of the GPU at the end of each recent iteration;
        None on a CPU, which runs each kernel as it is issued. Waits for the GPU.
        """
        if not self._is_gpu:
            return [None for _ in self.recent]
        # A clock of this moment: over hours the GPU's and the host's drift apart.
        clock = CudaClock()
        return [
            None if record.end_event is None else lead_seconds(record, clock)
            for record in self.recent
        ]

    def kernel(self, kernel: int, start_seconds: float, end_seconds: float) -> None:
        """An operator ran on the host's clock."""
        if not self._is_gpu:
            self.current.kernels.append((kernel, start_seconds, end_seconds))

    def begin_kernel(self) -> float | torch.cuda.Event | None:
        """When an operator begins: on the host's clock, or in the GPU's stream if it is watched."""
        if not self._is_gpu:
            return time.perf_counter()
        return self._event() if self._is_watching else None

    def end_kernel(self, kernel: int, began: float | torch.cuda.Event | None) -> None:
        """The operator has run, or was launched; ``began`` is what :meth:`begin_kernel` gave."""
        if isinstance(began, float):
            self.kernel(kernel, began, time.perf_counter())
        elif began is not None:
            ended = self._event()
            assert ended is not None
            self.current.kernel_events.append((kernel, began, ended))

    def memory(self, used_bytes: int) -> None:
        """Bytes held on the GPU after a kernel."""
        if not self._is_gpu or self._is_watching:
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
        self._count(record)
        self._choose_watched(record)
        self.recent.append(record)
        if len(self.recent) > _DETAILED_ITERATIONS:
            self._summarise(self.recent.popleft())
        under_way = [t for t in record.traffic.transfers if not t.transfer.done]
        self.current = IterationRecord(
            record.number + 1,
            record.end_seconds,
            start_event=event,
            earlier_transfers=under_way,
        )

    def note_reserved(self, reserved_bytes: int) -> None:
        """What a GPU's allocator holds at a cut; it gives nothing back in between."""
        self.reserved_bytes = max(self.reserved_bytes, reserved_bytes)

    def restart_clock(self, residency: Residency) -> None:
        """The current iteration begins now: what came before (a cold start) is not part of it."""
        residency.traffic = Traffic()
        self.current.start_seconds = time.perf_counter()
        self.current.start_event = self._event()

    def _count(self, record: IterationRecord) -> None:
        self.num_iterations += 1
        self.peak_bytes = max(self.peak_bytes, record.peak_bytes)
        if record.is_warm_up:
            self.num_warm_up += 1
        else:
            self.totals.add(record)

    def _choose_watched(self, record: IterationRecord) -> None:
        """Keep the iteration whose kernels were watched, if it went by the plan, else try again."""
        if self._is_watching and record.is_on_plan:
            self.watched = record
        self._num_on_plan += record.is_on_plan and not record.is_warm_up
        self._is_watching = (
            self._is_gpu and self.watched is None and self._num_on_plan >= _WATCHED_ITERATION - 1
        )

    def resolved(self, record: IterationRecord) -> IterationRecord:
        """The record with a GPU's times of its boundaries and watched kernels, once they are over.

        On the clock of ``time.perf_counter``, as the transfers' are.
        """
        clock, start, end = self._clock, record.start_event, record.end_event
        if clock is None or start is None or end is None:
            return record
        end.synchronize()
        seconds = clock.seconds
        kernels = [(k, seconds(began), seconds(ended)) for k, began, ended in record.kernel_events]
        return replace(
            record,
            kernels=kernels or record.kernels,
            start_seconds=seconds(start),
            end_seconds=seconds(end),
        )

    def _summarise(self, record: IterationRecord) -> None:
        seconds = record.seconds
        self._older_seconds.append(seconds)
        if not record.is_warm_up:
            self._older_warm_seconds.append(seconds)
            if record.is_on_plan:
                self._older_steady_seconds.append(seconds)

    def _event(self) -> torch.cuda.Event | None:
        if not self._is_gpu:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def lead_seconds(record: IterationRecord, clock: CudaClock) -> float:
    """From when an iteration's end was issued until the GPU had reached it."""
    assert record.end_event is not None
    record.end_event.synchronize()
    return max(0.0, clock.seconds(record.end_event) - record.end_seconds)
