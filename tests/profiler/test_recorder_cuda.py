"""The recorder on a GPU: memory as the caching allocator counts it, times from events."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import pytest
import torch

from teraio.profiler import profile
from teraio.profiler.models import build_model, make_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Training:
    """A Llama of some 25 million parameters, with deterministic attention."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        with torch.device("cuda"):
            self.model = build_model(
                "tiny-llama", hidden=512, intermediate=2048, heads=8, layers=6, attention="math"
            )
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batch = make_batch(self.model, 8, 512)
        self.losses: list[float] = []

    def step(self) -> None:
        loss = self.model(*self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())


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
    assert 0.5 * seconds < trace.ideal_seconds < 1.5 * seconds
    names = set(trace.storages.name[trace.is_persistent].tolist())
    assert {"head.weight", "blocks.0.attention.query.weight.exp_avg"} <= names


def test_results_on_a_gpu_do_not_change() -> None:
    plain, recorded = Training(), Training()
    for _ in range(6):
        plain.step()
    with profile(recorded.model, recorded.optimizer) as session:
        for _ in range(6):
            recorded.step()
    assert session.done
    assert plain.losses == recorded.losses
    pairs: Any = zip(plain.model.parameters(), recorded.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
