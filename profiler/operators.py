"""What an operator does to its arguments, read from its schema once and cached.

Three kinds matter. *Ignored* operators do no work on tensors (``prim``, profiler marks). *Views*
cost nothing but need their storage resident. Everything else is a *kernel*. Kernels over whole
parameter lists (``_foreach_*``, ``_fused_*``) are split into buckets, because their working set
would otherwise be every parameter, gradient and optimizer state at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from teraio.contracts.signatures import kernel_signature

AUTOMATIC_BUCKETS = 0
"""As a bucket size: a sixteenth of the list, within the bounds below."""

_SMALLEST_AUTOMATIC_BYTES = 256 * 2**10
_LARGEST_AUTOMATIC_BYTES = 128 * 2**20
"""Large enough that launching a bucket costs a GPU nothing, small beside any GPU's memory."""


class OperatorKind(Enum):
    """How a dispatch mode treats an operator."""

    IGNORED = "ignored"
    VIEW = "view"
    KERNEL = "kernel"
    LIST_KERNEL = "list kernel"


@dataclass(frozen=True, slots=True)
class Operator:
    """Schema facts of one overload.

    ``writes`` and ``reads`` hold one flag per schema argument, ``positions`` maps argument names to
    them. ``may_resize``: an argument's storage may change its size inside the call.
    """

    name: str
    kind: OperatorKind
    reads: tuple[bool, ...]
    writes: tuple[bool, ...]
    positions: Mapping[str, int]
    may_resize: bool
    is_collective: bool


