"""Unrolling ranks of PyTorch's 1F1B schedule: equal to recording all micro-batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

from teraio.profiler.fake.recording import record
from teraio.profiler.models import model_config
from teraio.profiler.training.setup import TrainingSetup
from teraio.traces.trace import Trace
from teraio.traces.unrolling import micro_batches_to_trace, unroll


def with_sorted_names(trace: Trace) -> Trace:
    """The same with persistent storages in the order of their names.

    Receive buffers are listed in the order in which the recorder met them, in an iteration before
    the one that is the trace.
    """
    names = np.where(trace.is_persistent, trace.storages.name, "")
    order = np.lexsort((trace.storages.storage, names.astype(str)))
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    storages = replace(trace.storages.take(order), storage=np.arange(len(order)))
    accesses = replace(trace.accesses, storage=number[trace.accesses.storage])
    return replace(trace, storages=storages, accesses=accesses)


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
    assert_same_rows(with_sorted_names(unrolled), with_sorted_names(record(setup)))
