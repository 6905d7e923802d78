"""Operators of the GPU where functions of PyTorch would call others for the CPU.

Reference models call these themselves (:mod:`teraio.profiler.models.layers`). One's own model calls
``functional.scaled_dot_product_attention`` or ``dropout``, which dispatch by device, and a fake
tensor's is the CPU. So such calls are answered here, before PyTorch chooses; and so are those that
autocast widens to float32 on CUDA and not on a CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from teraio.profiler.models.attention import HALVES, AttentionInputs, attend, automatic_kernel
from teraio.profiler.models.layers import AttentionKernel, is_virtual

_BATCHED = 4
"""Dimensions that the fused kernels take."""


_WIDENED: tuple[str, ...] = (
    *("layer_norm", "group_norm", "softmax", "log_softmax", "logsumexp", "softplus", "norm"),
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "kl_div"),
    *("cosine_similarity", "pow", "__pow__", "exp", "log", "rsqrt", "reciprocal"),
)
"""CUDA's autocast computes these in float32 (autocast_mode.h), or what these call."""

_dropout = functional.dropout
_attention = functional.scaled_dot_product_attention


@contextlib.contextmanager
def gpu_operators(attention: AttentionKernel | None = None) -> Iterator[None]:
    """Attention and dropout of fake tensors run the kernels of a GPU.

    ``attention`` ``"sdpa"`` leaves attention to PyTorch, which takes the CPU's.
    """
    attend_ = _attention if attention == "sdpa" else _attend
    routes: dict[Any, Callable[..., Any]] = {_dropout: _drop, _drop: _drop, _attention: attend_}
    for owner in (torch, Tensor, functional):
        found = (getattr(owner, name, None) for name in _WIDENED)
        routes |= {function: _widening(function) for function in found if function is not None}
    # PyTorch's own functions look these up by name; other code may have taken them on import.
    with (
        mock.patch.object(functional, "dropout", _drop),
        mock.patch.object(functional, "scaled_dot_product_attention", attend_),
        _Router(routes),
    ):
        yield


class _Router(TorchFunctionMode):
    """Calls other functions in place of some."""

    def __init__(self, routes: dict[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._routes = routes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._routes.get(func, func)(*args, **(kwargs or {}))


def _widening(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function in float32 under autocast, as on CUDA."""

    def widened(*args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            args = tuple(_cast(value, torch.float32) for value in args)
            kwargs = {name: _cast(value, torch.float32) for name, value in kwargs.items()}
        return function(*args, **kwargs)

    return widened


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """A floating-point tensor in this precision; float64 and all else as it is."""
    is_cast = isinstance(value, Tensor) and value.dtype in (*HALVES, torch.float32)
    return value.to(dtype) if is_cast else value


def _drop(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not is_virtual(input) or not training or inplace or not 0 < p < 1:
        return _dropout(input, p, training, inplace)
    result: Tensor = torch.native_dropout(input, p, train=True)[0]
    return result


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As ``functional.scaled_dot_product_attention`` on a GPU."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value, attn_mask = (_cast(x, dtype) for x in (query, key, value, attn_mask))
    inputs = AttentionInputs(query, key, value, is_causal, attn_mask, scale, dropout_p)
    kernel = _kernel(inputs) if is_virtual(query) else None
    if kernel is None or kernel == "sdpa-math":
        with sdpa_kernel(SDPBackend.MATH) if kernel else nullcontext():
            return _attention(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
    return attend(
        query,
        key,
        value,
        kernel,
        is_causal=is_causal,
        bias=_additive(attn_mask, query),
        scale=scale,
        dropout=dropout_p,
    )


def _kernel(inputs: AttentionInputs) -> Any:
    """The kernel that PyTorch picks on a GPU; None where it would refuse the inputs."""
    if inputs.is_causal and inputs.bias is not None:
        return None
    shapes = {tuple(x.shape[:-2]) for x in (inputs.query, inputs.key, inputs.value)}
    heads = {x.shape[-1] for x in (inputs.query, inputs.key, inputs.value)}
    kernel = automatic_kernel(inputs)
    is_plain = inputs.query.dim() == _BATCHED and len(heads) == 1
    # Only the efficient kernel has no groups of heads that share keys (sdp_utils.cpp).
    if not is_plain or (len(shapes) > 1 and kernel == "efficient"):
        return "sdpa-math"
    return kernel


def _additive(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A Boolean mask as PyTorch adds it to the scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -torch.inf)
