"""Errors of users and devices: clear, survivable, and nothing is left behind."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.executor.fake_kvikio import installed

import teraio
from teraio.contracts.plan import Moves
from teraio.errors import CapacityError, InputError, OffloadWarning
from teraio.planner.plan_building import build_plan
from teraio.planner.policies.evict_everything import evict_everything
from teraio.profiler.allocator_events import AllocatorWatch

SCRIPT = """
import json, os, resource, signal, sys, torch
import teraio
torch.set_num_threads(1)

def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)])
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)

def step(model, optimizer, number):
    optimizer.zero_grad()
    batch = torch.randn(32, 64, generator=torch.Generator().manual_seed(number))
    loss = model(batch).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss.item()

plain = build()
losses = [step(*plain, number) for number in range(5)]
plan, directory = sys.argv[1:3]
options = json.loads(sys.argv[3])
model, optimizer = build()
"""

STORES: list[dict[str, Any]] = [
    {"ssd_backend": "file", "folders": 3},
    {"ssd_backend": "gds", "folders": 1},
]
some_stores = pytest.mark.parametrize("store", STORES, ids=str)
"""System calls, striped, and kvikio (here a small one of our own)."""


class UserError(Exception):
    """What the training code raises."""


class Failing(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        raise UserError("backward")


def test_errors_of_the_training_code(survives: Any, loop: Any, train: Any, batch: Any) -> None:
    """In forward, backward, the optimizer's closure and an operator; then training goes on."""

    def fail(error: str) -> float:
        raise UserError(error)

    def step(model: Any, optimizer: Any, number: int) -> float:
        attempts: list[Any] = [
            lambda: (model(batch(0)), fail("forward")),
            lambda: Failing.apply(model(batch(0))).sum().backward(),  # type: ignore[no-untyped-call]
            lambda: optimizer.step(lambda: fail("optimizer")),
            lambda: torch.mm(model.layers[0].weight, torch.zeros(3, 3)),
        ]
        if 0 < number <= len(attempts):
            with pytest.raises((UserError, RuntimeError)):
                attempts[number - 1]()
        return float(train(model, optimizer, number))

    assert survives(loop(step, profiled=train), 7).drift > 0


