"""Which operators ran, on which shapes: to compare one way of running a model with another."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Call = tuple[str, tuple[tuple[tuple[int, ...], torch.dtype], ...]]


class OperatorLog(TorchDispatchMode):
    """The operators below autograd and autocast, each with its tensors' shapes and dtypes."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.calls: list[Call] = []

    def __enter__(self) -> Self:
        TorchDispatchMode.__enter__(self)
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        if func.namespace == "aten" and func not in (torch.ops.aten.detach.default,):
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            shapes = tuple((tuple(x.shape), x.dtype) for x in tensors)
            self.calls.append((func._schema.name.removeprefix("aten::"), shapes))
        return func(*args, **kwargs)

    @property
    def names(self) -> list[str]:
        """Names of the operators, in order."""
        return [name for name, _ in self.calls]
