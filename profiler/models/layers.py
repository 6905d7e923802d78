"""Layers that several reference models share.

[Note: the same kernels everywhere] A model runs the same kernels on a CPU, on a GPU and on fake
tensors, so that a trace recorded without a GPU fits a run on one:

- Dropout calls ``native_dropout``. ``functional.dropout`` dispatches that on CUDA, but three other
  kernels on a CPU.
- Autocast widens layer norms, softmax and losses to float32 on CUDA, not on CPU. The models do it
  themselves, where CUDA's autocast would, and it then finds nothing left to widen; what it narrows
  (linear layers, matrix products, attention) is the same on both.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as recompute_in_backward

AttentionKernel: TypeAlias = Literal["auto", "sdpa", "flash", "efficient", "cudnn", "math"]
"""``auto``: what PyTorch picks; for fake tensors, what it would pick on a GPU. ``sdpa``: what
PyTorch picks for the device at hand, fake or not. ``math``: explicit softmax, deterministic also in
fp32 on CUDA, where the backward of the fused kernel is not. The others: that kernel."""

Checkpointing: TypeAlias = Literal["none", "reentrant", "non-reentrant"]
"""Whether blocks recompute their activations in backward, and through which implementation."""

INITIAL_STD = 0.02


compiles_virtual = False
"""Whether what is being compiled is for tensors without memory: the compiler shows code plain ones
in their place. Set while such code is called."""


def is_virtual(tensor: Tensor) -> bool:
    """Whether the tensor has a shape but no memory: a fake one, or one on the meta device."""
    if torch.compiler.is_compiling() and compiles_virtual:
        return True
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def draw(weight: Tensor, std: float = INITIAL_STD) -> None:
    """Fills a new weight with normal numbers; one without memory stays as it is."""
    if not is_virtual(weight):
        nn.init.normal_(weight, std=std)


class Linear(nn.Linear):
    """A linear layer that starts with normal weights and no bias."""

    def reset_parameters(self) -> None:
        """Draws the weights once; ``nn.Linear`` would have drawn others before."""
        draw(self.weight)
        if self.bias is not None and not is_virtual(self.bias):
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """An embedding that starts with small normal weights."""

    def reset_parameters(self) -> None:
        """Draws the weights once; ``nn.Embedding`` would have drawn others before."""
        draw(self.weight)


class LayerNorm(nn.LayerNorm):
    """Layer norm in the precision of its weights, as under CUDA's autocast."""

    def forward(self, input: Tensor) -> Tensor:
        """Same shape as ``input``; float32 where the weights are."""
        result: Tensor = super().forward(input.to(self.weight.dtype))
        return result


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


def drop(x: Tensor, probability: float, training: bool) -> Tensor:
    """Dropout in training; the very same tensor where nothing is dropped."""
    if not training or probability == 0:
        return x
    result: Tensor = torch.native_dropout(x, probability, train=True)[0]
    return result


def split_heads(x: Tensor, head: int) -> Tensor:
    """(batch, sequence, heads * head) -> (batch, heads, sequence, head)."""
    batch, length, _ = x.shape
    return x.view(batch, length, -1, head).transpose(1, 2)


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
