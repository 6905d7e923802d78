"""Layers that several reference models share."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as recompute_in_backward

AttentionKernel: TypeAlias = Literal["auto", "sdpa", "flash", "efficient", "cudnn", "math"]
"""``sdpa``: whatever PyTorch picks. ``math``: explicit softmax, deterministic also in fp32 on CUDA,
where the backward of the fused kernel is not."""

Checkpointing: TypeAlias = Literal["none", "reentrant", "non-reentrant"]
"""Whether blocks recompute their activations in backward, and through which implementation."""

INITIAL_STD = 0.02


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, computed in float32."""

    def __init__(self, hidden: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as ``x``."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return self.weight * (wide * scale).type_as(x)


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

    ``scale`` defaults to head ** -0.5. Causal attention takes no bias; put the mask into it.
    """
    if kernel in ("auto", "sdpa"):
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, dropout_p=dropout, is_causal=is_causal, scale=scale
        )
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query @ key.transpose(-2, -1)) * scale
    if is_causal:
        scores = scores.masked_fill(future_mask(query.shape[-2], query.device), -torch.inf)
    if bias is not None:
        scores = scores + bias
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).type_as(value)
    return functional.dropout(weights, dropout) @ value


def future_mask(length: int, device: torch.device) -> Tensor:
    """True where a position would see a later one, bool (length, length)."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(batch, sequence, heads * head) -> (batch, heads, sequence, head)."""
    batch, length, width = x.shape
    return x.view(batch, length, heads, width // heads).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(batch, heads, sequence, head) -> (batch, sequence, heads * head)."""
    return x.transpose(1, 2).flatten(2)


def run_block(block: nn.Module, mode: Checkpointing, *arguments: Any) -> Tensor:
    """The block's output; its activations are kept, or computed again in backward."""
    if mode == "none" or not torch.is_grad_enabled():
        result: Tensor = block(*arguments)
    else:
        result = recompute_in_backward(block, *arguments, use_reentrant=mode == "reentrant")
    return result


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in float32: logits (batch, sequence, vocabulary), targets of ids."""
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def initialise(module: nn.Module) -> None:
    """Normal weights and zero biases for linear layers and embeddings; for ``Module.apply``."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=INITIAL_STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
