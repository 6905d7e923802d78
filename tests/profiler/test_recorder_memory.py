"""Live bytes of a trace are the allocator's at every kernel boundary."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from teraio.profiler.models import build_model, layers, make_batch
from teraio.traces import live_bytes

TOLERANCE_BYTES = 100
"""Python scalars become tensors of 4 or 8 bytes below the dispatch mode, for one operator each."""


def training(
    model: str,
    *,
    options: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    zero_grad: str = "bottom",
    bfloat16: bool = False,
    **overrides: Any,
) -> Callable[[Callable[[], None]], None]:
    """A loop of two micro-batches, with clipping, that allocates everything itself."""

    def loop(step: Callable[[], None]) -> None:
        network = build_model(model, layers=2, **overrides)
        chosen = torch.optim.AdamW(network.parameters(), **(optimizer or {}))
        for _ in range(4):
            if zero_grad == "top":
                chosen.zero_grad()
            for number in range(2):
                batch = make_batch(network, 2, 16, torch.Generator().manual_seed(number))
                with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
                    loss = network(*batch) / 2
                loss.backward()
                loss.item()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            chosen.step()
            if zero_grad == "bottom":
                chosen.zero_grad()
            step()

    return loop


CASES: dict[str, Callable[[Callable[[], None]], None]] = {
    "llama for-loop": training("tiny-llama", optimizer={"foreach": False}),
    "llama foreach": training("tiny-llama", optimizer={"foreach": True}),
    "llama fused": training("tiny-llama", optimizer={"fused": True}),
    "llama zero_grad first": training("tiny-llama", zero_grad="top"),
    "llama tied": training("tiny-llama", tied=True),
    "llama reentrant checkpoint": training("tiny-llama", checkpoint="reentrant"),
    "llama checkpoint": training("tiny-llama", checkpoint="non-reentrant"),
    "llama bfloat16": training("tiny-llama", bfloat16=True),
    "gpt2 dropout": training("tiny-gpt2", dropout=0.1),
    "t5": training("tiny-t5"),
    # Which expert sees how many tokens depends on the weights: they must stay as they are.
    "moe": training("tiny-moe", optimizer={"lr": 0.0}),
}


@pytest.mark.parametrize("case", CASES)
def test_live_bytes_are_the_allocators(
    case: str, watch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Checkpoints save the state of the random generator (5 kB) outside any operator.
    forgetful = functools.partial(checkpoint, preserve_rng_state=False)
    monkeypatch.setattr(layers, "recompute_in_backward", forgetful)
    watched = watch(CASES[case])
    live = live_bytes(watched.trace)
    assert len(live) == len(watched.allocator_bytes)
    assert np.abs(live - watched.allocator_bytes).max() <= TOLERANCE_BYTES
    assert watched.trace.peak_live_bytes > 10 * watched.trace.storages.nbytes.max()


def test_buckets_show_in_the_trace(watch: Callable[..., Any]) -> None:
    """List operators are split as the executor will split them; memory stays exact."""
    whole = watch(training("tiny-llama", optimizer={"foreach": True}))
    split = watch(training("tiny-llama", optimizer={"foreach": True}), bucket_bytes=100_000)
    square_roots = [
        (watched.trace.kernels.op == "aten._foreach_sqrt.default").sum()
        for watched in (whole, split)
    ]
    assert square_roots[0] == 1
    assert square_roots[1] > 3
    assert np.abs(live_bytes(split.trace) - split.allocator_bytes).max() <= TOLERANCE_BYTES
    assert split.trace.metadata.bucket_bytes == 100_000
