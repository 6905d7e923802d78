"""Threads, forks, several runs, compiled regions and Ctrl-C."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data import DataLoader, TensorDataset

import teraio
from teraio.contracts.plan import Moves
from teraio.errors import InputError, OffloadWarning
from teraio.executor.holding import Holding
from teraio.executor.iteration_log import IterationRecord
from teraio.executor.stores.queues import ThreadTransfer
from teraio.executor.tiers import Slot
from teraio.planner.plan_building import build_plan
from teraio.planner.policies.evict_everything import evict_everything
from teraio.profiler.storages import StorageState


def test_operators_of_other_threads(
    survives: Any, loop: Any, layers: Any, train: Any, batch: Any
) -> None:
    """A teacher evaluated by a pool, and weights read by a thread, while the model trains."""

    def build() -> Any:
        model = layers()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        optimizer.teacher = layers(64, 2)  # type: ignore[attr-defined]
        optimizer.pool = ThreadPoolExecutor(2)  # type: ignore[attr-defined]
        return model, optimizer

    def step(model: Any, optimizer: Any, number: int) -> Any:
        def judge(index: int) -> float:
            with torch.no_grad():
                return float(optimizer.teacher(batch(number * 10 + index)).sum())

        judged = [optimizer.pool.submit(judge, index) for index in range(3)]
        with torch.no_grad():
            mine = float(optimizer.teacher(batch(5)).sum())
        loss = train(model, optimizer, number)
        weights: list[Any] = []
        thread = threading.Thread(
            target=lambda: weights.append([p.tolist()[0] for p in model.parameters()])
        )
        thread.start()
        thread.join()
        return loss, mine, [future.result() for future in judged], weights

    survives(loop(step, build, profiled=train))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_data_loaders(workers: int, survives: Any, loop: Any, layers: Any) -> None:
    """The data set lies in GPU memory and is away when workers are forked."""
    data = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))

    def build() -> Any:
        model = layers()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        optimizer.data = data.clone()  # type: ignore[attr-defined]
        return model, optimizer

    def learn(model: Any, optimizer: Any, x: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean() + optimizer.data.sum() * 0
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    def step(model: Any, optimizer: Any, number: int) -> Any:
        loader = DataLoader(
            TensorDataset(optimizer.data),
            64,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
        )
        return [learn(model, optimizer, x) for (x,) in loader]

    def profiled(model: Any, optimizer: Any, number: int) -> Any:
        return learn(model, optimizer, optimizer.data[:64].clone())

    survives(loop(step, build, profiled), 2, is_counted_late=True)


def test_one_run_at_a_time(loop: Any, train: Any, machine: Any) -> None:
    """Hooks are the process's: a second run, in whatever thread, a profile, a second entry."""
    training = loop(train)
    plan = evict_everything(training.trace(), machine())
    model, optimizer = training.made()
    run = teraio.execute(plan, model, optimizer)
    errors: list[str] = []

    def intrude() -> None:
        other_model, other_optimizer = training.made()
        for other in (
            teraio.execute(plan, other_model, other_optimizer),
            teraio.profile(other_model, other_optimizer),
        ):
            try:
                with other:
                    pass
            except InputError as error:
                errors.append(str(error))

    with run:
        train(model, optimizer, 0)
        intrude()
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
        with pytest.raises(InputError, match="entered once"):
            run.__enter__()
        train(model, optimizer, 1)
    assert len(errors) == 4
    assert all("active already" in error for error in errors)
    with pytest.raises(InputError, match="entered once"), run:
        pass
    result, _ = training.run(2, plan)
    assert result[0] == training.run(2)[0][0]


def test_a_thread_that_outlives_the_run(loop: Any, train: Any, machine: Any) -> None:
    """It goes on as an ordinary thread."""
    training, may_go_on, sums = loop(train), threading.Event(), []
    plan = evict_everything(training.trace(), machine())
    model, optimizer = training.made()

    def late() -> None:
        may_go_on.wait(30)
        sums.append(float(sum(p.detach().sum() for p in model.parameters())))

    thread = threading.Thread(target=late)
    with teraio.execute(plan, model, optimizer):
        train(model, optimizer, 0)
        thread.start()
    may_go_on.set()
    thread.join()
    assert sums == [float(sum(p.detach().sum() for p in model.parameters()))]


