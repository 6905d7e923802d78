"""Reading the JSON arguments of a call (see :mod:`teraio.profiler.costs.calls`) without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

PRECISIONS = ("fp32", "tf32", "bf16")

MATRIX_PRODUCTS = {
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "addbmm",
    "_grouped_mm",
    "convolution",
    "convolution_backward",
    "inductor_compiled_code",
}
"""Base names of the operators that TF32 makes faster; compiled regions hold some of them."""

IS_CAUSAL_POSITION = {
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_flash_attention_backward": 11,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_efficient_attention_backward": 11,
    "_scaled_dot_product_cudnn_attention": 6,
    "_scaled_dot_product_cudnn_attention_backward": 14,
    "_scaled_dot_product_flash_attention_for_cpu": 4,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 7,
}
"""Attention operators, and which positional argument says that it is causal."""


def canonical_json(value: Any) -> str:
    """The one way in which arguments are written, so that equal ones are equal texts."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True, allow_nan=False)


def mask_arguments(arguments: str) -> str:
    """The arguments without what does not change the work: equal texts are equal calls.

    Floats count as zero or not; devices not at all. Masking twice changes nothing more.
    """
    return canonical_json(_masked(json.loads(arguments)))


def _masked(value: Any) -> Any:
    if isinstance(value, list):
        return [_masked(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "float" in value:
        return {"float": "0" if value["float"] in (0, "0") else "any"}
    if "device" in value and isinstance(value["device"], str):
        return {"device": "any"}
    return {name: _masked(item) for name, item in value.items()}


def base_name(operator: str) -> str:
    """``mm`` of ``aten.mm.default``."""
    parts = operator.split(".")
    return parts[1] if len(parts) > 1 else operator


def tensors_of(value: Any) -> Iterator[list[Any]]:
    """``[dtype, shape, strides, storage]`` of every tensor in decoded arguments, in order."""
    if isinstance(value, list):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        if "tensor" in value:
            yield value["tensor"]
        else:
            for item in value.values():
                yield from tensors_of(item)


def has_opaque_part(value: Any) -> bool:
    """Whether decoded arguments hold something that JSON does not tell."""
    if isinstance(value, list):
        return any(has_opaque_part(item) for item in value)
    if isinstance(value, dict):
        return "opaque" in value or any(has_opaque_part(item) for item in value.values())
    return False


def is_causal(operator: str, arguments: Any) -> bool:
    """Whether decoded arguments ask for causal attention; False for other operators."""
    position = IS_CAUSAL_POSITION.get(base_name(operator))
    if position is None:
        return False
    args, kwargs = arguments["args"], arguments["kwargs"]
    return bool(args[position] if len(args) > position else kwargs.get("is_causal", False))


def product_precision(operator: str, arguments: str, precision: str) -> str:
    """``tf32`` where that setting changes what runs: products of float32 matrices; else empty."""
    is_product = base_name(operator) in MATRIX_PRODUCTS
    return "tf32" if precision == "tf32" and is_product and '["float32",' in arguments else ""
