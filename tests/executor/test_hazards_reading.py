"""Whatever reads a parameter that is away, by whichever door, finds its bytes."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import dlpack

import teraio
from teraio.planner.policies.evict_everything import evict_everything


def _saved(tensor: torch.Tensor, save: Callable[..., None], **options: Any) -> torch.Tensor:
    file = io.BytesIO()
    save(tensor, file, **options)
    file.seek(0)
    loaded: torch.Tensor = torch.load(file)
    return loaded


def _at_pointer(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)


READERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "print": repr,
    "format": lambda p: f"{p.detach().flatten()[0]:.3f}",
    "tolist": lambda p: p.tolist(),
    "item": lambda p: p.detach().flatten()[3].item(),
    "deepcopy": lambda p: copy.deepcopy(p).tolist(),
    "pickle": lambda p: pickle.loads(pickle.dumps(p)).tolist(),
    "numpy": lambda p: p.detach().numpy().tobytes(),
    "asarray": lambda p: np.asarray(p.detach()).tobytes(),
    "memoryview": lambda p: p.detach().numpy().data.tobytes(),
    "from_dlpack": lambda p: dlpack.from_dlpack(p.detach()).tolist(),
    "to_dlpack": lambda p: dlpack.from_dlpack(vars(torch)["to_dlpack"](p.detach())).tolist(),
    "data_ptr": lambda p: _at_pointer(p.data_ptr(), p.numel() * 4),
    "storage data_ptr": lambda p: _at_pointer(p.untyped_storage().data_ptr(), p.numel() * 4),
    "storage size": lambda p: (p.untyped_storage().nbytes(), len(p.untyped_storage())),
    "storage item": lambda p: p.untyped_storage()[5],
    "storage clone": lambda p: p.untyped_storage().clone()[5],
    "storage copy": lambda p: torch.UntypedStorage(p.numel() * 4).copy_(p.untyped_storage(), False)[
        5
    ],
    "storage deepcopy": lambda p: copy.deepcopy(p.untyped_storage())[5],
    "set_": lambda p: torch.empty(0).set_(p.untyped_storage(), 0, p.shape).tolist(),  # type: ignore[call-overload]
    "share_memory_": lambda p: p.detach().share_memory_().tolist(),
    "save": lambda p: _saved(p, torch.save).tolist(),
    "save by another name": lambda p: _saved(p, torch.serialization.save).tolist(),
    "legacy save": lambda p: _saved(p, torch.save, _use_new_zipfile_serialization=False).tolist(),
}


@pytest.fixture(scope="module")
def shared() -> dict[str, Any]:
    """Filled by the first test."""
    return {}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_reading(name: str, shared: dict[str, Any], loop: Any, train: Any, machine: Any) -> None:
    """In the middle of a run, of all parameters; training goes on to the same bits."""
    reader, training = READERS[name], loop(train)
    if not shared:
        shared["plan"] = evict_everything(training.trace(), machine(), tiers="both")
    model, optimizer = training.made()
    for number in range(2):
        train(model, optimizer, number)
    expected = [reader(parameter) for parameter in model.parameters()]
    last = train(model, optimizer, 2)

    model, optimizer = training.made()
    with teraio.execute(shared["plan"], model, optimizer) as run:
        for number in range(2):
            train(model, optimizer, number)
        holdings = run._mode.residency.holdings()  # type: ignore[union-attr]
        assert not all(holding.is_resident for holding in holdings)
        assert [reader(parameter) for parameter in model.parameters()] == expected
        assert train(model, optimizer, 2) == last


def test_saves_fix_nothing(loop: Any, train: Any, machine: Any, tmp_path: Path) -> None:
    """Pointers that a save takes end with it: memory can be had again under a tight budget."""
    training = loop(train)
    trace = training.trace()
    plan = evict_everything(trace, machine(gpu_memory=trace.peak_allocated_bytes // 2))
    model, optimizer = training.made()
    with teraio.execute(plan, model, optimizer) as run:
        for number in range(3):
            train(model, optimizer, number)
            torch.save(model.state_dict(), tmp_path / "model.pt")
        assert run.report.peak_bytes <= run.budget_bytes
        assert not any(h.is_fixed for h in run._mode.residency.holdings())  # type: ignore[union-attr]


def test_nothing_stays_patched(loop: Any, train: Any, machine: Any) -> None:
    """After the run every function is the one that it was."""
    owners = (torch, torch.Tensor, torch.UntypedStorage, torch.serialization, torch.utils.dlpack)
    before = [dict(vars(owner)) for owner in owners]
    training = loop(train)
    training.run(2, evict_everything(training.trace(), machine()))
    for owner, names in zip(owners, before, strict=True):
        changed = [name for name, value in vars(owner).items() if names.get(name) is not value]
        assert changed == []
