"""How much a kernel computes and moves, read from its arguments: no kernel runs for it.

FLOPs are those of matrix products, convolutions and attention, as torch's own counter has them
(causal attention counts in full). Bytes: each storage once if it is read and once if it is written,
as far as the tensors show it; a dimension of stride zero once. What a kernel leaves untouched
although its schema names it (``empty_like``'s model, all but the rows that ``embedding`` looks up)
does not count.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from teraio.profiler.costs.arguments import base_name
from teraio.profiler.dispatch import KernelCall
from teraio.profiler.operators import nested_tensors
from teraio.profiler.storages import storage_of


class Work(NamedTuple):
    """What one kernel does."""

    flops: int
    read_bytes: int
    written_bytes: int


# Base names of operators that launch nothing: memory is handed out, a number fetched.
_NO_WORK = {
    "empty",
    "empty_like",
    "empty_strided",
    "empty_permuted",
    "new_empty",
    "new_empty_strided",
    "detach",
    "set_",
    "resize_",
    "resize_as_",
    "record_stream",
    "_local_scalar_dense",
    "is_same_size",
    "wait_tensor",
}

# Arguments that give a shape and no values, or that are not touched for another reason.
_UNREAD = {
    "zeros_like": {"self"},
    "ones_like": {"self"},
    "full_like": {"self"},
    "rand_like": {"self"},
    "randn_like": {"self"},
    "new_zeros": {"self"},
    "new_ones": {"self"},
    "new_full": {"self"},
    "bernoulli_": {"self"},
    "nll_loss_backward": {"self"},
    "nll_loss2d_backward": {"self"},
}

# Arguments of which only as many elements are read as another argument, or the output, has.
_LOOKED_UP = {
    "embedding": ("weight", "output"),
    "index_select": ("self", "output"),
    "gather": ("self", "output"),
    "index": ("self", "output"),
    "nll_loss_forward": ("self", "target"),
    "nll_loss2d_forward": ("self", "target"),
}

# Arguments that are written only as far as another one reaches; the rest stays as it was.
_WRITTEN_AS = {
    "index_put_": "values",
    "_index_put_impl_": "values",
    "index_add_": "source",
    "index_copy_": "source",
    "scatter_": "index",
    "scatter_add_": "index",
}

_ATTENTION = ("_scaled_dot_product_", "_flash_attention_", "_efficient_attention_", "_cudnn_att")


def work_of(call: KernelCall, result: Any) -> Work:
    """FLOPs and bytes of a call that has returned ``result``."""
    name = base_name(call.operator.name)
    if name in _NO_WORK:
        return Work(0, 0, 0)
    read_bytes, written_bytes = _moved_bytes(name, call, result)
    has_schema = bool(call.operator.positions)
    flops = flops_of(name, call.func, call.args, call.kwargs, result) if has_schema else 0
    return Work(flops, read_bytes, written_bytes)


def flops_of(
    name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> int:
    """FLOPs of an operator of this base name with these arguments; 0 if it is no product."""
    if name.startswith(_ATTENTION):
        return _attention_flops(name, args)
    if name in {"_grouped_mm", "_scaled_grouped_mm"}:
        return _grouped_flops(args[0], args[1])
    formula = flop_registry.get(getattr(func, "_overloadpacket", func))
    if formula is None:
        return 0
    named = {key: value for key, value in kwargs.items() if key != "out"}
    return int(formula(*args, **named, out_val=result))


def _attention_flops(name: str, args: Sequence[Any]) -> int:
    """Two matrix products forwards; five backwards, where the scores are made again.

    Heads of queries count (grouped keys are read by several). ``_for_cpu`` and variable-length
    kernels, which torch's counter leaves out, have the same leading arguments.
    """
    is_backward = "backward" in name
    query, key, value = args[1:4] if is_backward else args[:3]
    if query.dim() != 4:  # packed sequences of unknown lengths
        return 0
    if name.startswith(("_flash_", "_efficient_")):  # (batch, sequence, heads, width)
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    batch, heads, queries, width = query.shape
    keys, value_width = key.shape[2], value.shape[3]
    products = 3 * width + 2 * value_width if is_backward else width + value_width
    return 2 * int(batch) * int(heads) * int(queries) * int(keys) * int(products)


def _grouped_flops(left: torch.Tensor, right: torch.Tensor) -> int:
    """Groups of rows, columns or matrices: each row of the left meets one matrix of the right."""
    if left.dim() == 2 and right.dim() == 3:  # rows in groups
        return 2 * left.shape[0] * left.shape[1] * right.shape[2]
    if left.dim() == 3 and right.dim() == 2:  # columns in groups
        return 2 * left.shape[1] * left.shape[2] * right.shape[1]
    if left.dim() == 2:  # the inner dimension in groups
        return 2 * left.shape[0] * left.shape[1] * right.shape[1]
    return 2 * left.shape[0] * left.shape[1] * left.shape[2] * right.shape[2]


def _moved_bytes(name: str, call: KernelCall, result: Any) -> tuple[int, int]:
    read, written = _Extent(), _Extent()
    unread = _UNREAD.get(name, set())
    looked_up, like = _LOOKED_UP.get(name, ("", ""))
    written_as = _WRITTEN_AS.get(name)
    arguments = dict(_named_arguments(call))
    for argument, (value, reads, writes) in arguments.items():
        for tensor in nested_tensors(value):
            limit = None
            if argument == looked_up:
                limit = _elements(result if like == "output" else arguments[like][0])
            elif writes and written_as is not None:
                limit = _elements(arguments.get(written_as, (None, False, False))[0])
            if reads and argument not in unread:
                read.add(tensor, limit)
            # The schema of fused optimizers lets them write gradients; they do if they unscale.
            if writes and not (argument == "grads" and name.startswith("_fused_")):
                written.add(tensor, limit)
    inputs = read.storages | written.storages
    for tensor in nested_tensors(result):
        if _address(tensor) not in inputs:
            written.add(tensor)
    return read.total_bytes(), written.total_bytes()


def moved_bytes_of(inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[int, int]:
    """Bytes of all inputs, and of those outputs that are no inputs."""
    read, written = _Extent(), _Extent()
    for tensor in nested_tensors(list(inputs)):
        read.add(tensor)
    for tensor in nested_tensors(list(outputs)):
        if _address(tensor) not in read.storages:
            written.add(tensor)
    return read.total_bytes(), written.total_bytes()


def _named_arguments(call: KernelCall) -> Iterator[tuple[str, tuple[Any, bool, bool]]]:
    """Each argument's name, with (value, reads, writes)."""
    operator = call.operator
    if not operator.positions:  # A higher-order operator: nothing is known of it.
        for position, value in enumerate((*call.args, *call.kwargs.values())):
            yield str(position), (value, True, False)
        return
    names = list(operator.positions)
    named = [*zip(names, call.args, strict=False), *call.kwargs.items()]
    for name, value in named:
        position = operator.positions[name]
        yield name, (value, operator.reads[position], operator.writes[position])


