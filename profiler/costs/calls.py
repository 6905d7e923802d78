"""The distinct operator calls behind a trace's kernels, described so that each can be made again.

Two kernels are of one call if operator, shapes, strides, dtypes, the pattern of shared storages and
all scalars agree, except that floats count only as zero or not: learning rates and bias corrections
change from step to step, while a dropout of zero takes another kernel.

A call's ``arguments`` are JSON, ``{"args": [...], "kwargs": {...}}``. In it

- a tensor is ``{"tensor": [dtype, shape, strides, storage]}``; tensors with equal ``storage``, a
  number counted from 0 in order of appearance, share their memory;
- integers, Booleans, texts and None stand for themselves, lists and tuples are lists;
- a float is ``{"float": value}``, with the value of the first occurrence, as text if not finite;
- ``{"dtype": ...}``, ``{"layout": ...}``, ``{"memory_format": ...}``, ``{"device": ...}`` hold what
  torch calls them, without ``torch.``;
- ``{"opaque": type}`` is anything else (process groups): such a call cannot be made again.

Compiled regions bring their own description: see :mod:`teraio.profiler.costs.regions`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from teraio.profiler.costs.arguments import canonical_json
from teraio.profiler.costs.work import Work, work_of
from teraio.profiler.dispatch import KernelCall
from teraio.traces.trace import Calls


class DescribedCall(NamedTuple):
    """What a compiled region says of itself, as its attribute ``described_call``."""

    arguments: str
    work: Work


class CallBook:
    """Numbers the distinct calls of a recording in order of first appearance."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._rows: list[tuple[str, str, Work]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def number(self, call: KernelCall, result: Any) -> int:
        """The row of this call in the table; ``result`` is what the operator has returned."""
        if not call.operator.positions and call.args:
            described = getattr(call.args[0], "described_call", None)
            if described is not None:
                return self._number_described(call, described)
        storages: dict[int, int] = {}
        key = (
            call.func,
            _key(call.args, storages),
            tuple((name, _key(value, storages)) for name, value in call.kwargs.items()),
        )
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._rows)
            text = describe_arguments(call.args, call.kwargs)
            self._rows.append((call.operator.name, text, work_of(call, result)))
        return number

    def _number_described(self, call: KernelCall, described: DescribedCall) -> int:
        key = (call.func, described.arguments)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._rows)
            self._rows.append((call.operator.name, *described))
        return number

    def table(self) -> Calls:
        """All calls numbered so far."""
        works = [work for _, _, work in self._rows]
        return Calls(
            call=np.arange(len(self._rows)),
            op=np.array([op for op, _, _ in self._rows], dtype=object),
            arguments=np.array([text for _, text, _ in self._rows], dtype=object),
            flops=np.array([work.flops for work in works], dtype=np.int64),
            read_bytes=np.array([work.read_bytes for work in works], dtype=np.int64),
            written_bytes=np.array([work.written_bytes for work in works], dtype=np.int64),
        )


_ZERO, _NONZERO, _TRUE, _FALSE = (object() for _ in range(4))
"""What stands for floats and Booleans in keys: 1, 1.0 and True are equal to Python."""

_PLAIN = (torch.dtype, torch.layout, torch.memory_format, torch.device)


def _key(value: Any, storages: dict[int, int]) -> Any:
    """A hashable that is equal for arguments of one call, and quick to make."""
    kind = type(value)
    if kind is int or kind is str or value is None:
        return value
    if isinstance(value, torch.Tensor):
        return _tensor_key(value, storages)
    if kind is float:
        return _NONZERO if value else _ZERO
    if kind is bool:
        return _TRUE if value else _FALSE
    if isinstance(value, (list, tuple)):
        return tuple([_key(item, storages) for item in value])
    if kind in _PLAIN or callable(value):
        return value
    if isinstance(value, dict):
        return tuple([(name, _key(item, storages)) for name, item in value.items()])
    # Handles such as process groups are wrapped anew for every call.
    return kind


def _tensor_key(tensor: torch.Tensor, storages: dict[int, int]) -> Any:
    # A fake tensor's device would be dispatched; the rest is cheap.
    try:
        address = tensor.untyped_storage()._cdata
        strides = tensor.stride()
    except RuntimeError:  # sparse, nested
        return type(tensor), tensor.layout, tensor.dtype
    storage = storages.setdefault(address, len(storages))
    return tensor.dtype, tensor.shape, strides, storage


def describe_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """A call's arguments as JSON in the form that this module tells."""
    storages: dict[int, int] = {}
    described = {
        "args": [describe_value(value, storages) for value in args],
        "kwargs": {name: describe_value(value, storages) for name, value in kwargs.items()},
    }
    return canonical_json(described)


def describe_value(value: Any, storages: dict[int, int]) -> Any:
    """One argument in that form. ``storages`` numbers those met so far, by address."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, torch.Tensor):
        return _describe_tensor(value, storages)
    if isinstance(value, float):
        return {"float": value if math.isfinite(value) else repr(value)}
    if isinstance(value, (list, tuple)):
        return [describe_value(item, storages) for item in value]
    for kind, describe in _DESCRIBED.items():
        if isinstance(value, kind):
            return describe(value)
    return {"opaque": _name(value)}


def _describe_tensor(tensor: torch.Tensor, storages: dict[int, int]) -> Any:
    try:
        address = tensor.untyped_storage()._cdata
        strides = list(tensor.stride())
    except RuntimeError:
        return {"opaque": f"{_text(tensor.layout)} tensor"}
    storage = storages.setdefault(address, len(storages))
    return {"tensor": [_text(tensor.dtype), list(tensor.shape), strides, storage]}


def _text(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _name(value: Any) -> str:
    name: str = getattr(value, "__name__", type(value).__name__)
    return name


_DESCRIBED: dict[Any, Callable[[Any], dict[str, Any]]] = {
    torch.dtype: lambda value: {"dtype": _text(value)},
    torch.layout: lambda value: {"layout": _text(value)},
    torch.memory_format: lambda value: {"memory_format": _text(value)},
    torch.device: lambda value: {"device": value.type},
}
