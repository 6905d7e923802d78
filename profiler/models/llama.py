"""Llama: RMS norm, rotary positions, grouped queries, gated feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from teraio.profiler.models.attention import attend
from teraio.profiler.models.layers import (
    AttentionKernel,
    Checkpointing,
    Embedding,
    Linear,
    RMSNorm,
    merge_heads,
    next_token_loss,
    run_block,
    split_heads,
)
from teraio.profiler.models.stages import WHOLE, Stage, numbered_blocks


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes of a Llama. ``key_value_heads`` None: as many as ``heads``.

    ``biased``: every projection in the blocks has a bias, as in Granite's code models.
    """

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int | None = None
    tied: bool = False
    biased: bool = False
    attention_dropout: float = 0.0
    rope_base: float = 10000.0
    norm_epsilon: float = 1e-5
    attention: AttentionKernel = "auto"
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
        self.query = Linear(config.hidden, config.hidden, bias=config.biased)
        self.key = Linear(config.hidden, width, bias=config.biased)
        self.value = Linear(config.hidden, width, bias=config.biased)
        self.output = Linear(config.hidden, config.hidden, bias=config.biased)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """(batch, sequence, hidden) -> the same."""
        config = self.config
        query = rotate(split_heads(self.query(x), config.head), cosine, sine)
        key = rotate(split_heads(self.key(x), config.head), cosine, sine)
        value = split_heads(self.value(x), config.head)
        queries_per_key = config.heads // config.num_key_value_heads
        if queries_per_key > 1:
            key = key.repeat_interleave(queries_per_key, dim=1)
            value = value.repeat_interleave(queries_per_key, dim=1)
        dropout = config.attention_dropout if self.training else 0.0
        mixed = attend(query, key, value, config.attention, is_causal=True, dropout=dropout)
        result: Tensor = self.output(merge_heads(mixed))
        return result


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = Linear(config.hidden, config.intermediate, bias=config.biased)
        self.up = Linear(config.hidden, config.intermediate, bias=config.biased)
        self.down = Linear(config.intermediate, config.hidden, bias=config.biased)

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


class LlamaLayers(nn.Module):
    """A stage's layers of a decoder; ``make_feed_forward`` builds each block's feed-forward."""

    def __init__(
        self,
        config: LlamaConfig,
        stage: Stage = WHOLE,
        make_feed_forward: Callable[[LlamaConfig], nn.Module] = FeedForward,
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocabulary, config.hidden) if stage.is_first else None
        self.blocks = numbered_blocks(
            stage.layers(config.layers), lambda: Block(config, make_feed_forward(config))
        )
        self.norm: RMSNorm | None = None
        self.head: Linear | None = None
        if stage.is_last:
            self.norm = RMSNorm(config.hidden, config.norm_epsilon)
            self.head = Linear(config.hidden, config.vocabulary, bias=False)
            if config.tied and self.embedding is not None:
                self.head.weight = self.embedding.weight
        frequencies = config.rope_base ** (-torch.arange(0, config.head, 2).float() / config.head)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def run_layers(self, x: Tensor) -> Tensor:
        """Tokens or the previous stage's output to logits or the next stage's input."""
        cosine, sine = self._rotation(x.shape[1])
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = run_block(block, self.config.checkpoint, x, cosine, sine)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x

    def _rotation(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each position's angles, (sequence, head)."""
        frequencies = self.get_buffer("frequencies")
        positions = torch.arange(length, device=frequencies.device).float()
        angles = torch.outer(positions, frequencies).repeat(1, 2)
        return angles.cos(), angles.sin()


class Llama(LlamaLayers):
    """A decoder that returns its loss."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Scalar loss of int64 ``tokens`` and ``targets``, both (batch, sequence)."""
        return next_token_loss(self.run_layers(tokens), targets)


class LlamaStage(LlamaLayers):
    """A stage of a pipeline."""

    def forward(self, x: Tensor) -> Tensor:
        """The next stage's input, (batch, sequence, hidden), or in the last one logits.

        ``x``: the previous stage's output, or in the first one tokens, int64 (batch, sequence).
        """
        return self.run_layers(x)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary position embedding (RoFormer), halves of a head as real and imaginary parts."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x * cosine.type_as(x) + turned * sine.type_as(x)
