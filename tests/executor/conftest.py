"""Small training runs that can be repeated to the bit: with, without and under any plan."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import teraio
from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Moves, Plan
from teraio.errors import OffloadWarning
from teraio.executor.execution import RunReport
from teraio.executor.mode import ExecutorMode
from teraio.planner.plan_building import build_plan
from teraio.planner.policies.evict_everything import evict_everything
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
        """Training as the user would run it; equal cases share what is only compared with."""
        key = f"{self} {steps}"
        if key not in _OUTCOMES:
            model, optimizer = self.build()
            losses = [self.step(model, optimizer, i) for i in range(steps)]
            _OUTCOMES[key] = self.outcome(model, optimizer, losses)
        return _OUTCOMES[key]

    def trace(self) -> Trace:
        """One steady iteration, recorded (with its warnings) once for all equal cases."""
        key = str(self)
        if key not in _TRACES:
            _TRACES[key] = self._recorded()
        return _TRACES[key]

    def _recorded(self) -> Trace:
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


_OUTCOMES: dict[str, Outcome] = {}
_TRACES: dict[str, Trace] = {}
"""What equal cases share, by their fields."""


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Two workers share two cores; results do not depend on it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def store_threads() -> Callable[[], list[threading.Thread]]:
    """Threads that stores have started in this test and not ended; garbage of others has some."""
    before = set(threading.enumerate())

    def started() -> list[threading.Thread]:
        threads = set(threading.enumerate()) - before
        return [thread for thread in threads if thread.name.startswith("teraio-")]

    return started


@pytest.fixture
def case() -> type[Case]:
    """The class of cases, for tests that make their own."""
    return Case


@pytest.fixture
def machine() -> Callable[..., Hardware]:
    """The CPU preset with budgets that a test machine always has.

    Every run touches all of its host memory: more than the tiny models need would cost each of them
    a good part of a second.
    """

    def make(**budgets: Any) -> Hardware:
        return Hardware.preset("cpu").with_budgets(
            **{"gpu_memory": "1GB", "host_memory": "100MB", **budgets}
        )

    return make


class Layers(torch.nn.Module):
    """Linear layers with a relu after each: the smallest model that has everything."""

    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


Built = tuple[torch.nn.Module, Any]


@dataclass
class Loop:
    """A training loop of a few lines: ``build`` makes (model, optimizers), ``step`` trains once.

    ``profiled`` is the step that the trace is taken from, if the run's is to differ from it.
    """

    step: Callable[[Any, Any, int], Any]
    build: Callable[[], Built] | None = None
    profiled: Callable[[Any, Any, int], Any] | None = None

    def made(self) -> Built:
        torch.manual_seed(0)
        if self.build is not None:
            return self.build()
        model = Layers()
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)

    def trace(self, steps: int = 8) -> Trace:
        model, optimizer = self.made()
        with teraio.profile(model, optimizer, bucket_bytes=BUCKET_BYTES) as profile:
            for number in range(steps):
                (self.profiled or self.step)(model, optimizer, number)
        return profile.trace

    def run(self, steps: int = 5, plan: Plan | None = None, **options: Any) -> Any:
        """(what every step returned and all final tensors, report or None)."""
        model, optimizer = self.made()
        torch.manual_seed(1)
        if plan is None:
            returned = [self.step(model, optimizer, i) for i in range(steps)]
            return (returned, _all_tensors(model, optimizer)), None
        with teraio.execute(plan, model, optimizer, **options) as execution:
            returned = [self.step(model, optimizer, i) for i in range(steps)]
        return (returned, _all_tensors(model, optimizer)), execution.report


def _all_tensors(model: torch.nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    tensors = {name: t.detach().clone() for name, t in model.state_dict().items()}
    for index, one in enumerate(optimizer if isinstance(optimizer, list) else [optimizer]):
        for number, state in enumerate(one.state.values()):
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{index} {number} {key}"] = value.clone()
    return tensors


def assert_same_bits(one: Any, other: Any) -> None:
    """Two results of :meth:`Loop.run`, bit by bit."""
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    for name, tensor in one[1].items():
        assert torch.equal(tensor, other[1][name]), name


@pytest.fixture
def layers() -> type[Layers]:
    """The class of models of the hazard tests."""
    return Layers


@pytest.fixture
def loop() -> type[Loop]:
    """The class of loops of the hazard tests."""
    return Loop


@pytest.fixture
def batch() -> Callable[..., torch.Tensor]:
    """Random rows (rows, width), the same for the same number."""

    def make(number: int, rows: int = 32, width: int = 64) -> torch.Tensor:
        return torch.randn(rows, width, generator=torch.Generator().manual_seed(number))

    return make


@pytest.fixture
def train(batch: Callable[..., torch.Tensor]) -> Callable[..., float]:
    """One ordinary step of one micro-batch."""

    def step(model: Any, optimizer: Any, number: int, rows: int = 32) -> float:
        optimizer.zero_grad()
        loss = model(batch(number, rows)).pow(2).mean()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


@pytest.fixture
def survives(machine: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunReport]:
    """Run a loop under plans of all kinds and compare with plain training; the last report.

    At every kernel the books are compared with the bytes that the storages really have, and with
    the budget unless ``is_counted_late``: the loop makes memory where no operator does.
    """
    problems: list[str] = []
    after_kernel = ExecutorMode.after_kernel

    def checked(mode: ExecutorMode, call: Any) -> None:
        after_kernel(mode, call)
        problems.extend(_wrong_books(mode))

    monkeypatch.setattr(ExecutorMode, "after_kernel", checked)

    def survive(loop: Loop, steps: int = 5, *, is_counted_late: bool = False) -> RunReport:
        trace, (plain, _) = loop.trace(), loop.run(steps)
        tight = machine(gpu_memory=trace.peak_allocated_bytes // 2)
        for plan in (
            evict_everything(trace, machine(), tiers="host"),
            evict_everything(trace, tight, tiers="both"),
            build_plan(trace, Moves.empty(), tight, planner="on-demand"),
        ):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", OffloadWarning)
                result, report = loop.run(steps, plan)
            assert_same_bits(plain, result)
            if is_counted_late:
                problems[:] = [problem for problem in problems if "over budget" not in problem]
            else:
                assert report.peak_bytes <= report.budget_bytes
            assert problems == []
        return report  # type: ignore[no-any-return]

    return survive


def _wrong_books(mode: ExecutorMode) -> list[str]:
    residency, wrong = mode.residency, []
    residency.bury()
    held = 0
    for holding in residency.holdings():
        storage = holding.state.reference()
        if storage is None:
            continue
        nbytes = torch._C.StorageBase.nbytes(storage)  # type: ignore[attr-defined]
        expected = holding.state.nbytes if holding.is_resident else 0
        held += holding.allocated_bytes if holding.is_resident else 0
        if nbytes != expected:
            wrong.append(f"kernel {mode.kernel}: {nbytes} bytes where {expected} are booked")
    if residency.used_bytes != held + mode.residency.untracked_bytes:
        wrong.append(f"kernel {mode.kernel}: {residency.used_bytes} booked, {held} held")
    if residency.used_bytes > residency.capacity_bytes:
        wrong.append(f"kernel {mode.kernel}: {residency.used_bytes} bytes are over budget")
    return wrong
