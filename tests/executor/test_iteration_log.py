"""What is said of recent iterations, by clocks that say what they are told to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from teraio.executor.iteration_log import IterationLog, IterationRecord, lead_seconds
from teraio.executor.report import IterationFigures, RunReport


class Event:
    """Of a GPU: reached at ``at_seconds`` on the clock of the host."""

    def __init__(self, at_seconds: float) -> None:
        self.at_seconds = at_seconds
        self.was_awaited = False

    def synchronize(self) -> None:
        self.was_awaited = True


class Clock:
    """Knows when an event was reached, once somebody has waited for it."""

    def seconds(self, event: Event) -> float:
        assert event.was_awaited
        return event.at_seconds


def record_of(issued_seconds: float, reached_seconds: float) -> IterationRecord:
    event: Any = Event(reached_seconds)
    return IterationRecord(0, 0.0, end_seconds=issued_seconds, end_event=event)


@pytest.mark.parametrize(
    ("issued_seconds", "reached_seconds", "lead"),
    [(10.0, 10.25, 0.25), (10.0, 10.0, 0.0), (10.0, 9.999, 0.0)],
)
def test_the_lead(issued_seconds: float, reached_seconds: float, lead: float) -> None:
    """Not negative where clocks differ by a little."""
    clock: Any = Clock()
    assert lead_seconds(record_of(issued_seconds, reached_seconds), clock) == lead


def test_nobody_is_ahead_of_a_cpu() -> None:
    log = IterationLog("cpu")
    log.recent.extend([record_of(1.0, 2.0), record_of(3.0, 4.0)])
    assert log.host_lead_seconds() == [None, None]


def figures(lead: float | None, *, is_on_plan: bool = True) -> IterationFigures:
    return IterationFigures(1.0, is_on_plan, lead, 0, 0)


@pytest.mark.parametrize(
    ("recent", "lead"),
    [
        ([], None),
        ([figures(None)], None),
        ([figures(0.0, is_on_plan=False), figures(0.3), figures(0.2)], 0.2),
        ([figures(0.1, is_on_plan=False)], None),
    ],
)
def test_the_least_lead_on_plan(recent: list[IterationFigures], lead: float | None) -> None:
    assert replace(REPORT, recent=tuple(recent)).host_lead_seconds == lead


_TIMELINE: Any = None
REPORT = RunReport(
    steps=0,
    warm_up_steps=0,
    measured_seconds=0.0,
    peak_bytes=0,
    budget_bytes=0,
    reserved_bytes=0,
    relocated_bytes=0,
    drift=0,
    first_drift="",
    moves_planned=0,
    moves_found=0,
    substituted_kernels=0,
    first_substituted="",
    demand_fetches=0,
    demand_fetch_bytes=0,
    evictions=0,
    eviction_bytes=0,
    dropped_prefetches=0,
    cold_start_seconds=0.0,
    ssd_files=(),
    verified_reads=0,
    recent=(),
    timeline=_TIMELINE,
)
