"""GPT-2: learned positions, layer norm, GELU, dropout, embedding tied to the head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from teraio.profiler.models.layers import (
    AttentionKernel,
    Checkpointing,
    attend,
    initialise,
    merge_heads,
    next_token_loss,
    run_block,
    split_heads,
)


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
    attention: AttentionKernel = "sdpa"
    checkpoint: Checkpointing = "none"


class Block(nn.Module):
    """Attention and feed-forward, each behind a layer norm and beside a residual."""

    def __init__(self, config: Gpt2Config) -> None:
        super().__init__()
        self.config = config
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.query_key_value = nn.Linear(config.hidden, 3 * config.hidden)
        self.output = nn.Linear(config.hidden, config.hidden)
        self.feed_forward_norm = nn.LayerNorm(config.hidden)
        self.up = nn.Linear(config.hidden, 4 * config.hidden)
        self.down = nn.Linear(4 * config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) -> the same."""
        x = x + self._drop(self.output(self._attend(self.attention_norm(x))))
        inner = functional.gelu(self.up(self.feed_forward_norm(x)), approximate="tanh")
        return x + self._drop(self.down(inner))

    def _attend(self, x: Tensor) -> Tensor:
        query, key, value = (
            split_heads(part, self.config.heads) for part in self.query_key_value(x).chunk(3, -1)
        )
        dropout = self.config.dropout if self.training else 0.0
        mixed = attend(query, key, value, self.config.attention, is_causal=True, dropout=dropout)
        return merge_heads(mixed)

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.config.dropout, self.training)


class Gpt2(nn.Module):
    """A decoder that returns its loss."""

    def __init__(self, config: Gpt2Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.positions = nn.Embedding(config.positions, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        self.apply(initialise)
        if config.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Scalar loss of int64 ``tokens`` and ``targets``, (batch, sequence <= positions)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.positions(positions)
        x = functional.dropout(x, self.config.dropout, self.training)
        for block in self.blocks:
            x = run_block(block, self.config.checkpoint, x)
        return next_token_loss(self.head(self.norm(x)), targets)
