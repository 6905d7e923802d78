"""Small training runs that can be repeated to the bit: with, without and under any plan."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import teraio
from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Plan
from teraio.executor.execution import RunReport
from teraio.profiler.models import build_model, make_batch
from teraio.traces.trace import Trace

STEPS = 5
MICRO_BATCHES = 2
BUCKET_BYTES = 64 * 1024


@dataclass
class Outcome:
    """Everything that must be the same to the bit."""

    losses: list[float]
    tensors: dict[str, torch.Tensor]

    def assert_same(self, other: Outcome) -> None:
        """Compare losses, parameters and optimizer state, bit by bit."""
        assert self.losses == other.losses
        assert self.tensors.keys() == other.tensors.keys()
        for name, tensor in self.tensors.items():
            assert torch.equal(tensor, other.tensors[name]), name


@dataclass
class Case:
    """One kind of training: a model, an optimizer, and how they are used."""

    model: str = "tiny-llama"
    model_options: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    is_autocast: bool = False
    zero_at_end: bool = False

    def build(self) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = build_model(self.model, **self.model_options)
        return model, self.optimizer(model.parameters(), **self.optimizer_options)

    def step(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
        generator = torch.Generator().manual_seed(number)
        if not self.zero_at_end:
            optimizer.zero_grad()
        total = 0.0
        for _ in range(MICRO_BATCHES):
            batch = make_batch(self.model, 2, 16, generator)
            context: AbstractContextManager[Any] = (
                torch.autocast("cpu", torch.bfloat16) if self.is_autocast else nullcontext()
            )
            with context:
                loss = model(*batch) / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if self.zero_at_end:
            optimizer.zero_grad()
        return total

    def outcome(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, losses: list[float]
    ) -> Outcome:
        tensors = {name: p.detach().clone() for name, p in model.named_parameters()}
        for index, state in enumerate(optimizer.state.values()):
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"state {index} {key}"] = value.clone()
        return Outcome(losses, tensors)

    def plain(self, steps: int = STEPS) -> Outcome:
        """Training as the user would run it."""
        model, optimizer = self.build()
        return self.outcome(
            model, optimizer, [self.step(model, optimizer, i) for i in range(steps)]
        )

    def trace(self) -> Trace:
        """One steady iteration."""
        model, optimizer = self.build()
        with teraio.profile(model, optimizer, bucket_bytes=BUCKET_BYTES) as profile:
            number = 0
            while not profile.done:
                self.step(model, optimizer, number)
                profile.step()
                number += 1
        return profile.trace

    def executed(self, plan: Plan, steps: int = STEPS, **options: Any) -> tuple[Outcome, RunReport]:
        """The same training under a plan."""
        model, optimizer = self.build()
        with teraio.execute(plan, model, optimizer, **options) as run:
            losses = [self.step(model, optimizer, i) for i in range(steps)]
        return self.outcome(model, optimizer, losses), run.report


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Two workers share two cores; results do not depend on it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def case() -> type[Case]:
    """The class of cases, for tests that make their own."""
    return Case


@pytest.fixture
def machine() -> Callable[..., Hardware]:
    """The CPU preset with budgets that a test machine always has."""

    def make(**budgets: Any) -> Hardware:
        return Hardware.preset("cpu").with_budgets(
            **{"gpu_memory": "1GB", "host_memory": "500MB", **budgets}
        )

    return make
