"""Set aside for the garbage collector: what exists when a run begins, and after its first steps."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

import teraio
from teraio.executor import mode
from teraio.executor.quiet_collector import QuietCollector


@pytest.fixture(autouse=True)
def nothing_set_aside() -> Iterator[None]:
    """Neither before a test nor after it."""
    gc.unfreeze()
    yield
    gc.unfreeze()


class Thing:
    """Of a cycle, which only the collector can free."""

    alive = 0

    def __init__(self) -> None:
        self.itself = self
        Thing.alive += 1

    def __del__(self) -> None:
        Thing.alive -= 1


def test_garbage_goes_and_the_rest_is_set_aside() -> None:
    Thing()
    collector = QuietCollector(is_wanted=True)
    collector.start()
    assert Thing.alive == 0
    assert gc.get_freeze_count() > 10_000
    collector.stop()
    assert gc.get_freeze_count() == 0


def test_what_the_first_iterations_make_is_set_aside_too() -> None:
    collector = QuietCollector(is_wanted=True)
    collector.start()
    before = gc.get_freeze_count()
    lasting = [[number] for number in range(10_000)]
    collector.end_iteration()
    assert gc.get_freeze_count() <= before
    Thing()
    collector.end_iteration()
    assert Thing.alive == 0
    assert gc.get_freeze_count() >= before + len(lasting) - 100
    settled = gc.get_freeze_count()
    more = [[number] for number in range(10_000)]
    collector.end_iteration()
    assert gc.get_freeze_count() <= settled
    assert more
    collector.stop()


def test_cycles_made_later_are_collected_as_ever() -> None:
    collector = QuietCollector(is_wanted=True)
    collector.start()
    Thing()
    gc.collect()
    assert Thing.alive == 0
    collector.stop()


def test_what_was_set_aside_is_collected_after_the_run() -> None:
    thing = Thing()
    collector = QuietCollector(is_wanted=True)
    collector.start()
    del thing
    gc.collect()
    assert Thing.alive == 1
    collector.stop()
    gc.collect()
    assert Thing.alive == 0


def test_a_collector_that_is_off_is_left_alone() -> None:
    gc.disable()
    try:
        collector = QuietCollector(is_wanted=True)
        collector.start()
        collector.stop()
        assert gc.get_freeze_count() == 0
    finally:
        gc.enable()


def test_what_python_itself_has_set_aside_is_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some hundred objects, in Python 3.12."""
    count = gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: count() or 375)
    collector = QuietCollector(is_wanted=True)
    collector.start()
    assert count() > 10_000
    collector.stop()


def test_what_others_have_set_aside_stays_so() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    collector = QuietCollector(is_wanted=True)
    collector.start()
    collector.end_iteration()
    collector.end_iteration()
    collector.stop()
    assert gc.get_freeze_count() > frozen - 100


def test_a_run(case: Any, machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets aside inside its block alone; on a CPU, which nobody is ahead of, it does not."""
    training = case()
    trace = training.trace()
    hardware = machine(gpu_memory=int(0.7 * trace.peak_allocated_bytes))
    plan = teraio.plan(trace, hardware, planner="greedy")
    wanted = iter((True, False))
    monkeypatch.setattr(
        mode, "QuietCollector", lambda *, is_wanted: QuietCollector(is_wanted=next(wanted))
    )
    for is_wanted in (True, False):
        model, optimizer = training.build()
        with teraio.execute(plan, model, optimizer):
            for number in range(3):
                training.step(model, optimizer, number)
                assert bool(gc.get_freeze_count()) == is_wanted
        assert gc.get_freeze_count() == 0
