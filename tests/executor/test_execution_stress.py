"""Evict everything: every storage leaves in every inactive period, and nothing changes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from teraio.errors import OffloadWarning
from teraio.planner.policies.evict_everything import evict_everything

CASES: dict[str, dict[str, Any]] = {
    "llama loop": {"optimizer_options": {"foreach": False}},
    "llama foreach": {"optimizer_options": {"foreach": True}},
    "llama fused": {"optimizer_options": {"fused": True}},
    "llama tied": {"model_options": {"tied": True}},
    "llama checkpoint": {"model_options": {"checkpoint": "non-reentrant"}},
    "llama checkpoint reentrant": {"model_options": {"checkpoint": "reentrant"}},
    "llama autocast": {"is_autocast": True},
    "llama sgd": {
        "optimizer": torch.optim.SGD,
        "optimizer_options": {"lr": 0.01, "momentum": 0.9},
        "zero_at_end": True,
    },
    "gpt2 dropout": {"model": "tiny-gpt2"},
    "t5": {"model": "tiny-t5"},
    "moe": {"model": "tiny-moe"},
}


STEPS, LAYERS = 4, 2
"""One step to learn and three by the plan, of a first layer and a last: more repeat these."""


@pytest.mark.parametrize("name", CASES)
def test_evict_everything_changes_nothing(name: str, case: Any, machine: Any) -> None:
    """Losses, parameters and optimizer state are bit-identical over both stores, without a miss."""
    options = CASES[name]
    sizes = {"layers": LAYERS, **options.get("model_options", {})}
    training = case(**{**options, "model_options": sizes})
    is_data_dependent = training.model == "tiny-moe"
    plain = training.plain(STEPS)
    with pytest.warns(OffloadWarning, match="shapes") if is_data_dependent else nullcontext():
        trace = training.trace()
    for tiers in ("host", "ssd"):
        plan = evict_everything(trace, machine(), tiers=tiers)
        assert len(plan.moves) > 100
        outcome, report = training.executed(plan, STEPS)
        plain.assert_same(outcome)
        assert report.warm_up_steps == 1
        if is_data_dependent:
            # Experts depend on the data: kernels differ from the trace, and are counted.
            assert report.drift > 0
        else:
            assert report.drift == 0, report.first_drift
            assert report.demand_fetches == report.evictions == report.dropped_prefetches == 0
