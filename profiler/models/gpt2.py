"""GPT-2: learned positions, layer norm, GELU, dropout, embedding tied to the head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from teraio.profiler.models.attention import attend
from teraio.profiler.models.layers import (
    AttentionKernel,
    Checkpointing,
    Embedding,
    LayerNorm,
    Linear,
    drop,
    merge_heads,
    next_token_loss,
    run_block,
    split_heads,
)
from teraio.profiler.models.stages import WHOLE, Stage, numbered_blocks


@dataclass(frozen=True, kw_only=True)
class Gpt2Config:
    """Sizes of a GPT-2; the feed-forward is four times as wide as ``hidden``."""

    vocabulary: int
    positions: int
    hidden: int
    layers: int
    heads: int
    dropout: float = 0.1
    tied: bool = True
    attention: AttentionKernel = "auto"
    checkpoint: Checkpointing = "none"

    @property
    def head(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads


class Block(nn.Module):
    """Attention and feed-forward, each behind a layer norm and beside a residual."""

    def __init__(self, config: Gpt2Config) -> None:
        super().__init__()
        self.config = config
        self.attention_norm = LayerNorm(config.hidden)
        self.query_key_value = Linear(config.hidden, 3 * config.hidden)
        self.output = Linear(config.hidden, config.hidden)
        self.feed_forward_norm = LayerNorm(config.hidden)
        self.up = Linear(config.hidden, 4 * config.hidden)
        self.down = Linear(4 * config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) -> the same."""
        x = x + self._drop(self.output(self._attend(self.attention_norm(x))))
        inner = functional.gelu(self.up(self.feed_forward_norm(x)), approximate="tanh")
        return x + self._drop(self.down(inner))

    def _attend(self, x: Tensor) -> Tensor:
        query, key, value = (
            split_heads(part, self.config.head) for part in self.query_key_value(x).chunk(3, -1)
        )
        dropout = self.config.dropout if self.training else 0.0
        mixed = attend(query, key, value, self.config.attention, is_causal=True, dropout=dropout)
        return merge_heads(mixed)

    def _drop(self, x: Tensor) -> Tensor:
        return drop(x, self.config.dropout, self.training)


class Gpt2Layers(nn.Module):
    """A stage's layers of a decoder."""

    def __init__(self, config: Gpt2Config, stage: Stage = WHOLE) -> None:
        super().__init__()
        self.config = config
        self.embedding: Embedding | None = None
        self.positions: Embedding | None = None
        if stage.is_first:
            self.embedding = Embedding(config.vocabulary, config.hidden)
            self.positions = Embedding(config.positions, config.hidden)
        self.blocks = numbered_blocks(stage.layers(config.layers), lambda: Block(config))
        self.norm: LayerNorm | None = None
        self.head: Linear | None = None
        if stage.is_last:
            self.norm = LayerNorm(config.hidden)
            self.head = Linear(config.hidden, config.vocabulary, bias=False)
            if config.tied and self.embedding is not None:
                self.head.weight = self.embedding.weight

    def run_layers(self, x: Tensor) -> Tensor:
        """Tokens or the previous stage's output to logits or the next stage's input."""
        if self.embedding is not None and self.positions is not None:
            positions = torch.arange(x.shape[1], device=x.device)
            x = self.embedding(x) + self.positions(positions)
            x = drop(x, self.config.dropout, self.training)
        for block in self.blocks:
            x = run_block(block, self.config.checkpoint, x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


class Gpt2(Gpt2Layers):
    """A decoder that returns its loss."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Scalar loss of int64 ``tokens`` and ``targets``, (batch, sequence <= positions)."""
        return next_token_loss(self.run_layers(tokens), targets)


class Gpt2Stage(Gpt2Layers):
    """A stage of a pipeline."""

    def forward(self, x: Tensor) -> Tensor:
        """The next stage's input, (batch, sequence, hidden), or in the last one logits.

        ``x``: the previous stage's output, or in the first one tokens, int64 (batch, sequence).
        """
        return self.run_layers(x)
