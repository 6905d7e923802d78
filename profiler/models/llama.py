"""Llama: RMS norm, rotary positions, grouped queries, gated feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from teraio.profiler.models.layers import (
    AttentionKernel,
    Checkpointing,
    RMSNorm,
    attend,
    initialise,
    merge_heads,
    next_token_loss,
    run_block,
    split_heads,
)


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes of a Llama. ``key_value_heads`` None: as many as ``heads``."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int | None = None
    tied: bool = False
    rope_base: float = 10000.0
    norm_epsilon: float = 1e-5
    attention: AttentionKernel = "sdpa"
    checkpoint: Checkpointing = "none"

    @property
    def head(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads

    @property
    def num_key_value_heads(self) -> int:
        """Heads of keys and values, each shared by ``heads`` over so many queries."""
        return self.heads if self.key_value_heads is None else self.key_value_heads


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped queries."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        width = config.num_key_value_heads * config.head
        self.query = nn.Linear(config.hidden, config.hidden, bias=False)
        self.key = nn.Linear(config.hidden, width, bias=False)
        self.value = nn.Linear(config.hidden, width, bias=False)
        self.output = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """(batch, sequence, hidden) -> the same."""
        config = self.config
        query = rotate(split_heads(self.query(x), config.heads), cosine, sine)
        key = rotate(split_heads(self.key(x), config.num_key_value_heads), cosine, sine)
        value = split_heads(self.value(x), config.num_key_value_heads)
        queries_per_key = config.heads // config.num_key_value_heads
        if queries_per_key > 1:
            key = key.repeat_interleave(queries_per_key, dim=1)
            value = value.repeat_interleave(queries_per_key, dim=1)
        mixed = attend(query, key, value, config.attention, is_causal=True)
        result: Tensor = self.output(merge_heads(mixed))
        return result


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) -> the same."""
        result: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return result


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, config: LlamaConfig, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden, config.norm_epsilon)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.hidden, config.norm_epsilon)
        self.feed_forward = feed_forward

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """(batch, sequence, hidden) -> the same."""
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        result: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return result


class Llama(nn.Module):
    """A decoder that returns its loss; ``make_feed_forward`` builds each block's feed-forward."""

    def __init__(
        self,
        config: LlamaConfig,
        make_feed_forward: Callable[[LlamaConfig], nn.Module] = FeedForward,
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.blocks = nn.ModuleList(
            Block(config, make_feed_forward(config)) for _ in range(config.layers)
        )
        self.norm = RMSNorm(config.hidden, config.norm_epsilon)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        self.apply(initialise)
        if config.tied:
            self.head.weight = self.embedding.weight
        frequencies = config.rope_base ** (-torch.arange(0, config.head, 2).float() / config.head)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Scalar loss of int64 ``tokens`` and ``targets``, both (batch, sequence)."""
        cosine, sine = self._rotation(tokens.shape[1])
        x = self.embedding(tokens)
        for block in self.blocks:
            x = run_block(block, self.config.checkpoint, x, cosine, sine)
        return next_token_loss(self.head(self.norm(x)), targets)

    def _rotation(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each position's angles, (sequence, head)."""
        frequencies = self.get_buffer("frequencies")
        positions = torch.arange(length, device=frequencies.device).float()
        angles = torch.outer(positions, frequencies).repeat(1, 2)
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary position embedding (RoFormer), halves of a head as real and imaginary parts."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x * cosine.type_as(x) + turned * sine.type_as(x)
