"""BERT: an encoder with learned positions, norms behind the residuals, GELU and dropout.

Trained as published: masked words (the head tied to the embedding) and whether the second of two
sentences follows the first.
"""

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


@dataclass(frozen=True, kw_only=True)
class BertConfig:
    """Sizes of a BERT; the feed-forward is four times as wide as ``hidden``."""

    vocabulary: int
    positions: int
    hidden: int
    layers: int
    heads: int
    token_types: int = 2
    dropout: float = 0.1
    norm_epsilon: float = 1e-12
    attention: AttentionKernel = "auto"
    checkpoint: Checkpointing = "none"

    @property
    def head(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads


class Block(nn.Module):
    """Attention and feed-forward, each beside a residual and before a layer norm."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.query = Linear(config.hidden, config.hidden)
        self.key = Linear(config.hidden, config.hidden)
        self.value = Linear(config.hidden, config.hidden)
        self.output = Linear(config.hidden, config.hidden)
        self.attention_norm = LayerNorm(config.hidden, config.norm_epsilon)
        self.up = Linear(config.hidden, 4 * config.hidden)
        self.down = Linear(4 * config.hidden, config.hidden)
        self.feed_forward_norm = LayerNorm(config.hidden, config.norm_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) -> the same."""
        x = self.attention_norm(x + self._drop(self.output(self._attend(x))))
        inner = functional.gelu(self.up(x))
        result: Tensor = self.feed_forward_norm(x + self._drop(self.down(inner)))
        return result

    def _attend(self, x: Tensor) -> Tensor:
        query, key, value = (
            split_heads(project(x), self.config.head)
            for project in (self.query, self.key, self.value)
        )
        dropout = self.config.dropout if self.training else 0.0
        return merge_heads(attend(query, key, value, self.config.attention, dropout=dropout))

    def _drop(self, x: Tensor) -> Tensor:
        return drop(x, self.config.dropout, self.training)


class Bert(nn.Module):
    """An encoder that returns the loss of its pre-training."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocabulary, config.hidden)
        self.positions = Embedding(config.positions, config.hidden)
        self.token_types = Embedding(config.token_types, config.hidden)
        self.embedding_norm = LayerNorm(config.hidden, config.norm_epsilon)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.pooler = Linear(config.hidden, config.hidden)
        self.next_sentence = Linear(config.hidden, 2)
        self.transform = Linear(config.hidden, config.hidden)
        self.norm = LayerNorm(config.hidden, config.norm_epsilon)
        self.head = Linear(config.hidden, config.vocabulary)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Scalar loss of int64 ``tokens`` and ``targets``, (batch, sequence <= positions).

        The two sentences are the halves of a sequence. Its first token stands for both and is never
        masked, so the first target says, odd or even, whether the second follows the first.
        """
        x = self._embed(tokens)
        for block in self.blocks:
            x = run_block(block, self.config.checkpoint, x)
        logits = self.head(self.norm(functional.gelu(self.transform(x))))
        follows = self.next_sentence(torch.tanh(self.pooler(x[:, 0])))
        masked_words = next_token_loss(logits, targets)
        return masked_words + functional.cross_entropy(follows.float(), targets[:, 0] % 2)

    def _embed(self, tokens: Tensor) -> Tensor:
        """The sum of what a token, its place and its sentence stand for."""
        length = tokens.shape[1]
        positions = torch.arange(length, device=tokens.device)
        sentences = (positions >= length // 2).long()
        x = self.embedding(tokens) + self.token_types(sentences) + self.positions(positions)
        return drop(self.embedding_norm(x), self.config.dropout, self.training)
