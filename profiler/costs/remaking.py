"""Makes a described call again, with random data, on any device.

Values matter where they steer a kernel: indices are drawn within their range, moments of optimizers
are positive, and the backward pass of attention gets what its own forward pass returns. All else is
drawn from the normal distribution, since zeros need less power and run faster.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from teraio.errors import InputError
from teraio.profiler.costs.arguments import base_name, tensors_of


@dataclass(frozen=True, slots=True)
class MadeCall:
    """An operator with arguments that live on the device."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self) -> Any:
        return self.func(*self.args, **self.kwargs)


def make_call(op: str, arguments: str, device: str) -> MadeCall:
    """The call of a row of the calls table. Raises InputError if it cannot be made again."""
    func = find_operator(op)
    made = _Maker(op, func, json.loads(arguments), device).make()
    forward = _forward_of(op)
    return made if forward is None else _with_forward_results(made, forward)


def find_operator(op: str) -> Any:
    """The overload of this name, e.g. ``aten.mm.default``. Raises InputError if there is none."""
    namespace, _, rest = op.partition(".")
    name, _, overload = rest.partition(".")
    try:
        found = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except (AttributeError, RuntimeError):
        found = None
    if not isinstance(found, torch._ops.OpOverload):
        raise InputError(f"{op}: this torch has no such operator")
    return found


_POSITIVE = {"exp_avg_sqs", "max_exp_avg_sqs", "max_exp_avg_sq", "state_sums", "rstd", "invstd"}
"""Arguments whose roots are taken."""


class TensorMaker:
    """Makes the tensors of a described call; those that shared a storage share one again."""

    def __init__(self, described: Any, device: str) -> None:
        self._device = device
        self._lengths = _storage_lengths(described)
        self._storages: dict[int, torch.Tensor] = {}

    def tensor(
        self,
        described: Sequence[Any],
        limit: int | None = None,
        *,
        is_positive: bool = False,
        is_one: bool = False,
    ) -> torch.Tensor:
        """The tensor of ``[dtype, shape, strides, storage]``; integers are below ``limit``."""
        dtype_name, shape, strides, storage = described
        dtype = getattr(torch, dtype_name)
        flat = self._storages.get(storage)
        if flat is None:
            flat = self._data(self._lengths[storage], dtype, limit, is_one=is_one or not shape)
            self._storages[storage] = flat = flat.abs_() if is_positive else flat
        if flat.dtype != dtype:
            flat = flat.view(dtype)
        return flat.as_strided(shape, strides)

    def _data(
        self, length: int, dtype: torch.dtype, limit: int | None, *, is_one: bool
    ) -> torch.Tensor:
        device = self._device
        if dtype.is_floating_point or dtype.is_complex:
            if is_one:
                return torch.ones(length, dtype=dtype, device=device)
            return torch.randn(length, dtype=_drawable(dtype), device=device).to(dtype)
        if dtype is torch.bool:
            return torch.rand(length, device=device) < 0.5
        if limit is None:
            return torch.zeros(length, dtype=dtype, device=device)
        return torch.randint(max(limit, 1), (length,), dtype=dtype, device=device)


class _Maker:
    """Makes one call's arguments."""

    def __init__(self, op: str, func: Any, described: Any, device: str) -> None:
        self._op = op
        self._device = device
        self._described = described
        self._func = func
        self._names = [argument.name for argument in func._schema.arguments]
        self._by_name = {
            **dict(zip(self._names, described["args"], strict=False)),
            **described["kwargs"],
        }
        self._tensors = TensorMaker(described, device)

    def make(self) -> MadeCall:
        args = tuple(
            self._value(value, name)
            for value, name in zip(self._described["args"], self._names, strict=False)
        )
        kwargs = {name: self._value(v, name) for name, v in self._described["kwargs"].items()}
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return MadeCall(self._func, args, kwargs)

    def _value(self, value: Any, name: str, position: int = 0) -> Any:
        if isinstance(value, list):
            return [self._value(item, name, index) for index, item in enumerate(value)]
        if isinstance(value, dict) and "tensor" in value:
            return self._tensor(value["tensor"], name, position)
        return plain_value(value, self._device, f"{self._op}: {name}")

    def _tensor(self, described: Sequence[Any], name: str, position: int) -> torch.Tensor:
        operator = base_name(self._op)
        limit = index_limit(operator, name, position, self._by_name)
        if operator == "_grouped_mm" and name == "offs" and limit is not None:
            return _group_ends(described, limit, self._device)
        return self._tensors.tensor(
            described, limit, is_positive=name in _POSITIVE, is_one=name == "state_steps"
        )


_NAMED_KINDS: dict[str, Any] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


def plain_value(value: Any, device: str, where: str) -> Any:
    """An argument that is no tensor. Raises InputError, named ``where``, for what is opaque."""
    if isinstance(value, list):
        return [plain_value(item, device, where) for item in value]
    if not isinstance(value, dict):
        return value
    kind, content = next(iter(value.items()))
    if kind == "float":
        return float(content)
    if kind == "device":
        return torch.device(device)
    if kind in _NAMED_KINDS:
        named = getattr(torch, str(content), None)
        if not isinstance(named, _NAMED_KINDS[kind]):
            raise InputError(f"{where}: this torch has no {kind} {content!r}")
        return named
    if content == "Generator":
        return None
    raise InputError(f"{where} is a {content}, which cannot be made again")


