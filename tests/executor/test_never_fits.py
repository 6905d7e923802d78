"""Models whose state is three times the GPU's budget train from weights made in their tiers."""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.executor.never_fitting import (
    IMPLEMENTATIONS,
    SIZES,
    STEPS,
    adamw,
    assert_same,
    build,
    build_on_meta,
    exactly,
    initialise,
    peaks,
    plan,
    state_bytes,
    step,
    tensors_of,
    trace,
    train_plainly,
    with_small_buffers,
)
from torch import nn

import teraio
from teraio.contracts.hardware import Hardware
from teraio.errors import InputError
from teraio.executor.execution import Execution
from teraio.profiler.models import model_config
from teraio.profiler.training.loop import build_training
from teraio.profiler.training.setup import TrainingSetup


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_built_inside_the_budget(implementation: str) -> None:
    """The constructor's own random values; the first step stays within the budget too."""
    made = plan(implementation)
    assert state_bytes(trace(implementation)) >= 3 * made.metadata.gpu_memory_bytes
    losses, reference = train_plainly(implementation=implementation)
    with teraio.execute(made) as run:
        torch.manual_seed(0)
        model = run.build(build)
        optimizer = adamw(model, implementation)
        assert [step(model, optimizer, number) for number in range(STEPS)] == losses
        assert max(peaks(run)) <= made.metadata.gpu_memory_bytes
    assert_same(tensors_of(model, optimizer), reference)
    assert run.report.moves_found == run.report.moves_planned
    assert (run.report.first_drift, run.report.demand_fetches) == ("", 0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tiers_that_hold_exactly_what_is_planned(implementation: str) -> None:
    """The first step finds room in the planned arenas: there is no other."""
    options = exactly(plan(implementation))
    losses, reference = train_plainly(implementation=implementation)
    with teraio.execute(**options) as run:
        torch.manual_seed(0)
        model = run.build(build)
        optimizer = adamw(model, implementation)
        assert [step(model, optimizer, number) for number in range(STEPS)] == losses
        assert max(peaks(run)) <= run.budget_bytes
    assert_same(tensors_of(model, optimizer), reference)
    # Everything has found its place by the second step.
    assert (run.report.first_drift, run.report.demand_fetches) == ("", 0)


def initialised(tied: bool = False) -> nn.Module:
    """A model that fits, initialised as the one on the meta device is."""
    model = build_on_meta(tied=tied).to_empty(device="cpu")
    if tied:  # to_empty gives each module memory of its own.
        model.head.weight = model.embedding.weight  # type: ignore[union-attr]
    for module in model.modules():
        initialise(module)
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_materialised_from_the_meta_device(tied: bool) -> None:
    """Same seed, same bits; parameters stay the objects that the optimizer knows, ties stay."""
    losses, reference = train_plainly(lambda: initialised(tied))
    model = build_on_meta(tied=tied)
    optimizer = adamw(model)
    parameters = list(model.parameters())
    made = plan(tied=tied)
    with teraio.execute(made, model, optimizer) as run:
        torch.manual_seed(0)
        run.materialise(model, initialise=initialise)
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
        assert (model.head.weight is model.embedding.weight) is tied  # type: ignore[union-attr]
        assert [step(model, optimizer, number) for number in range(STEPS)] == losses
        assert max(peaks(run)) <= made.metadata.gpu_memory_bytes
    assert_same(tensors_of(model, optimizer), reference)


def test_parameters_go_to_their_places() -> None:
    """Before the first kernel of training every parameter lies where the plan has it then."""
    made = plan()
    with teraio.execute(made) as run:
        model = build_on_meta()
        run.materialise(model, initialise=initialise)
        mode = run._mode
        assert mode is not None
        num_away = 0
        for name, parameter in model.named_parameters():
            row = mode.schedule.row_of_name[name]
            holding = mode.registry.find(parameter).attachment  # type: ignore[union-attr]
            place = mode.placement.place_of_row(row)
            assert holding.is_resident == (place is None), name
            if place is not None:
                assert (holding.slot.store.name, holding.slot.offset_bytes) == place
                num_away += 1
        assert num_away >= 10


class Scaled(nn.Module):
    """A parameter and a buffer that only the constructor can initialise, and a layer that can."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 2.0))
        self.register_buffer("shift", torch.ones(8), persistent=False)
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape."""
        result: torch.Tensor = self.layer(x) * self.scale + self.shift
        return result


def test_modules_that_initialise_themselves() -> None:
    """``reset_parameters`` as without a run; who has none is named, and what to do."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        other = Scaled()
    with teraio.execute(plan()) as run:
        torch.manual_seed(0)
        run.materialise(model)
        with pytest.raises(InputError, match=r"nothing gives values to model1\.scale: Scaled"):
            run.materialise(other)
        assert other.scale.is_meta
    assert_same(model.state_dict(), reference.state_dict())


def test_builds_only_modules_and_only_inside() -> None:
    """Both said in a message."""
    run = teraio.execute(plan())
    with pytest.raises(InputError, match="inside the `with"):
        run.build(build)
    with run, pytest.raises(InputError, match="made a Tensor"):
        run.build(lambda: torch.zeros(3))  # type: ignore[type-var]


def test_leaving_without_bringing_back() -> None:
    """What is away has no memory afterwards, and says so; what is there is still right."""
    made = plan()
    _, reference = train_plainly()
    with teraio.execute(made, on_exit="discard") as run:
        torch.manual_seed(0)
        model = run.build(build)
        optimizer = adamw(model)
        for number in range(STEPS):
            step(model, optimizer, number)
    tensors = dict(model.named_parameters())
    away = [name for name, tensor in tensors.items() if tensor.is_meta]
    assert 0 < len(away) < len(tensors)
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        tensors[away[0]].cpu()
    for name, tensor in tensors.items():
        assert tensor.is_meta or torch.equal(tensor, reference[name])
    with pytest.raises(InputError, match="on_exit"):
        teraio.execute(made, on_exit="keep")


SCRIPT = """
import sys
sys.path.insert(0, {root!r})
import torch
from tests.executor.never_fitting import STEPS, adamw, build, step
torch.set_num_threads(1)
torch.manual_seed(0)
model = build()
optimizer = adamw(model)
print([step(model, optimizer, number) for number in range(STEPS)], file=open({output!r}, "w"))
"""


def test_a_script_of_a_model_that_never_fits(tmp_path: Path) -> None:
    """Unmodified, through the command line: same losses, within the budget from the start."""
    made, root, output = plan(), Path(__file__).resolve().parents[2], tmp_path / "losses"
    made.save(tmp_path / "never.plan")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(root=str(root), output=str(output)))
    command = [sys.executable, "-m", "teraio.cli", "run", "--json", "--device", "cpu"]
    done = subprocess.run(
        [*command, str(tmp_path / "never.plan"), str(script)],
        env={**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert output.read_text().strip() == str(train_plainly()[0])
    assert figures["steps"] == STEPS
    assert figures["peak_bytes"] <= made.metadata.gpu_memory_bytes
    assert figures["moves_found"] == figures["moves_planned"]


def test_the_benchmark_runs(tmp_path: Path) -> None:
    """At toy size on the CPU: planned without a GPU, and the losses of the reference."""
    root = Path(__file__).resolve().parents[2]
    script, output = root / "benchmarks" / "never_fits.py", tmp_path / "found.json"
    command = [sys.executable, str(script), "--smoke", "--steps", "9", "--ssd-path", str(tmp_path)]
    done = subprocess.run(
        [*command, "--watch-disk", "3", "--kept", str(tmp_path / "kept"), "--output", str(output)],
        env={**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout[done.stdout.index("\n{\n") :])
    assert json.loads(output.read_text()) == figures
    assert {path.suffix for path in (tmp_path / "kept").iterdir()} == {".trace", ".plan"}
    assert figures["same_losses"] is True
    assert figures["seconds_so_far"] == figures["run"]["all_step_seconds"]
    assert figures["run"]["peak_bytes"] <= figures["gpu_memory_bytes"]
    assert len(figures["run"]["disks"]) == 3
    for rates in figures["run"]["disks"]:
        assert 0 < rates["duplex_read"] <= rates["read"]
    counted = [figures["seconds_so_far"][number] for number in (5, 6, 8)]
    assert figures["run"]["step_seconds"] == statistics.median(counted)
    assert figures["run"]["moves_found"] >= 0.95 * figures["run"]["moves_planned"] > 0


class Trained:
    """The library's own training loop, with losses."""

    def __init__(self, setup: TrainingSetup, device: str) -> None:
        torch.manual_seed(0)
        self.training = build_training(setup, device)
        self.losses: list[torch.Tensor] = []
        self.model = self.training.model
        self.model.register_forward_hook(lambda *call: self.losses.append(call[2].detach()))

    def run(self) -> None:
        """A few iterations on random tokens."""
        torch.manual_seed(1)
        for _ in range(STEPS):
            self.training.run_iteration()

    def result(self) -> tuple[list[float], dict[str, torch.Tensor]]:
        """Losses, and all tensors."""
        return [float(x) for x in self.losses], tensors_of(self.model, self.training.optimizer)


def result_without_offloading(
    setup: TrainingSetup, device: str
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and all tensors."""
    plain = Trained(setup, device)
    plain.run()
    return plain.result()


def train_as_planned_without_a_gpu(setup: TrainingSetup, device: str, folder: Path) -> Execution:
    """With a third of the state on the device, and as without offloading, which is compared."""
    traced = teraio.trace(
        setup.model,
        sequence=setup.sequence,
        micro_batch_size=setup.micro_batch_size,
        checkpoint=setup.checkpoint,
        gpu="h200",
    )
    total = state_bytes(traced)
    budget = traced.peak_allocated_bytes - total * 2 // 3
    machine = with_small_buffers(Hardware.preset("h200"), total)
    made = teraio.plan(
        traced, machine, planner="greedy", gpu_memory=budget, host_memory=total * 2 // 5
    )
    assert {"host", "ssd"} == set(made.moves.device)
    wanted = result_without_offloading(setup, device)
    again = result_without_offloading(setup, device)
    assert again[0] == wanted[0], "not a comparison: training itself differs from run to run"
    assert_same(again[1], wanted[1])
    del again
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with teraio.execute(made, device=device, ssd_path=folder) as run:
        trained: list[Trained] = []

        def make() -> nn.Module:
            trained.append(Trained(setup, device))
            return trained[0].model

        run.build(make)
        trained[0].run()
        assert max(peaks(run)) <= budget
        if device == "cuda":
            # No trace without a GPU tells what kernels use inside themselves.
            assert torch.cuda.max_memory_allocated() <= 1.1 * budget
    losses, tensors = trained[0].result()
    assert losses == wanted[0]
    assert_same(tensors, wanted[1])
    return run


def test_planned_without_a_gpu(tmp_path: Path) -> None:
    """The path of the test on a GPU, at toy size on the CPU."""
    setup = TrainingSetup(
        model=model_config("tiny-llama", **SIZES), sequence=16, micro_batch_size=2
    )
    report = train_as_planned_without_a_gpu(setup, "cpu", tmp_path).report
    assert report.moves_found >= 0.95 * report.moves_planned


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu(tmp_path: Path) -> None:
    """5 GB of state in 2 GB of the GPU, 2 GB of host memory and a file."""
    # With warn_only the attention's backward would still add up in any order.
    torch.use_deterministic_algorithms(True)
    try:
        setup = TrainingSetup(
            model=model_config("bench-0.7b", layers=4),
            sequence=512,
            micro_batch_size=2,
            checkpoint="non-reentrant",
        )
        report = train_as_planned_without_a_gpu(setup, "cuda", tmp_path).report
    finally:
        torch.use_deterministic_algorithms(False)
    assert report.moves_found >= 0.98 * report.moves_planned
