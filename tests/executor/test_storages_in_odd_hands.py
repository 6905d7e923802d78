"""One step in which storages die, move, are resized and are kept in every way at once.

With the allocator of :mod:`tests.executor.test_gpu_memory`, that moves storages before every kernel
and wherever something is fetched on demand: the results and the books are as without it.
"""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.executor import test_gpu_memory
from tests.executor.test_gpu_memory import Restless, ToldMemory, memories  # noqa: F401

from teraio.executor import gpu_memory
from teraio.executor.execution import RunReport


class Garbage:
    """A cycle that keeps a tensor until Python looks for garbage."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.itself = tensor, self


def _resized(values: torch.Tensor) -> torch.Tensor:
    """A copy by way of memory given back and taken again, which was viewed before."""
    scratch = values * 1.0
    scratch.view(-1)
    storage = scratch.untyped_storage()
    nbytes = storage.nbytes()
    for size in (0, 4 * nbytes, nbytes):
        storage.resize_(size)
    scratch.copy_(values)
    return scratch


def _set(values: torch.Tensor) -> torch.Tensor:
    """A tensor that lies where another lay; its own memory is gone."""
    kept, source = values + 1, values + 2
    torch.ops.aten.set_.source_Tensor(kept, source)
    return kept


def _drop(values: torch.Tensor) -> None:
    """Viewed and gone before any kernel: here, by another thread, and as garbage later."""
    (values * 2).view(-1)
    Garbage(values * 3)
    box = [values * 5]
    box[0].view(-1)
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()


@pytest.mark.parametrize("kind", [ToldMemory, Restless])
def test_all_at_once(
    kind: type[ToldMemory],
    loop: Any,
    batch: Any,
    layers: Any,
    survives: Callable[..., RunReport],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The outputs of the last two steps are read as well."""
    made = request.getfixturevalue("memories")
    monkeypatch.setattr(test_gpu_memory, "KINDS", [kind])
    monkeypatch.setattr(gpu_memory, "RESERVED_SHARE", 0.0)
    history: deque[torch.Tensor] = deque(maxlen=2)

    def build() -> Any:
        history.clear()
        model = layers()
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)

    def step(model: Any, optimizer: Any, number: int) -> float:
        optimizer.zero_grad()
        output = model(batch(number))
        values = output.detach()
        if len(history) == 2:
            output = output + 0.1 * history[0]
        history.append(values)
        _drop(values)
        loss = (output + 0.001 * _resized(values) + 0.001 * _set(values)).pow(2).mean()
        loss.backward()
        optimizer.step()
        next(model.parameters()).grad.view(-1)
        if number % 3 == 0:
            gc.collect()
        return float(loss.detach())

    survives(loop(step, build=build), is_counted_late=True)
    assert sum(memory._allocator.moves for memory in made) > 0
    assert all(memory._allocator.plugs == {} for memory in made)
