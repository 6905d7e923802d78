"""``teraio plan --transform``: the plan says so, and later commands take the recorded trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from tests.traces.optimizer_traces import LOOP, PASSES, training_trace

from teraio.contracts.plan import Plan

IN_BACKWARD = "optimizer-in-backward"


@pytest.fixture
def training(folder: Path) -> Path:
    """A folder that holds ``step.trace``."""
    training_trace(PASSES + LOOP).save(folder / "step.trace")
    return folder


def test_a_transformed_plan(training: Path, teraio_json: Callable[..., Any]) -> None:
    """Verified and simulated with the trace as it was recorded."""
    options = ("--hardware", "g10", "--transform", IN_BACKWARD, "-o", "step.plan")
    planned = teraio_json("plan", "step.trace", *options)
    assert Plan.load("step.plan").metadata.transform == IN_BACKWARD
    assert teraio_json("verify", "step.trace", "step.plan")["valid"]
    played = teraio_json("simulate", "step.trace", "step.plan")
    assert played["iteration_seconds"] == pytest.approx(planned["predicted_seconds"])


def test_the_plan_is_shown_with_its_transform(
    training: Path, teraio: Callable[..., Result]
) -> None:
    """Among the first things that people see."""
    result = teraio("plan", "step.trace", "--hardware", "g10", "--transform", IN_BACKWARD)
    assert (result.exit_code, IN_BACKWARD in result.output) == (0, True)


def test_transforms_that_are_not_possible(training: Path, teraio: Callable[..., Result]) -> None:
    """One that does not exist, and a trace that does not allow it."""
    result = teraio("plan", "step.trace", "--hardware", "g10", "--transform", "sideways")
    assert result.exit_code == 2
    assert "transform: 'sideways' is not known" in result.output
    result = teraio("plan", "small.trace", "--hardware", "g10", "--transform", IN_BACKWARD)
    assert result.exit_code == 2
    assert "makes no gradient for weight" in result.output
