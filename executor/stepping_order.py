"""What a plan of ``optimizer-in-backward`` says of the steps in the backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from teraio.contracts.plan import Plan
from teraio.contracts.table import MISSING
from teraio.traces.transforms.optimizer_units import find_units, scaled_gradients


@dataclass(frozen=True)
class SteppingOrder:
    """What a plan says of the steps in the backward pass.

    ``units``: names of the parameters that step together; ``kept``: names of those whose gradients
    the recorded loop keeps from one iteration to the next; ``scaled``: names of those whose
    gradients a pipeline's schedule divides by the number of micro-batches; ``needs_state``: whether
    the optimizer has any.
    """

    units: tuple[tuple[str, ...], ...]
    kept: frozenset[str]
    scaled: frozenset[str]
    needs_state: bool
    micro_batches: int

    @classmethod
    def of_plan(cls, plan: Plan) -> SteppingOrder:
        """As the plan's optimizer kernels and gradients tell."""
        storages = plan.storages
        lives_on = (storages.kind == "gradient") & (storages.birth == MISSING)
        scaled = sorted(set(scaled_gradients(plan).values()))
        return cls(
            units=find_units(plan).parameters,
            kept=_without_suffix(storages.name[lives_on].tolist()),
            scaled=_without_suffix(storages.name[scaled].tolist()),
            needs_state=bool((storages.kind == "optimizer_state").any()),
            micro_batches=plan.metadata.micro_batches,
        )


def _without_suffix(gradients: list[str]) -> frozenset[str]:
    return frozenset(name.removesuffix(".grad") for name in gradients)
