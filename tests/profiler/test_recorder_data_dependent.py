"""Iterations whose shapes depend on the data, and loops in which nothing repeats."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import teraio
from teraio.errors import InputError, OffloadWarning
from teraio.profiler.recording import STRICT_SEGMENTS


class Filtering(nn.Module):
    """Drops a part of each batch that differs from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept: torch.Tensor = self.linear(x[x[:, 0] > 0])
        return kept.square().mean()


def train(step: Any, model: nn.Module, steps: int) -> Any:
    """Profile ``steps`` iterations of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(0)
    with teraio.profile(model, optimizer) as profile:
        for number in range(steps):
            optimizer.zero_grad()
            step(number).backward()
            optimizer.step()
    return profile


def test_shapes_that_depend_on_the_data_make_an_approximate_trace() -> None:
    """After a while iterations that differ in sizes only will do, and the user is told."""
    model = Filtering()
    profile = train(lambda _: model(torch.randn(32, 8)), model, STRICT_SEGMENTS + 6)
    assert profile.done
    with pytest.warns(OffloadWarning, match="shapes depend on the data"):
        trace = profile.trace
    assert "one iteration of many" in trace.metadata.known_differences[0]
    assert (trace.kernels.op == "aten.index.Tensor").sum() == 1


def test_too_few_iterations_are_still_refused() -> None:
    """A handful of unlike iterations may be an accident; the message names the first difference."""
    model = Filtering()
    profile = train(lambda _: model(torch.randn(32, 8)), model, STRICT_SEGMENTS - 2)
    with pytest.raises(InputError, match="other shapes"):
        profile.trace  # noqa: B018


def test_a_loop_that_never_repeats_is_given_up() -> None:
    """``while not profile.done`` ends, and the trace is refused."""
    model = nn.Linear(8, 8)

    def step(number: int) -> torch.Tensor:
        x = torch.randn(4, 8)
        for _ in range(number + 1):
            x = model(x)
        return x.square().mean()

    profile = train(step, model, 33)
    assert profile.done
    with pytest.raises(InputError, match="first differ"):
        profile.trace  # noqa: B018