class _Extent:
    """The parts of storages that tensors show; the same part shown twice counts once."""

    def __init__(self) -> None:
        self._parts: dict[int, dict[Any, int]] = {}
        self._whole: dict[int, int] = {}

    @property
    def storages(self) -> set[int]:
        return set(self._parts)

    def add(self, tensor: torch.Tensor, limit: int | None = None) -> None:
        """``limit``: only so many of its elements are touched."""
        address = _address(tensor)
        elements = distinct_elements(tensor)
        if limit is not None:
            elements = min(elements, limit)
        part = (_offset(tensor), tensor.shape, limit)
        self._parts.setdefault(address, {})[part] = elements * tensor.itemsize
        self._whole[address] = _storage_bytes(tensor)

    def total_bytes(self) -> int:
        return sum(
            min(sum(parts.values()), self._whole[address]) for address, parts in self._parts.items()
        )


def distinct_elements(tensor: torch.Tensor) -> int:
    """Elements of memory that a tensor shows; those of an expanded dimension are the same ones."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return int(tensor.numel())
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(int(size) for size, stride in sizes if stride != 0 or size == 0)


def _elements(value: Any) -> int | None:
    tensors = list(nested_tensors(value))
    return sum(int(tensor.numel()) for tensor in tensors) if tensors else None


def _address(tensor: torch.Tensor) -> int:
    storage = storage_of(tensor)
    return id(tensor) if storage is None else int(storage._cdata)


def _offset(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.storage_offset())
    except RuntimeError:  # layouts without one
        return 0


def _storage_bytes(tensor: torch.Tensor) -> int:
    storage = storage_of(tensor)
    return int(tensor.numel()) * tensor.itemsize if storage is None else storage.nbytes()