def _group_ends(described: Sequence[Any], limit: int, device: str) -> torch.Tensor:
    """Ends of groups of equal size, the last at ``limit``."""
    dtype, (length,), *_ = described
    ends = torch.linspace(limit / length, limit, length, device=device)
    return ends.to(getattr(torch, dtype))


def _drawable(dtype: torch.dtype) -> torch.dtype:
    """Random numbers of 8 bits have to be rounded from wider ones."""
    return dtype if dtype.is_complex or dtype.itemsize > 1 else torch.float16


def _storage_lengths(described: Any) -> dict[int, int]:
    """Elements that each storage needs, by its number, counted in its first tensor's type."""
    nbytes: dict[int, int] = {}
    itemsize: dict[int, int] = {}
    for dtype, shape, strides, storage in tensors_of(described):
        size = getattr(torch, dtype).itemsize
        last = sum((n - 1) * abs(s) for n, s in zip(shape, strides, strict=True))
        extent = 0 if 0 in shape else last + 1
        nbytes[storage] = max(nbytes.get(storage, 0), extent * size)
        itemsize.setdefault(storage, size)
    # Whole multiples of 16 bytes can be viewed as any type.
    return {s: -(-n // 16) * 16 // itemsize[s] if n else 0 for s, n in nbytes.items()}


_INDEX_INTO_DIMENSION = {
    "gather",
    "scatter",
    "scatter_",
    "scatter_add",
    "scatter_add_",
    "scatter_reduce",
    "scatter_reduce_",
    "index_select",
    "index_add",
    "index_add_",
    "index_copy",
    "index_copy_",
}


def index_limit(operator: str, name: str, position: int, by_name: Mapping[str, Any]) -> int | None:
    """What an integer argument must stay below; None if it is no index.

    ``position`` within a list; ``by_name``: the decoded JSON of all arguments by name.
    """
    if operator == "embedding" and name == "indices":
        return _shape(by_name["weight"])[0]
    if operator == "embedding_dense_backward" and name == "indices":
        return int(by_name["num_weights"])
    if operator.startswith("nll_loss") and name == "target":
        shape = _shape(by_name["self"])
        return shape[1] if len(shape) > 1 else shape[0]
    if operator in _INDEX_INTO_DIMENSION and name == "index":
        shape = _shape(by_name["self"])
        return shape[int(by_name["dim"])] if shape else 1
    if operator.removeprefix("_").startswith(("index", "unsafe_index")) and name == "indices":
        return _shape(by_name["self"])[position]
    if operator == "_grouped_mm" and name == "offs":
        left, right = _shape(by_name["self"]), _shape(by_name["mat2"])
        return left[-1] if len(left) == len(right) else left[0] if len(left) == 2 else right[1]
    return None


def _shape(described: Any) -> list[int]:
    shape: list[int] = described["tensor"][1]
    return shape


_RESULT_NAMES = {
    "out": ("output",),
    "logsumexp": ("logsumexp", "log_sumexp"),
    "philox_seed": ("philox_seed", "rng_state"),
    "philox_offset": ("philox_offset", "unused"),
    **{name: (name,) for name in ("cum_seq_q", "cum_seq_k", "max_q", "max_k")},
}
"""Arguments of attention's backward operators, and what the forward ones call these results."""


def _forward_of(op: str) -> str | None:
    """The attention operator whose results this backward operator needs."""
    name = base_name(op)
    if not name.startswith("_scaled_dot_product_") or not name.endswith("_backward"):
        return None
    return op.replace("_backward", "")


def _with_forward_results(made: MadeCall, forward: str) -> MadeCall:
    """The backward call with logits' sums, outputs and random state of a true forward pass."""
    func = find_operator(forward)
    names = [argument.name for argument in made.func._schema.arguments]
    given = {**dict(zip(names, made.args, strict=False)), **made.kwargs}
    given["compute_log_sumexp"] = True
    taken = {a.name: given[a.name] for a in func._schema.arguments if a.name in given}
    values = dict(zip([r.name for r in func._schema.returns], _called(func, taken), strict=True))
    for name, result in _results_by_argument(values):
        if name in given:
            given[name] = result
    args = tuple(given[name] for name in names[: len(made.args)])
    return MadeCall(made.func, args, {name: given[name] for name in made.kwargs})


def _called(func: Any, taken: dict[str, Any]) -> Any:
    """Call with arguments by name; those that the schema allows in order only are given so."""
    positional = [a.name for a in func._schema.arguments if not a.kwarg_only]
    last = max(positional.index(name) for name in taken if name in positional)
    defaults = {a.name: a.default_value for a in func._schema.arguments}
    args = [taken.get(name, defaults[name]) for name in positional[: last + 1]]
    return func(*args, **{n: v for n, v in taken.items() if n not in positional})


def _results_by_argument(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, candidates in _RESULT_NAMES.items():
        for candidate in candidates:
            if candidate in values:
                yield name, values[candidate]
                break
