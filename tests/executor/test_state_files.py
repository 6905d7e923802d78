"""Checkpoints and whole states, read and written tensor by tensor inside the budget."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.executor.never_fitting import (
    IMPLEMENTATIONS,
    STEPS,
    adamw,
    assert_same,
    build,
    build_on_meta,
    peaks,
    plan,
    step,
    tensors_of,
    train_plainly,
)
from torch import nn

import teraio
from teraio.errors import InputError
from teraio.executor import state_files
from teraio.executor.execution import Execution
from teraio.executor.residency import Residency

Peak = dict[str, int]


@pytest.fixture
def peak(monkeypatch: pytest.MonkeyPatch) -> Peak:
    """Most bytes that any run has held, looked at whenever memory is taken."""
    seen: Peak = {"bytes": 0}
    fetch = Residency.fetch

    def watched(residency: Residency, *arguments: Any) -> None:
        fetch(residency, *arguments)
        seen["bytes"] = max(seen["bytes"], residency.used_bytes)

    monkeypatch.setattr(Residency, "fetch", watched)
    return seen


def shards_of(model: nn.Module, folder: Path) -> Path:
    """The model's state in two files with an index, as other libraries write it."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = sorted(state)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: state[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def run_from(checkpoint: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The parameters that a model materialised from a checkpoint begins with."""
    torch.manual_seed(1)
    with teraio.execute(plan()) as run:
        model = run.build(build).to(dtype)
        run.materialise(model, checkpoint=checkpoint)
        assert max(peaks(run), default=0) <= run.budget_bytes
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_from_a_checkpoint_of_one_file_or_of_shards(tmp_path: Path) -> None:
    """The same values, cast where the model has another dtype."""
    torch.manual_seed(0)
    reference = build()
    wanted = {name: parameter.detach() for name, parameter in reference.named_parameters()}
    save_file(reference.state_dict(), tmp_path / "one.safetensors")
    assert_same(run_from(tmp_path / "one.safetensors"), wanted)
    index = shards_of(reference, tmp_path)
    assert_same(run_from(index), wanted)
    assert_same(run_from(tmp_path), wanted)
    narrow = {name: tensor.bfloat16() for name, tensor in wanted.items()}
    assert_same(run_from(tmp_path, torch.bfloat16), narrow)


