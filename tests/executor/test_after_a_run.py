"""When a run is over: what it has been told of is let go, what it knows of itself stays."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

import teraio
from teraio.errors import InputError
from teraio.executor.execution import Execution


@pytest.fixture
def ended(case: Any, machine: Any) -> Iterator[tuple[Execution, list[weakref.ref[Any]]]]:
    """A run that is over, and what it held: nothing but counting references frees it here."""
    training = case()
    trace = training.trace()
    plan = teraio.plan(trace, machine(gpu_memory=int(0.7 * trace.peak_allocated_bytes)))
    model, optimizer = training.build()
    held = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(next(model.parameters()))]
    gc.collect()
    gc.disable()
    try:
        with teraio.execute(plan, model, optimizer) as run:
            for number in range(3):
                training.step(model, optimizer, number)
        del model, optimizer
        yield run, held
    finally:
        gc.enable()


def test_the_model_and_the_optimizer_are_let_go(ended: Any) -> None:
    """Its memory is for whatever is trained next, also while somebody reads the report."""
    run, held = ended
    assert [reference() for reference in held] == [None, None, None]
    assert run.report.steps == 3


def test_what_it_did_is_still_known(ended: Any) -> None:
    run, _ = ended
    assert len(run.iteration_seconds) == run.report.steps == 3
    assert run.report is run.report
    assert run.timeline.iteration_seconds > 0


def test_it_is_over_for_good(ended: Any) -> None:
    run, _ = ended
    run.step()
    run.restore_all()
    assert run.report.steps == 3
    with pytest.raises(InputError, match="entered once"):
        run.__enter__()
    with pytest.raises(InputError, match="inside the"):
        run.save("state")


def test_recent_iterations(ended: Any) -> None:
    """The first is no iteration by the plan. On a CPU nobody is ahead of anybody."""
    run, _ = ended
    recent = run.report.recent
    assert [each.seconds for each in recent] == run.iteration_seconds
    assert [each.is_on_plan for each in recent] == [False, True, True]
    assert {each.host_lead_seconds for each in recent} == {None}
    assert {each.allocator_looks for each in recent} == {0}
    assert run.report.host_lead_seconds is None
