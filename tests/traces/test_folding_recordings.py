"""Folding recorded training: equal, row by row, to recording fewer micro-batches."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.traces.test_folding import assert_corresponds, with_jitter

from teraio.profiler.fake.recording import record
from teraio.profiler.models import model_config
from teraio.profiler.training.setup import TrainingSetup
from teraio.traces.folding import fold
from teraio.traces.trace import Trace


def assert_same_rows(found: Trace, expected: Trace) -> None:
    for name in ("kernels", "storages", "accesses"):
        table, other = getattr(found, name), getattr(expected, name)
        for column in table.COLUMNS:
            if not column.name.endswith("_seconds"):  # Of how long the recording took.
                values = getattr(table, column.name).tolist()
                assert values == getattr(other, column.name).tolist(), f"{name}.{column.name}"


@pytest.mark.parametrize(("stages", "stage"), [(1, 0), (2, 1), (3, 0)])
def test_equals_a_recording_of_fewer_micro_batches(stages: int, stage: int) -> None:
    setup = TrainingSetup(
        model=model_config("tiny-gpt2", layers=stages),
        sequence=8,
        micro_batch_size=1,
        micro_batches=9,
        stages=stages,
        stage=stage,
    )
    full, expected = record(setup), record(setup, 6)
    for trace in (full, with_jitter(full)):
        folding = fold(trace, 6)
        assert folding is not None
        assert_same_rows(folding.trace, expected)
        assert_corresponds(folding, trace)