def test_a_meta_model_from_a_checkpoint(tmp_path: Path) -> None:
    """Nothing else initialises it: neither its constructor nor ``reset_parameters``."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    file = tmp_path / "small.safetensors"
    save_file(reference.state_dict(), file)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    parameters = list(model.parameters())
    with teraio.execute(plan()) as run:
        run.materialise(model, checkpoint=file)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert_same(model.state_dict(), reference.state_dict())


def test_tied_weights_lie_in_a_checkpoint_once(tmp_path: Path) -> None:
    """Under either name."""
    torch.manual_seed(0)
    reference = build(tied=True)
    state = dict(reference.state_dict())
    del state["embedding.weight"]
    save_file(state, tmp_path / "tied.safetensors")
    with teraio.execute(plan(tied=True)) as run:
        model = run.build(lambda: build(tied=True))
        run.materialise(model, checkpoint=tmp_path / "tied.safetensors")
        assert model.head.weight is model.embedding.weight  # type: ignore[union-attr]
    assert_same(model.state_dict(), reference.state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("norm.weight"), r"wrong\.safetensors: lacks norm\.weight"),
        (lambda state: state.update(other=torch.ones(2)), r"has other, which training has not"),
        (
            lambda state: state.update({"norm.weight": torch.ones(3)}),
            r"norm\.weight has shape \[3\], but in training \[64\]",
        ),
    ],
)
def test_a_checkpoint_of_another_model(change: Any, message: str, tmp_path: Path) -> None:
    """Refused by name before anything is given memory."""
    state = dict(build().state_dict())
    change(state)
    save_file(state, tmp_path / "wrong.safetensors")
    model = build_on_meta()
    with teraio.execute(plan()) as run, pytest.raises(InputError, match=message):
        run.materialise(model, checkpoint=tmp_path / "wrong.safetensors")
    assert all(parameter.is_meta for parameter in model.parameters())


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    """Each said with its path: nothing there, another format, an index that leads nowhere."""
    (tmp_path / "text.safetensors").write_text("no tensors")
    (tmp_path / "bad.json").write_text("{}")
    index = shards_of(build(), tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    model = build_on_meta()
    with teraio.execute(plan()) as run:
        for path, message in (
            (tmp_path / "absent", "absent: no checkpoint there"),
            (tmp_path / "text.safetensors", "cannot be read as safetensors"),
            (tmp_path / "bad.json", "not an index of safetensors shards"),
            (index, "model-00001-of-00002.safetensors: cannot be read"),
        ):
            with pytest.raises(InputError, match=message):
                run.materialise(model, checkpoint=path)


def started(run: Execution, implementation: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer, made within the budget."""
    model = run.build(build)
    return model, adamw(model, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_resuming(implementation: str, tmp_path: Path, monkeypatch: Any, peak: Peak) -> None:
    """Two steps, a save, another run that loads it and takes the other steps: the same bits."""
    monkeypatch.setattr(state_files, "SHARD_BYTES", 100_000)
    losses, reference = train_plainly(implementation=implementation)
    made = plan(implementation)
    with teraio.execute(made, on_exit="discard") as run:
        torch.manual_seed(0)
        model, optimizer = started(run, implementation)
        assert [step(model, optimizer, number) for number in range(2)] == losses[:2]
        run.save(tmp_path / "state")
        # Training goes on as if nothing had been saved.
        assert step(model, optimizer, 2) == losses[2]
        assert run.report.demand_fetches == 0
    assert len(list((tmp_path / "state").glob("optimizer-*.safetensors"))) > 2
    with teraio.execute(made) as run:
        model, optimizer = started(run, implementation)
        run.load(tmp_path / "state", model, optimizer)
        assert [step(model, optimizer, number) for number in range(2, STEPS)] == losses[2:]
        assert run.report.warm_up_steps == 0, "the plan is followed at once"
        # The loop's last kernels of the step before are not there.
        assert run.report.demand_fetches < 0.05 * run.report.moves_planned
        assert max(peaks(run)) <= made.metadata.gpu_memory_bytes
        assert 0 < peak["bytes"] <= made.metadata.gpu_memory_bytes
    assert_same(tensors_of(model, optimizer), reference)


def test_a_saved_state_is_an_ordinary_checkpoint(tmp_path: Path) -> None:
    """Others read the model's file; it replaces an earlier state, and nothing else."""
    with teraio.execute(plan()) as run:
        torch.manual_seed(0)
        model, optimizer = started(run, "fused")
        optimizer.param_groups[0]["lr"] = 0.5
        for number in range(2):
            step(model, optimizer, number)
            run.save(tmp_path / "state")
        (tmp_path / "other").mkdir()
        with pytest.raises(InputError, match="not written by teraio"):
            run.save(tmp_path / "other")
        loaded = load_file(tmp_path / "state" / "model.safetensors")
        other = run.build(build)
        with pytest.raises(InputError, match="holds the state of 1 optimizers, the run knows 2"):
            run.load(tmp_path / "state", other, adamw(other))
        with pytest.raises(InputError, match=r"not a state that run\.save has written"):
            run.load(tmp_path / "other")
    assert_same(loaded, model.state_dict())
    with teraio.execute(plan()) as run:
        model = build_on_meta()
        with pytest.raises(InputError, match=r"nothing gives values to frequencies"):
            run.load(tmp_path / "state", model, adamw(model))
        model, optimizer = started(run, "fused")
    with teraio.execute(plan(), model) as run:
        run.load(tmp_path / "state", optimizer=optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.5


def test_torch_save_stays_within_the_budget(peak: Peak) -> None:
    """And writes what a run without offloading would have written; training goes on by the plan."""
    losses, _ = train_plainly()
    _, wanted = train_plainly(steps=2)
    made = plan()
    with teraio.execute(made, on_exit="discard") as run:
        torch.manual_seed(0)
        model, optimizer = started(run, "fused")
        for number in range(2):
            step(model, optimizer, number)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        assert 0 < peak["bytes"] <= made.metadata.gpu_memory_bytes
        assert [step(model, optimizer, number) for number in range(2, STEPS)] == losses[2:]
        assert run.report.first_drift == ""
    file.seek(0)
    loaded = torch.load(file)
    for name, tensor in loaded["model"].items():
        assert torch.equal(tensor, wanted[name]), name
    for index, state in loaded["optimizer"]["state"].items():
        for key, value in state.items():
            assert torch.equal(value, wanted[f"{index}.{key}"])
