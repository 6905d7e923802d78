"""Unrolling ranks of PyTorch's 1F1B schedule: equal to recording all micro-batches."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from teraio.errors import InputError
from teraio.profiler.fake.recording import record
from teraio.profiler.models import model_config
from teraio.profiler.training.setup import TrainingSetup
from teraio.traces.trace import Trace
from teraio.traces.unrolling import micro_batches_to_trace, unroll


def assert_same_rows(found: Trace, expected: Trace) -> None:
    for name in ("kernels", "storages", "accesses"):
        table, other = getattr(found, name), getattr(expected, name)
        for column in table.COLUMNS:
            if not column.name.endswith("_seconds"):  # Of how long the recording took.
                values = getattr(table, column.name).tolist()
                assert values == getattr(other, column.name).tolist(), f"{name}.{column.name}"


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_equals_a_recording_of_all_micro_batches(stage: int) -> None:
    few = max(micro_batches_to_trace(2 - stage), 3)
    setup = TrainingSetup(
        model=model_config("tiny-gpt2", layers=3),
        sequence=8,
        micro_batch_size=1,
        micro_batches=few + 2,
        stages=3,
        stage=stage,
    )
    unrolled = unroll(record(setup, few), few + 2)
    assert_same_rows(unrolled, record(setup))


def test_too_few_micro_batches_are_refused() -> None:
    setup = TrainingSetup(
        model=model_config("tiny-llama", layers=4, hidden=16, heads=2, key_value_heads=1),
        sequence=4,
        micro_batch_size=1,
        micro_batches=12,
        stages=4,
    )
    with pytest.raises(InputError, match="6 micro-batches were traced, but only 8 or more"):
        unroll(record(setup, 6), 12)
