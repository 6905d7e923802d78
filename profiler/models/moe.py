"""Mixtral: a Llama whose feed-forward is a mixture of experts with data-dependent routing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from teraio.profiler.models.llama import FeedForward, Llama, LlamaConfig


@dataclass(frozen=True, kw_only=True)
class MoeConfig(LlamaConfig):
    """A Llama's sizes and how many of how many experts serve a token."""

    experts: int = 8
    experts_per_token: int = 2


class Experts(nn.Module):
    """Each token goes to its best experts, weighted by their router probabilities.

    Expert by expert, over the tokens that chose it: shapes depend on the data, so no two iterations
    run quite the same kernels.
    """

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.experts_per_token = config.experts_per_token
        self.router = nn.Linear(config.hidden, config.experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(config) for _ in range(config.experts))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) -> the same."""
        tokens = x.flatten(0, 1)
        probabilities = torch.softmax(self.router(tokens), dim=-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self.experts_per_token, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).type_as(tokens)
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, ranks = torch.where(chosen == number)
            served = expert(tokens[rows]) * weights[rows, ranks, None]
            result.index_add_(0, rows, served.type_as(result))
        return result.view_as(x)


class Moe(Llama):
    """The decoder of :class:`Llama` with experts in every block."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__(config, lambda _: Experts(config))