@pytest.mark.slow
def test_a_thread_takes_nothing_of_the_run_to_its_end(loop: Any, train: Any, machine: Any) -> None:
    """A mode left in a thread that ends with the interpreter would abort the process."""
    left: list[Any] = []

    class Observed(threading.Thread):
        def _bootstrap(self) -> None:
            super()._bootstrap()  # type: ignore[misc]
            left.append(_get_current_dispatch_mode())

    training = loop(train)
    plan = evict_everything(training.trace(), machine(), tiers="host")
    model, optimizer = training.made()
    inside: list[Any] = []
    with teraio.execute(plan, model, optimizer):
        thread = Observed(target=lambda: inside.append(_get_current_dispatch_mode()))
        thread.start()
        thread.join()
        # The thread's last words come after it counts as ended.
        deadline = time.monotonic() + 10
        while not left and time.monotonic() < deadline:
            time.sleep(0.01)
    assert inside[0] is not None
    assert left == [None]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_compiled_regions(survives: Any, loop: Any, layers: Any, train: Any, machine: Any) -> None:
    """Without the setting that makes them operators: right, and the user is told."""

    class Compiled(layers):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.region = torch.compile(lambda x, w: torch.relu(x @ w).sin() * 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = self.region(layer(x), layer.weight)
            return x

    def build() -> Any:
        model = Compiled()
        return model, torch.optim.AdamW(model.parameters(), foreach=False)

    training = loop(train, build)
    survives(training, 3, is_counted_late=True)
    with pytest.warns(OffloadWarning, match="wrap_inductor_compiled_regions"):
        training.run(1, evict_everything(training.trace(), machine()))


@pytest.mark.filterwarnings("ignore:the plan does not fit")
def test_interrupts(loop: Any, layers: Any, train: Any, machine: Any) -> None:
    """Ctrl-C at any moment loses no byte and no account; the run can go on, or end."""

    def build() -> Any:
        model = layers()
        return model, torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, foreach=False)

    training, chance = loop(train, build), random.Random(0)
    trace = training.trace()
    tight = machine(gpu_memory=trace.peak_allocated_bytes // 2)
    plans = (
        evict_everything(trace, machine(), tiers="both"),
        build_plan(trace, Moves.empty(), tight, planner="on-demand"),
    )
    model, optimizer = training.made()
    # AdamW itself cannot be interrupted while it makes its state.
    train(model, optimizer, 0)
    before = [p.detach().clone() for p in model.parameters()]
    interrupts = 0
    handler = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    # A shell's background jobs begin with Ctrl-C ignored.
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for plan in plans * 2:
            run = teraio.execute(plan, model, optimizer)
            # What comes too late for a kernel comes when the run ends.
            with suppress(KeyboardInterrupt), run:
                for number in range(8):
                    try:
                        signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.001, 0.01))
                        train(model, optimizer, number)
                        time.sleep(0.02)
                    except KeyboardInterrupt:
                        interrupts += 1
                _assert_right_books(run)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.signal(signal.SIGINT, interrupt)
    assert interrupts >= 24
    for parameter, expected in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, expected)
    assert signal.getsignal(signal.SIGINT) is interrupt


def _assert_right_books(run: Any) -> None:
    gc.collect()
    residency = run._mode.residency
    residency.bury()
    held = sum(h.allocated_bytes for h in residency.holdings() if h.is_resident)
    assert residency.used_bytes == held + residency.untracked_bytes


def test_nothing_grows(loop: Any, train: Any, machine: Any, monkeypatch: Any) -> None:
    """Fifty iterations: objects, storages, slots, threads and memory after the tenth stay."""
    training = loop(train)
    trace = training.trace()
    plan = evict_everything(
        trace, machine(gpu_memory=trace.peak_allocated_bytes // 2), tiers="both"
    )
    model, optimizer = training.made()
    counts: list[tuple[int, ...]] = []
    threads: list[set[threading.Thread]] = []
    kinds = {Holding, StorageState, Slot, ThreadTransfer, IterationRecord, torch.Tensor}

    def count(run: Any) -> None:
        gc.collect()
        mode = run._mode
        owners, overflow = mode.residency.tiers.owners, mode.residency.tiers._overflow
        threads.append(set(threading.enumerate()))
        counts.append(
            (
                len(mode.registry),
                len(mode.residency.holdings()),
                sum(len(x._begins) for x in owners.values()),
                sum(len(x._used) for x in overflow.values()),
                len(os.listdir("/proc/self/fd")),
                len(mode.names.models),
                sum(type(x) in kinds for x in gc.get_objects()),
            )
        )

    # What earlier tests left behind goes before the first count, and not during the run.
    gc.collect()
    threads.append(set(threading.enumerate()))
    with teraio.execute(plan, model, optimizer) as run:
        for number in range(50):
            with torch.no_grad():
                (torch.ones(10 + number) * (number + 0.5)).sum()
                torch.nn.MSELoss()(torch.ones(3), torch.zeros(3))
            train(model, optimizer, number)
            if number in (10, 49):
                count(run)
    assert counts[0][:-1] == counts[1][:-1]
    assert abs(counts[0][-1] - counts[1][-1]) <= 3
    before, after_the_tenth, at_the_end = threads
    # Threads of earlier tests may end at any time.
    assert at_the_end <= after_the_tenth
    assert set(threading.enumerate()) <= before
    assert len(run.iteration_seconds) == 50
