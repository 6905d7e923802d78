"""The recorder on a GPU: memory as the caching allocator counts it, times from events."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch

from teraio.profiler import profile
from teraio.profiler.cuda_clock import fill_by_kind, follow_host
from teraio.profiler.models import build_model, make_batch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Training:
    """A Llama of 200 million parameters, with deterministic attention.

    Its kernels are long enough for the device, not the host, to set the pace.
    """

    def __init__(self) -> None:
        torch.manual_seed(0)
        with torch.device("cuda"):
            self.model = build_model(
                "tiny-llama", hidden=2048, intermediate=5504, heads=16, layers=4, attention="math"
            )
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batch = make_batch(self.model, 16, 512)
        self.losses: list[float] = []

    def step(self) -> None:
        loss = self.model(*self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())


@pytest.mark.gpu
@needs_gpu
def test_trace_of_a_gpu_iteration() -> None:
    training = Training()
    training.step()
    training.step()
    torch.cuda.reset_peak_memory_stats()
    began = perf_counter()
    training.step()
    seconds, peak_bytes = perf_counter() - began, torch.cuda.max_memory_allocated()
    with profile(training.model, training.optimizer) as session:
        while not session.done:
            training.step()
    trace = session.trace
    assert trace.metadata.device == "cuda"
    assert trace.metadata.allocator_rounding_bytes == 512
    assert (trace.storages.allocated_bytes % 512 == 0).all()
    assert trace.peak_allocated_bytes == pytest.approx(peak_bytes, rel=0.02)
    assert trace.ideal_seconds == pytest.approx(seconds, rel=0.05)
    names = set(trace.storages.name[trace.is_persistent].tolist())
    assert {"head.weight", "blocks.0.attention.query.weight.exp_avg"} <= names


@pytest.mark.gpu
@needs_gpu
def test_results_on_a_gpu_do_not_change() -> None:
    plain, recorded = Training(), Training()
    with profile(recorded.model, recorded.optimizer) as session:
        while not session.done:
            recorded.step()
    recorded.step()
    for _ in recorded.losses:
        plain.step()
    assert plain.losses == recorded.losses
    pairs: Any = zip(plain.model.parameters(), recorded.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_gaps_follow_a_host_that_is_not_slowed_down() -> None:
    """A host of 3 s a launch feeds kernels of 1 s, then one of 10 s; the last one synchronises."""
    durations = np.array([1.0, 1.0, 10.0, 1.0, 1.0])
    launch = np.full(5, 2.0)
    host_gaps = np.ones(5)
    synchronises = np.array([False, False, False, False, True])
    gaps = follow_host(durations, launch, host_gaps, synchronises)
    # The host is at 3, 6, 9, 12, then waits for the device, which ends at 4, 7, 19, 20, 21.
    assert gaps.tolist() == [3.0, 2.0, 2.0, 0.0, 0.0]


def test_untimed_kernels_take_the_median_of_their_kind() -> None:
    """Timed kernels keep their own time."""
    seconds = np.array([1.0, 5.0, 3.0, 0.0, 2.0, 0.0])
    kinds = ["a", "b", "a", "a", "a", "b"]
    is_timed = [True, True, True, False, True, False]
    assert fill_by_kind(seconds, kinds, is_timed).tolist() == [1.0, 5.0, 3.0, 2.0, 2.0, 5.0]
