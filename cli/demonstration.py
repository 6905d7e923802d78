"""The whole chain on one small model: train, profile, probe, plan, predict, execute, compare."""

from __future__ import annotations

import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

import teraio
from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Plan
from teraio.contracts.timeline import Timeline
from teraio.executor.execution import RunReport
from teraio.profiler.allocator_events import AllocatorWatch
from teraio.profiler.models import build_model
from teraio.traces.trace import Trace

BUDGET_SHARE = 0.5
"""The demonstration's GPU has this share of the memory that the training needs."""

HOST_SHARE = 0.25
"""Host memory for offloading, as a share of the same; what else must leave goes to the file."""

BATCH, SEQUENCE, MICRO_BATCHES = 4, 128, 2
WARM_UP_STEPS, MEASURED_STEPS = 2, 5
MODEL_SIZES = {"vocabulary": 256, "hidden": 512, "intermediate": 1408, "heads": 8, "layers": 3}

Report = Callable[[str], None]


@dataclass(frozen=True)
class Demonstration:
    """What came out; the plain run is the reference for losses and for the ideal time."""

    trace: Trace
    hardware: Hardware
    plan: Plan
    predicted: Timeline
    run: RunReport
    plain_seconds: float
    plain_losses: list[float]
    executed_losses: list[float]
    parameters_equal: bool
    allocator_peak_bytes: int

    @property
    def bit_identical(self) -> bool:
        """Whether all losses and all parameters are the same, bit for bit."""
        return self.plain_losses == self.executed_losses and self.parameters_equal

    @property
    def measured_seconds(self) -> float:
        """Median iteration under the plan."""
        return self.run.measured_seconds


class Training:
    """A byte-level Llama on the Python standard library's sources, with AdamW."""

    def __init__(self, text: torch.Tensor) -> None:
        torch.manual_seed(0)
        self.text = text
        self.model = build_model("tiny-llama", **MODEL_SIZES)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._generator = torch.Generator().manual_seed(1)

    def step(self) -> float:
        """One iteration of gradient accumulation; returns its loss."""
        self.optimizer.zero_grad()
        total = 0.0
        for _ in range(MICRO_BATCHES):
            tokens, targets = self._batch()
            loss = self.model(tokens, targets) / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return total

    def _batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(self.text) - SEQUENCE - 1, (BATCH,), generator=self._generator)
        rows = torch.stack([self.text[s : s + SEQUENCE + 1] for s in starts.tolist()]).long()
        return rows[:, :-1], rows[:, 1:]


def library_text(max_bytes: int = 2_000_000) -> torch.Tensor:
    """Sources of the Python standard library as uint8, the same on every call, (bytes,)."""
    collected = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        collected += path.read_bytes()
        if len(collected) >= max_bytes:
            break
    return torch.frombuffer(collected[:max_bytes], dtype=torch.uint8).clone()


def demonstrate(ssd_path: Path, report: Report = lambda _: None) -> Demonstration:
    """Run the chain; offloaded bytes lie in ``ssd_path``. Uses one core for compute."""
    text = library_text()
    with _one_compute_thread():
        report("training without offloading")
        plain = Training(text)
        plain_losses, plain_seconds = _train(plain)
        report("profiling one iteration")
        trace = _profile(Training(text))
        report("probing this machine")
        hardware = _budgeted(trace, ssd_path)
        report("planning")
        plan = teraio.plan(trace, hardware)
        report("predicting")
        predicted = teraio.simulate(trace, plan, hardware)
        report("training under the plan")
        training = Training(text)
        with teraio.execute(plan, training.model, training.optimizer, ssd_path=ssd_path) as run:
            executed_losses = [training.step() for _ in plain_losses]
        report("checking the peak with the allocator's own events")
        peak_bytes = _allocator_peak(text, plan, ssd_path)
    pairs = zip(plain.model.parameters(), training.model.parameters(), strict=True)
    return Demonstration(
        trace=trace,
        hardware=hardware,
        plan=plan,
        predicted=predicted,
        run=run.report,
        plain_seconds=plain_seconds,
        plain_losses=plain_losses,
        executed_losses=executed_losses,
        parameters_equal=all(torch.equal(a, b) for a, b in pairs),
        allocator_peak_bytes=peak_bytes,
    )


def _train(training: Training) -> tuple[list[float], float]:
    losses, seconds = [], []
    for _ in range(WARM_UP_STEPS + MEASURED_STEPS):
        start = time.perf_counter()
        losses.append(training.step())
        seconds.append(time.perf_counter() - start)
    return losses, statistics.median(seconds[WARM_UP_STEPS:])


def _profile(training: Training) -> Trace:
    with teraio.profile(training.model, training.optimizer) as profile:
        while not profile.done:
            training.step()
            profile.step()
    return profile.trace


def _budgeted(trace: Trace, ssd_path: Path) -> Hardware:
    probed = teraio.probe(directory=ssd_path, quick=True)
    return probed.with_budgets(
        gpu_memory=int(BUDGET_SHARE * trace.peak_allocated_bytes),
        host_memory=int(HOST_SHARE * trace.peak_allocated_bytes)
        + sum(ssd.bounce_bytes for ssd in probed.ssd),
    )


def _allocator_peak(text: torch.Tensor, plan: Plan, ssd_path: Path) -> int:
    """Most bytes that the allocator held during one iteration under the plan."""
    with AllocatorWatch() as watch:
        training = Training(text.clone())
        with teraio.execute(plan, training.model, training.optimizer, ssd_path=ssd_path):
            for _ in range(WARM_UP_STEPS):
                training.step()
            with watch.window():
                training.step()
    return watch.peak_bytes


@contextmanager
def _one_compute_thread() -> Iterator[None]:
    # Transfers run in threads of their own; on two cores they need the other one.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
