"""Mixtral: a Llama whose feed-forward is a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from teraio.errors import InputError
from teraio.profiler.models.layers import Linear
from teraio.profiler.models.llama import FeedForward, Llama, LlamaConfig, LlamaStage
from teraio.profiler.models.stages import Stage

Routing: TypeAlias = Literal["data", "balanced"]
"""``data``: tokens go where the router sends them. ``balanced``: every expert serves as many."""


@dataclass(frozen=True, kw_only=True)
class MoeConfig(LlamaConfig):
    """A Llama's sizes and how many of how many experts serve a token."""

    experts: int = 8
    experts_per_token: int = 2
    routing: Routing = "data"


class Experts(nn.Module):
    """Each token goes to its best experts, weighted by their router probabilities.

    Expert by expert. Routed by the data, an expert serves the tokens that chose it: shapes depend
    on the data, so no two iterations run quite the same kernels, and fake tensors cannot tell.
    Balanced, the choices are sorted by expert and cut into as many equal slices as there are
    experts; an expert serves its slice. The shapes, and so the work, are those of a router that
    treats all experts alike. Where this one does not, the choices beyond an expert's slice go to a
    neighbour, with the weights of the expert that was chosen.
    """

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.experts_per_token = config.experts_per_token
        self.is_balanced = config.routing == "balanced"
        self.router = Linear(config.hidden, config.experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(config) for _ in range(config.experts))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) -> the same.

        Raises InputError where balanced experts cannot share the tokens equally.
        """
        tokens = x.flatten(0, 1)
        probabilities = torch.softmax(self.router(tokens), dim=-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self.experts_per_token, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).type_as(tokens)
        route = self._route_equally if self.is_balanced else self._route_by_data
        result = torch.zeros_like(tokens)
        for expert, (rows, ranks) in zip(self.experts, route(chosen), strict=True):
            served = expert(tokens[rows]) * weights[rows, ranks, None]
            result.index_add_(0, rows, served.type_as(result))
        return result.view_as(x)

    def _route_by_data(self, chosen: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """For each expert the tokens that chose it, and as which of their choices."""
        for number in range(len(self.experts)):
            yield torch.where(chosen == number)

    def _route_equally(self, chosen: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """The same for a router that treats all experts alike."""
        count, experts = chosen.numel(), len(self.experts)
        if count % experts:
            raise InputError(
                f"routing 'balanced': {len(chosen)} tokens x {self.experts_per_token} experts per "
                f"token are no multiple of {experts} experts; choose another batch or sequence"
            )
        order = chosen.flatten().argsort(stable=True)
        rows, ranks = order // self.experts_per_token, order % self.experts_per_token
        yield from zip(rows.chunk(experts), ranks.chunk(experts), strict=True)


def make_experts(config: LlamaConfig) -> nn.Module:
    """The feed-forward of a block."""
    assert isinstance(config, MoeConfig)
    return Experts(config)


class Moe(Llama):
    """The decoder of :class:`Llama` with experts in every block."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__(config, make_feed_forward=make_experts)


class MoeStage(LlamaStage):
    """A stage of a pipeline of :class:`Moe`."""

    def __init__(self, config: MoeConfig, stage: Stage) -> None:
        super().__init__(config, stage, make_experts)
