"""Softmax attention by the kernel of one's choice, on real and on fake tensors.

``functional.scaled_dot_product_attention`` asks the device which kernel to run, and a fake tensor
on a CPU gets that of the CPU. Here the kernels of CUDA are called by name, with the arguments that
PyTorch would give them (aten/src/ATen/native/transformers/attention.cpp), and the same rules decide
which may run (cuda/sdp_utils.cpp, torch 2.11 to 2.13, GPUs from compute capability 8.0), because a
fake kernel takes anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.backends import cuda as switches
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from teraio.errors import InputError
from teraio.profiler.models.layers import AttentionKernel, drop, is_virtual

HALVES = (torch.float16, torch.bfloat16)
FLASH_LARGEST_HEAD = 256
CUDNN_LARGEST_HEAD = 128
FLASH_HEAD_MULTIPLE = 8
"""Heads of another width are padded to a multiple of it."""
EFFICIENT_BIAS_MULTIPLE = 8
"""The bias of the efficient kernel is padded until its strides are multiples of it."""
CUDNN_SINCE = 91501
"""The first version of cuDNN whose attention PyTorch prefers (9.15.1)."""
CUDNN_ROUNDS_DROPOUT = tuple(map(int, torch.__version__.split(".")[:2])) > (2, 11)
"""Whether PyTorch keeps other dropouts than multiples of 1/16 away from cuDNN; 2.11 does not."""


@dataclass(frozen=True)
class AttentionInputs:
    """What is attended to, and how; see :func:`attend`."""

    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: bool = False
    bias: Tensor | None = None
    scale: float | None = None
    dropout: float = 0.0

    @property
    def head(self) -> int:
        """Width of one head."""
        return self.query.shape[-1]

    @property
    def given_scale(self) -> float:
        """The scale, by default head ** -0.5."""
        return 1 / math.sqrt(self.head) if self.scale is None else self.scale

    @property
    def needs_gradient(self) -> bool:
        """Whether backward will ask for the softmax's normaliser."""
        inputs = (self.query, self.key, self.value)
        return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: AttentionKernel,
    *,
    is_causal: bool = False,
    bias: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Softmax attention, (batch, heads, sequence, head); ``bias`` is added to the scores.

    ``scale`` defaults to head ** -0.5. Causal attention takes no bias; put the mask into it. Raises
    InputError where ``kernel`` cannot run these inputs.
    """
    attention = AttentionInputs(query, key, value, is_causal, bias, scale, dropout)
    name: str = kernel
    if kernel == "auto":
        name = automatic_kernel(attention) if is_virtual(query) else "sdpa"
    elif kernel in _FUSED:
        _check(kernel, attention)
    return _KERNELS[name](attention)


def automatic_kernel(attention: AttentionInputs) -> str:
    """The kernel that PyTorch picks on CUDA: the first that can run these inputs.

    If none can, ``sdpa-math``, PyTorch's own fallback. cuDNN comes first on Hopper and Blackwell
    (compute capability 9 and 10), flash elsewhere. The GPU is that of this machine; where there is
    none, a Hopper with the cuDNN of torch 2.11.
    """
    enabled = _enabled_kernels()
    for kernel in _FUSED:
        if kernel in enabled and not obstacles(kernel, attention):
            return kernel
    return "sdpa-math"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _enabled_kernels() -> tuple[str, ...]:
    """A constant to the compiler, which cannot look into these switches."""
    enabled = {
        "cudnn": switches.cudnn_sdp_enabled() and _prefers_cudnn(),
        "flash": switches.flash_sdp_enabled(),
        "efficient": switches.mem_efficient_sdp_enabled(),
    }
    return tuple(kernel for kernel in _FUSED if enabled[kernel])


@cache
def _prefers_cudnn() -> bool:
    if not torch.cuda.is_available():
        return True
    version = torch.backends.cudnn.version() or 0
    return torch.cuda.get_device_capability()[0] in (9, 10) and version >= CUDNN_SINCE


def obstacles(kernel: AttentionKernel, attention: AttentionInputs) -> list[str]:
    """What keeps a fused kernel from running these inputs: nothing, if it can.

    Not asked: limits of single GPUs (flash trains heads wider than 192 not on every consumer GPU).
    """
    return [reason for reason, holds in _rules(kernel, attention).items() if not holds]


def _rules(kernel: AttentionKernel, attention: AttentionInputs) -> dict[str, bool]:
    """What a fused kernel asks for, each with whether it holds."""
    dtype, head, bias = attention.query.dtype, attention.head, attention.bias
    queries, keys = attention.query.shape[-2], attention.key.shape[-2]
    only_halves = {f"it takes float16 and bfloat16, not {dtype}": dtype in HALVES}
    if kernel == "flash":
        return only_halves | {
            "it takes no bias and no mask": bias is None,
            f"a head of {head} is wider than {FLASH_LARGEST_HEAD}": head <= FLASH_LARGEST_HEAD,
            "causal attention needs as many keys as queries": (
                not attention.is_causal or queries == keys
            ),
        }
    if kernel == "cudnn":
        return only_halves | {
            "it has no gradient for a bias": bias is None or not bias.requires_grad,
            f"a head of {head} is no multiple of 8 up to {CUDNN_LARGEST_HEAD}": (
                head % 8 == 0 and head <= CUDNN_LARGEST_HEAD
            ),
            f"a dropout of {attention.dropout} is no multiple of 1/16": (
                not CUDNN_ROUNDS_DROPOUT or (attention.dropout * 16).is_integer()
            ),
            "it needs more than one key": keys > 1,
            "it is not deterministic, as torch.use_deterministic_algorithms asks": (
                not torch.are_deterministic_algorithms_enabled()
                or torch.is_deterministic_algorithms_warn_only_enabled()
            ),
        }
    multiple = 8 if dtype in HALVES else 4
    return {
        f"it takes float16, bfloat16 and float32, not {dtype}": dtype in (*HALVES, torch.float32),
        f"a head of {head} is no multiple of {multiple}": head % multiple == 0,
        "rows of its bias must be contiguous": bias is None or bias.stride(-1) == 1,
    }


def _check(kernel: AttentionKernel, attention: AttentionInputs) -> None:
    reasons = obstacles(kernel, attention)
    query = attention.query
    if not is_virtual(query) and not query.is_cuda:
        reasons.insert(0, f"it runs on CUDA, not on {query.device.type}")
    if reasons:
        raise InputError(
            f"attention {kernel!r}: {'; '.join(reasons)}; choose another kernel, or 'auto'"
        )


def _attend_flash(attention: AttentionInputs) -> Tensor:
    head = attention.head
    inputs = [attention.query, attention.key, attention.value]
    is_padded = head % FLASH_HEAD_MULTIPLE != 0
    if is_padded:
        inputs = [functional.pad(x, (0, -head % FLASH_HEAD_MULTIPLE)) for x in inputs]
    result: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        *inputs, attention.dropout, attention.is_causal, False, scale=attention.given_scale
    )[0]
    return result[..., :head] if is_padded else result


def _attend_efficient(attention: AttentionInputs) -> Tensor:
    query, key, bias = attention.query, attention.key, attention.bias
    if bias is not None:
        bias = _align(bias).expand(*query.shape[:-1], key.shape[-2])
    result: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query,
        key,
        attention.value,
        bias,
        attention.needs_gradient,
        attention.dropout,
        attention.is_causal,
        scale=attention.scale,
    )[0]
    return result


def _align(bias: Tensor) -> Tensor:
    """The bias at its own size, in rows that start at multiples of what the kernel wants."""
    *strides, last = bias.stride()
    if last == 1 and all(stride % EFFICIENT_BIAS_MULTIPLE == 0 for stride in strides):
        return bias
    length = bias.shape[-1]
    missing = EFFICIENT_BIAS_MULTIPLE - length % EFFICIENT_BIAS_MULTIPLE
    return functional.pad(bias, (0, missing))[..., :length]


def _attend_cudnn(attention: AttentionInputs) -> Tensor:
    result: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        attention.query,
        attention.key,
        attention.value,
        attention.bias,
        attention.needs_gradient,
        attention.dropout,
        attention.is_causal,
        False,
        scale=attention.scale,
    )[0]
    return result


def _attend_as_pytorch_picks(attention: AttentionInputs) -> Tensor:
    return functional.scaled_dot_product_attention(
        attention.query,
        attention.key,
        attention.value,
        attn_mask=attention.bias,
        dropout_p=attention.dropout,
        is_causal=attention.is_causal,
        scale=attention.scale,
    )


def _attend_as_pytorch_falls_back(attention: AttentionInputs) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return _attend_as_pytorch_picks(attention)


def _attend_explicitly(attention: AttentionInputs) -> Tensor:
    query, value = attention.query, attention.value
    scores = (query @ attention.key.transpose(-2, -1)) * attention.given_scale
    if attention.is_causal:
        scores = scores.masked_fill(future_mask(query.shape[-2], query.device), -torch.inf)
    if attention.bias is not None:
        scores = scores + attention.bias
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).type_as(value)
    return drop(weights, attention.dropout, training=True) @ value


def future_mask(length: int, device: torch.device) -> Tensor:
    """True where a position would see a later one, bool (length, length)."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


_FUSED: tuple[AttentionKernel, ...] = ("cudnn", "flash", "efficient")
"""In the order in which PyTorch tries them."""

_KERNELS: dict[str, Callable[[AttentionInputs], Tensor]] = {
    "sdpa": _attend_as_pytorch_picks,
    "sdpa-math": _attend_as_pytorch_falls_back,
    "math": _attend_explicitly,
    "flash": _attend_flash,
    "efficient": _attend_efficient,
    "cudnn": _attend_cudnn,
}
