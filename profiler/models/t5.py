"""T5: encoder and decoder, relative position bias, RMS norm, unscaled attention."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from teraio.profiler.models.attention import attend, future_mask
from teraio.profiler.models.layers import (
    AttentionKernel,
    Checkpointing,
    Embedding,
    Linear,
    RMSNorm,
    draw,
    drop,
    merge_heads,
    next_token_loss,
    run_block,
    split_heads,
)

START_TOKEN = 0
"""What the decoder reads before the first target (T5 starts with its padding)."""


@dataclass(frozen=True, kw_only=True)
class T5Config:
    """Sizes of a T5; ``layers`` in the encoder and as many in the decoder.

    ``gated``: T5 1.1's GELU-gated feed-forward in place of ReLU.
    """

    vocabulary: int
    hidden: int
    head: int
    intermediate: int
    layers: int
    heads: int
    gated: bool = False
    tied: bool = True
    dropout: float = 0.1
    buckets: int = 32
    max_distance: int = 128
    norm_epsilon: float = 1e-6
    attention: AttentionKernel = "auto"
    checkpoint: Checkpointing = "none"


class Attention(nn.Module):
    """Attention of ``x`` to ``memory``, behind a norm and beside a residual."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.config = config
        width = config.heads * config.head
        self.norm = RMSNorm(config.hidden, config.norm_epsilon)
        self.query = Linear(config.hidden, width, bias=False)
        self.key = Linear(config.hidden, width, bias=False)
        self.value = Linear(config.hidden, width, bias=False)
        self.output = Linear(width, config.hidden, bias=False)

    def forward(self, x: Tensor, memory: Tensor | None, bias: Tensor | None) -> Tensor:
        """(batch, sequence, hidden) -> the same; ``memory`` None: self-attention."""
        config = self.config
        normed = self.norm(x)
        source = normed if memory is None else memory
        query = split_heads(self.query(normed), config.head)
        key = split_heads(self.key(source), config.head)
        value = split_heads(self.value(source), config.head)
        dropout = config.dropout if self.training else 0.0
        mixed = attend(
            query,
            key,
            value,
            config.attention,
            bias=None if bias is None else bias.type_as(query),
            scale=1.0,
            dropout=dropout,
        )
        return x + drop(self.output(merge_heads(mixed)), config.dropout, self.training)


class FeedForward(nn.Module):
    """ReLU or GELU-gated, behind a norm and beside a residual."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.config = config
        self.norm = RMSNorm(config.hidden, config.norm_epsilon)
        self.up = Linear(config.hidden, config.intermediate, bias=False)
        self.down = Linear(config.intermediate, config.hidden, bias=False)
        if config.gated:
            self.gate = Linear(config.hidden, config.intermediate, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) -> the same."""
        normed = self.norm(x)
        if self.config.gated:
            inner = functional.gelu(self.gate(normed), approximate="tanh") * self.up(normed)
        else:
            inner = functional.relu(self.up(normed))
        inner = drop(inner, self.config.dropout, self.training)
        return x + drop(self.down(inner), self.config.dropout, self.training)


class Block(nn.Module):
    """Self-attention, in the decoder also attention to the encoder's output, feed-forward."""

    def __init__(self, config: T5Config, *, is_decoder: bool) -> None:
        super().__init__()
        self.self_attention = Attention(config)
        self.cross_attention = Attention(config) if is_decoder else None
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None) -> Tensor:
        """(batch, sequence, hidden) -> the same."""
        x = self.self_attention(x, None, bias)
        if self.cross_attention is not None:
            x = self.cross_attention(x, memory, None)
        result: Tensor = self.feed_forward(x)
        return result


class RelativeBias(nn.Module):
    """A learned score per head and bucketed distance, shared by all blocks of a stack."""

    def __init__(self, config: T5Config, *, is_decoder: bool) -> None:
        super().__init__()
        self.config = config
        self.is_decoder = is_decoder
        self.weight = Embedding(config.buckets, config.heads)

    def forward(self, length: int) -> Tensor:
        """(1, heads, length, length), minus infinity where a decoder may not look."""
        device = self.weight.weight.device
        positions = torch.arange(length, device=device)
        bias: Tensor = self.weight(self._bucket(positions[None, :] - positions[:, None]))
        # Fused kernels take no bias whose rows are scattered; PyTorch would store all scores.
        bias = bias.permute(2, 0, 1)[None].contiguous()
        if self.is_decoder:
            bias = bias.masked_fill(future_mask(length, device), -torch.inf)
        return bias

    def _bucket(self, distance: Tensor) -> Tensor:
        """Half of the buckets hold one distance each, the rest grow like its logarithm."""
        buckets = self.config.buckets
        offset = torch.zeros_like(distance)
        if self.is_decoder:
            distance = (-distance).clamp(min=0)
        else:
            buckets //= 2
            offset = (distance > 0) * buckets
            distance = distance.abs()
        exact = buckets // 2
        growth = (buckets - exact) / math.log(self.config.max_distance / exact)
        far = exact + ((distance.float() / exact).clamp(min=1).log() * growth).long()
        return offset + torch.where(distance < exact, distance, far.clamp(max=buckets - 1))


class Stack(nn.Module):
    """The encoder or the decoder, without the embedding that both share."""

    def __init__(self, config: T5Config, *, is_decoder: bool) -> None:
        super().__init__()
        self.config = config
        self.bias = RelativeBias(config, is_decoder=is_decoder)
        self.blocks = nn.ModuleList(
            Block(config, is_decoder=is_decoder) for _ in range(config.layers)
        )
        self.norm = RMSNorm(config.hidden, config.norm_epsilon)

    def forward(self, x: Tensor, memory: Tensor | None) -> Tensor:
        """(batch, sequence, hidden) -> the same."""
        dropout, bias = self.config.dropout, self.bias(x.shape[1])
        x = drop(x, dropout, self.training)
        for block in self.blocks:
            x = run_block(block, self.config.checkpoint, x, bias, memory)
        return drop(self.norm(x), dropout, self.training)


class T5(nn.Module):
    """An encoder and a decoder that return the decoder's loss."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocabulary, config.hidden)
        self.encoder = Stack(config, is_decoder=False)
        self.decoder = Stack(config, is_decoder=True)
        self.head = Linear(config.hidden, config.vocabulary, bias=False)
        if config.tied:
            # The head scales its input by hidden ** -0.5, which wants unit weights.
            draw(self.embedding.weight, std=1.0)
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Scalar loss: the encoder reads int64 ``tokens``, the decoder predicts ``targets``."""
        memory = self.encoder(self.embedding(tokens), None)
        read = torch.full_like(targets[:, :1], START_TOKEN)
        read = torch.cat((read, targets[:, :-1]), dim=1)
        x = self.decoder(self.embedding(read), memory)
        if self.config.tied:
            x = x * self.config.hidden**-0.5
        return next_token_loss(self.head(x), targets)