def test_a_kernel_that_is_too_large(loop: Any, train: Any, machine: Any) -> None:
    """The error names what is missing; whoever catches it can go on."""
    training = loop(train)
    trace = training.trace()
    tight = machine(gpu_memory=trace.peak_allocated_bytes // 2)
    plan = build_plan(trace, Moves.empty(), tight, planner="on-demand")
    plain, _ = training.run()
    model, optimizer = training.made()
    losses = []
    with pytest.warns(OffloadWarning, match="does not fit"):
        run = teraio.execute(plan, model, optimizer)
    with run:
        for number in range(5):
            with pytest.raises(CapacityError, match=r"needs 40\.0 MB more"):
                torch.ones(10**7)
            losses.append(train(model, optimizer, number))
    assert losses == plain[0]


@pytest.mark.parametrize("kind", ["evict everything", "on demand", "greedy"])
@pytest.mark.filterwarnings("ignore:the plan does not fit")
@pytest.mark.usefixtures("allocator_sees_all")
def test_the_budget_by_the_allocator(
    kind: str, loop: Any, layers: Any, train: Any, batch: Any, machine: Any
) -> None:
    """Not by the executor's own books: with evaluation, other shapes and a teacher it does not know
    of, under half of what training alone needs and the teacher.
    """

    def build() -> Any:
        model = layers()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        optimizer.teacher = layers(64, 1)  # type: ignore[attr-defined]
        return model, optimizer

    def step(model: Any, optimizer: Any, number: int) -> float:
        with torch.no_grad():
            optimizer.teacher(batch(number))
            model(batch(50 + number))
        return float(train(model, optimizer, number, rows=16 + 8 * (number % 3)))

    training = loop(step, build, profiled=lambda m, o, i: train(m, o, i))
    trace = training.trace()
    budget_bytes = trace.peak_allocated_bytes // 2 + 16 * 1024
    hardware = machine(gpu_memory=budget_bytes)
    if kind == "greedy":
        plan = teraio.plan(trace, hardware, planner="greedy")
    elif kind == "on demand":
        plan = build_plan(trace, Moves.empty(), hardware, planner=kind)
    else:
        plan = evict_everything(trace, hardware, tiers="both")
    # Garbage of earlier tests would be freed inside the window, and its allocation is not in it.
    gc.collect()
    with AllocatorWatch() as watch:
        model, optimizer = training.made()
        with teraio.execute(plan, model, optimizer):
            for number in range(2):
                step(model, optimizer, number)
            with watch.window():
                for number in range(2, 6):
                    step(model, optimizer, number)
    assert 0 < watch.peak_bytes <= budget_bytes


def test_a_budget_of_exactly_the_peak(loop: Any, train: Any, machine: Any) -> None:
    """What the simulator says suffices, also for the first step, which makes the state."""
    training = loop(train)
    trace, (plain, _) = training.trace(), training.run()
    plan = evict_everything(trace, machine(), tiers="both")
    peak_bytes = teraio.simulate(trace, plan, machine()).metadata.peak_gpu_bytes
    assert peak_bytes < trace.peak_allocated_bytes // 3
    result, report = training.run(5, plan, gpu_memory=peak_bytes)
    assert result[0] == plain[0]
    assert report.peak_bytes <= peak_bytes
    assert report.demand_fetches == 0


@some_stores
def test_a_full_disk(store: dict[str, Any], planned: Path, tmp_path: Path) -> None:
    """Hazards S1 and S10: an error with path and bytes, the GPU copies kept, and on it goes."""
    result = run_script(
        """
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        unlimited, seen, errors = resource.RLIM_INFINITY, [], 0
        with teraio.execute(plan, model, optimizer, **options) as run:
            for number in range(5):
                for attempt in range(100):
                    limit = 20000 if number == 2 and attempt < 5 else unlimited
                    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited))
                    try:
                        seen.append(step(model, optimizer, number))
                        break
                    except teraio.errors.StoreError as error:
                        errors += 1
                        assert directory in str(error) and "wanted" in str(error), error
        assert errors >= 5
        assert seen == losses, (seen, losses)
        for one, other in zip(model.parameters(), plain[0].parameters()):
            assert torch.equal(one, other)
        """,
        planned,
        tmp_path,
        store,
    )
    assert result.returncode == 0, result.stderr


@some_stores
def test_a_killed_run(store: dict[str, Any], planned: Path, tmp_path: Path) -> None:
    """Hazard S2: kill -9 leaves nothing behind, and the next run in the same folder is right."""
    killed = run_script(
        """
        with teraio.execute(plan, model, optimizer, **options) as run:
            for number in range(3):
                step(model, optimizer, number)
            optimizer.register_step_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            step(model, optimizer, 3)
        """,
        planned,
        tmp_path,
        store,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert files_in(tmp_path) == []
    again = run_script(
        """
        with teraio.execute(plan, model, optimizer, **options) as run:
            assert [step(model, optimizer, number) for number in range(5)] == losses
        """,
        planned,
        tmp_path,
        store,
    )
    assert again.returncode == 0, again.stderr
    assert files_in(tmp_path) == []


def test_a_script_that_just_ends(planned: Path, tmp_path: Path) -> None:
    """Inside the block, without leaving it: no hang, and the script's own exit code."""
    result = run_script(
        """
        run = teraio.execute(plan, model, optimizer, **options)
        run.__enter__()
        for number in range(3):
            step(model, optimizer, number)
        sys.exit(3)
        """,
        planned,
        tmp_path,
    )
    assert result.returncode == 3, result.stderr
    assert "Traceback" not in result.stderr


def test_folders_that_cannot_be_used(loop: Any, train: Any, machine: Any, tmp_path: Path) -> None:
    """Named before training begins; the model is untouched and a run elsewhere is possible."""
    training = loop(train)
    plan = evict_everything(training.trace(), machine(), tiers="ssd")
    (tmp_path / "file").touch()
    for name in ("missing", "file"):
        with pytest.raises(InputError, match=f"{name}: no such directory"):
            training.run(1, plan, ssd_path=tmp_path / name)
    result, _ = training.run(2, plan, ssd_path=tmp_path)
    assert result[0] == training.run(2)[0][0]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan for the script's training that keeps nothing in GPU memory, on disk."""
    folder = tmp_path_factory.mktemp("plans")
    body = """
    from dataclasses import replace
    from teraio.contracts.hardware import Hardware
    from teraio.planner.policies.evict_everything import evict_everything
    with teraio.profile(model, optimizer) as profile:
        for number in range(8):
            step(model, optimizer, number)
    hardware = Hardware.preset("cpu").with_budgets(gpu_memory="1GB", host_memory="100MB")
    # Small units, so that a small model is spread over all files.
    hardware = replace(hardware, ssd=(replace(hardware.ssd[0], preferred_io_bytes=8192),))
    evict_everything(profile.trace, hardware, tiers="ssd").save(plan)
    """
    result = run_script(body, folder / "ssd.plan", folder)
    assert result.returncode == 0, result.stderr
    return folder / "ssd.plan"


def run_script(
    body: str, plan: Path, directory: Path, store: dict[str, Any] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run training in a process of its own, which may be killed or limited.

    ``store`` is one of STORES; its folders lie in ``directory``, kvikio beside it.
    """
    options = dict(store or {})
    folders = [directory / f"disk{number}" for number in range(options.pop("folders", 0))]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    options["ssd_path"] = [str(folder) for folder in folders] or str(directory)
    path = list(sys.path)
    if options.get("ssd_backend") == "gds":
        path.insert(0, installed(directory.with_name(f"{directory.name}-kvikio")))
    return subprocess.run(
        [
            *(sys.executable, "-c", SCRIPT + textwrap.dedent(body)),
            *(str(plan), str(directory), json.dumps(options)),
        ],
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"},
    )


def files_in(directory: Path) -> list[Path]:
    """What is left there, apart from the folders."""
    return [path for path in directory.rglob("*") if not path.is_dir()]
