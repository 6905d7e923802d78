"""Fully qualified names and kinds of storages that outlive a kernel: what users call their tensors.

Models and optimizers are either given (``teraio.profile(model, optimizer)``) or noticed as they
run (an unmodified script): the outermost module whose forward is called, and every optimizer that
steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import torch

from teraio.profiler.storages import storage_of


class NameBook:
    """Names by storage address, made anew on demand; an address is good until the next kernel."""

    def __init__(self) -> None:
        self.models: list[torch.nn.Module] = []
        self._parts: WeakSet[torch.nn.Module] = WeakSet()
        self.optimizers: list[torch.optim.Optimizer] = []

    def add_model(self, model: torch.nn.Module) -> None:
        """Take names from a module, unless it is part of one that is known already."""
        if model in self._parts:
            return
        inside = set(map(id, model.modules()))
        self.models = [m for m in self.models if id(m) not in inside] + [model]
        self._parts.update(model.modules())

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Take names from an optimizer's state and parameter groups."""
        if all(optimizer is not known for known in self.optimizers):
            self.optimizers.append(optimizer)

    def forget(self) -> None:
        """Keep no model and no optimizer alive any longer."""
        self.models, self.optimizers = [], []

    def names(self) -> dict[int, tuple[str, str]]:
        """(name, kind) by storage address; a shared storage bears the first of its names."""
        book: dict[int, tuple[str, str]] = {}
        for tensor, name, kind in self.tensors():
            storage = storage_of(tensor)
            if storage is not None:
                book.setdefault(storage._cdata, (name, kind))
        return book

    def tensors(self) -> Iterator[tuple[torch.Tensor, str, str]]:
        """Every named tensor as (tensor, name, kind), parameters first; some share storages."""
        parameter_names: dict[int, str] = {}
        for prefix, model in self._prefixed_models():
            for name, parameter in model.named_parameters():
                parameter_names[id(parameter)] = prefix + name
                yield parameter, prefix + name, "parameter"
            for name, buffer in model.named_buffers():
                yield buffer, prefix + name, "buffer"
        for index, optimizer in enumerate(self.optimizers):
            yield from _optimizer_tensors(optimizer, index, parameter_names)
        for prefix, model in self._prefixed_models():
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    yield parameter.grad, f"{prefix}{name}.grad", "gradient"

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """(fully qualified name, module) of every part of every model; the first model's is ""."""
        for prefix, model in self._prefixed_models():
            for name, module in model.named_modules():
                yield (prefix + name).rstrip("."), module

    def modules_of_parameters(self) -> dict[int, str]:
        """Fully qualified name of the module that owns a parameter, by the parameter's ``id``."""
        owners: dict[int, str] = {}
        for prefix, model in self._prefixed_models():
            for name, parameter in model.named_parameters():
                owners.setdefault(id(parameter), (prefix + name).rpartition(".")[0])
        return owners

    def _prefixed_models(self) -> Iterator[tuple[str, torch.nn.Module]]:
        for index, model in enumerate(self.models):
            yield ("" if index == 0 else f"model{index}."), model


def _optimizer_tensors(
    optimizer: torch.optim.Optimizer, index: int, parameter_names: dict[int, str]
) -> Iterator[tuple[torch.Tensor, str, str]]:
    prefix = "" if index == 0 else f"optimizer{index}."
    number = 0
    for group_index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            name = parameter_names.get(id(parameter), f"parameter{number}")
            number += 1
            yield parameter, prefix + name, "parameter"
            for key, value in _state_of(optimizer, parameter).items():
                if isinstance(value, torch.Tensor):
                    yield value, f"{prefix}{name}.{key}", "optimizer_state"
            if parameter.grad is not None:
                yield parameter.grad, f"{prefix}{name}.grad", "gradient"
        for key, value in group.items():
            if isinstance(value, torch.Tensor):
                yield value, f"{prefix}group{group_index}.{key}", "optimizer_state"


def _state_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    # state is a defaultdict: a plain look-up would create an entry and change the user's optimizer.
    state: dict[str, Any] = optimizer.state.get(parameter, {})
    return state