# Collectives carry no alias information in their schemas: names of the arguments that they write.
_COLLECTIVE_WRITES = {
    "allreduce_": {"tensors"},
    "allreduce_coalesced_": {"tensors"},
    "broadcast_": {"tensors"},
    "reduce_": {"tensors"},
    "allgather_": {"output_tensors"},
    "_allgather_base_": {"output_tensor"},
    "allgather_coalesced_": {"output_lists"},
    "allgather_into_tensor_coalesced_": {"outputs"},
    "reduce_scatter_": {"output_tensors"},
    "_reduce_scatter_base_": {"output_tensor"},
    "reduce_scatter_tensor_coalesced_": {"outputs"},
    "gather_": {"output_tensors"},
    "scatter_": {"output_tensors"},
    "alltoall_": {"output_tensors"},
    "alltoall_base_": {"output"},
    "recv_": {"tensors"},
    "recv_any_source_": {"tensors"},
}
_COLLECTIVE_NAMESPACES = {"c10d", "_c10d_functional", "c10d_functional"}
_UNDECLARED_WRITES = {"fsdp::all_gather_copy_in": {"all_gather_output"}}
_ANNOTATED_NAMESPACES = {"aten", "prims", "quantized", "inductor", "higher_order"}
_IGNORED_NAMESPACES = {"prim", "prims_profiler", "profiler"}
# Outputs share the input's storage although the schema does not say so.
_UNDECLARED_VIEWS = {
    "aten::_unsafe_view",
    "aten::_reshape_alias",
    "aten::lift_fresh",
    "_c10d_functional::_wrap_tensor_autograd",
}
_OVERWRITING = {"copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "bernoulli_", "set_"}
_LIST_PREFIXES = ("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_")


def describe_operator(func: Any) -> Operator:
    """Facts about an operator overload, or about a higher-order operator (which has no schema)."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return Operator(
            name=f"higher_order.{func}",
            kind=OperatorKind.KERNEL,
            reads=(),
            writes=(),
            positions={},
            may_resize=False,
            is_collective=False,
        )
    namespace, _, base = schema.name.partition("::")
    is_collective = namespace in _COLLECTIVE_NAMESPACES
    arguments = schema.arguments
    if is_collective:
        written_names = _COLLECTIVE_WRITES.get(base, set())
        writes = tuple(a.name in written_names for a in arguments)
    else:
        writes = tuple(a.alias_info is not None and a.alias_info.is_write for a in arguments)
        if schema.name in _UNDECLARED_WRITES:
            writes = tuple(a.name in _UNDECLARED_WRITES[schema.name] for a in arguments)
        elif namespace not in _ANNOTATED_NAMESPACES and _hides_writes(schema, writes):
            writes = (True,) * len(arguments)
    overwrites = base in _OVERWRITING
    reads = tuple(
        not (w and (a.is_out or overwrites)) for a, w in zip(arguments, writes, strict=True)
    )
    return Operator(
        name=str(func),
        kind=_kind(schema, namespace),
        reads=reads,
        writes=writes,
        positions={a.name: i for i, a in enumerate(arguments)},
        may_resize=any(a.is_out for a in arguments) or base in {"resize_", "set_", "resize_as_"},
        is_collective=is_collective,
    )


def _hides_writes(schema: Any, writes: Sequence[bool]) -> bool:
    """Whether a custom operator may write what its schema does not mark as written.

    One made from a C++ signature alone has nameless arguments and marks nothing; one that returns
    nothing must do something to its arguments.
    """
    if any(writes):
        return False
    names = [argument.name for argument in schema.arguments]
    is_inferred = bool(names) and all(n.startswith("_") and n[1:].isdigit() for n in names)
    return is_inferred or not schema.returns


def _kind(schema: Any, namespace: str) -> OperatorKind:
    if namespace in _IGNORED_NAMESPACES:
        return OperatorKind.IGNORED
    if schema.name in _UNDECLARED_VIEWS:
        return OperatorKind.VIEW
    returns = schema.returns
    if returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns):
        return OperatorKind.VIEW
    if schema.name.startswith(_LIST_PREFIXES) and _is_splittable(schema):
        return OperatorKind.LIST_KERNEL
    return OperatorKind.KERNEL


def _is_splittable(schema: Any) -> bool:
    # A tensor of per-element scalars would need slicing of its own; such overloads stay whole.
    return all(
        not (a.name == "scalars" and a.type.kind() == "TensorType") for a in schema.arguments
    )


def tensors_with_flags(
    operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[torch.Tensor, bool, bool]]:
    """Every tensor argument, however nested in lists, as (tensor, reads, writes)."""
    if not operator.positions:
        for value in (*args, *kwargs.values()):
            for tensor in nested_tensors(value):
                yield tensor, True, True
        return
    for position, value in enumerate(args):
        reads, writes = operator.reads[position], operator.writes[position]
        if isinstance(value, torch.Tensor):
            yield value, reads, writes
        elif isinstance(value, (list, tuple)):
            for tensor in nested_tensors(value):
                yield tensor, reads, writes
    for name, value in kwargs.items():
        position = operator.positions[name]
        for tensor in nested_tensors(value):
            yield tensor, operator.reads[position], operator.writes[position]


def nested_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Tensors inside nested lists, tuples and dictionaries, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from nested_tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from nested_tensors(item)


class SignatureBook:
    """63-bit hashes of (operator, shapes, dtypes), equal in every process and on every machine."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], int] = {}

    def signature(self, name: str, tensors: Sequence[torch.Tensor]) -> int:
        """The hash for an operator called with these tensors."""
        key = (name, *[(t.shape, t.dtype) for t in tensors])
        known = self._known.get(key)
        if known is None:
            described = [(tuple(t.shape), str(t.dtype)) for t in tensors]
            known = self._known[key] = kernel_signature(name, described)
        return known


def list_length(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Length of the longest tensor list among the arguments; 0 if there is none."""
    lists = [v for v in (*args, *kwargs.values()) if isinstance(v, (list, tuple))]
    return max((len(v) for v in lists if v and isinstance(v[0], torch.Tensor)), default=0)


def bucket_bounds(tensors: Sequence[torch.Tensor], bucket_bytes: int) -> list[tuple[int, int]]:
    """Cut a tensor list into runs of at most ``bucket_bytes`` (one tensor may exceed it alone).

    AUTOMATIC_BUCKETS depends on nothing but the list, so recorder and executor cut alike.
    """
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    if bucket_bytes == AUTOMATIC_BUCKETS:
        share = sum(sizes) // 16
        bucket_bytes = min(max(share, _SMALLEST_AUTOMATIC_BYTES), _LARGEST_AUTOMATIC_BYTES)
    bounds, start, held = [], 0, 0
    for index, size in enumerate(sizes):
        if index > start and held + size > bucket_bytes:
            bounds.append((start, index))
            start, held = index, 0
        held += size
    if tensors:
        bounds.append((start, len(tensors)))
    return bounds


def slice_lists(value: Any, length: int, start: int, stop: int) -> Any:
    """The bucket's part of an argument: lists of the full length are sliced, all else is shared."""
    if isinstance(value, (list, tuple)) and len(value) == length:
        return value[start:stop]
    return value
