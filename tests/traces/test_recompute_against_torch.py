"""Transform recompute against ``torch.utils.checkpoint``: the same model, recorded both ways."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from teraio.profiler.fake.recording import record
from teraio.profiler.training import TrainingSetup
from teraio.traces.trace import Trace
from teraio.traces.transforms import transform_trace

TINY: dict[str, Any] = {
    "model": "tiny-llama",
    "sequence": 16,
    "micro_batch_size": 2,
    "micro_batches": 2,
    "attention": "sdpa",
}


@pytest.fixture(scope="module")
def plain() -> Trace:
    """Nothing recomputed."""
    return record(TrainingSetup(**TINY))


@pytest.fixture(scope="module")
def checkpointed() -> Trace:
    """Every block under ``torch.utils.checkpoint``."""
    return record(TrainingSetup(**TINY, checkpoint="non-reentrant"))


def test_the_kernels_are_those_of_torch(plain: Trace, checkpointed: Trace) -> None:
    """As many of each operator, none to spare: PyTorch stops early, the slice ends early."""
    changed = transform_trace(plain, "recompute")
    assert Counter(changed.kernels.op) == Counter(checkpointed.kernels.op)
    assert changed.num_kernels > plain.num_kernels


def test_the_memory_is_that_of_torch(plain: Trace, checkpointed: Trace) -> None:
    """To the byte, at the peak."""
    changed = transform_trace(plain, "recompute")
    assert changed.peak_live_bytes == checkpointed.peak_live_bytes
    assert changed.peak_allocated_bytes == checkpointed.peak_allocated_bytes
