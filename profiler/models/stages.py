"""Which layers of a model one stage of a pipeline holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from teraio.errors import InputError


@dataclass(frozen=True)
class Stage:
    """One of ``stages`` parts of a model, of consecutive layers; by default the whole model.

    The first has the embedding, the last the final norm and the head. A weight tied to both exists
    twice, as ``embedding.weight`` and as ``head.weight``; who trains the stages together adds up
    the gradients of the two.
    """

    stage: int = 0
    stages: int = 1

    def __post_init__(self) -> None:
        if self.stages < 1:
            raise InputError(f"stages: must be at least 1, got {self.stages}")
        if not 0 <= self.stage < self.stages:
            raise InputError(f"stage: must be in 0..{self.stages - 1}, got {self.stage}")

    @property
    def is_first(self) -> bool:
        """Whether it reads tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it returns logits."""
        return self.stage == self.stages - 1

    def layers(self, count: int) -> range:
        """Its layers out of so many: equal shares, of the remainder one each to the first stages.

        Raises InputError where there are more stages than layers.
        """
        if self.stages > count:
            raise InputError(f"stages: {self.stages} are more than the model's {count} layers")
        share, remainder = divmod(count, self.stages)
        start = self.stage * share + min(self.stage, remainder)
        return range(start, start + share + (self.stage < remainder))


WHOLE = Stage()


def numbered_blocks(layers: range, make_block: Callable[[], nn.Module]) -> nn.ModuleList:
    """One block per layer, named as in the whole model: ``blocks.17`` is layer 17 in any stage."""
    blocks = nn.ModuleList()
    for layer in layers:
        blocks.add_module(str(layer), make_block())
    return blocks
