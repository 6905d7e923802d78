"""Activations only: the paper's planner, allowed to move nothing but saved activations.

Source: the ablation that every system invites which offloads the tensors saved for the backward
pass and nothing else (SSDTrain, DAC 2025; ``torch.autograd.graph.save_on_cpu``). Modelled is the
best of that family: :func:`teraio.planner.greedy.plan_greedy` in full, with its choice of periods,
its tiers (SSD first, then host) and its retiming, on a trace in which only storages of kind
``activation`` can give their memory back. Parameters, gradients and optimizer state stay on the
GPU throughout.

Limits: real systems choose by size or by layer, not by benefit per cost, so this is an upper bound
on what they reach. Where what stays does not fit, there is no plan: CapacityError.
"""

from __future__ import annotations

from dataclasses import replace

from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Plan
from teraio.errors import CapacityError, InfeasibleError
from teraio.planner.greedy import plan_greedy
from teraio.planner.plan_building import build_plan
from teraio.traces.trace import Trace


def plan_activation_only(trace: Trace, hardware: Hardware, *, bandwidth_share: float = 1.0) -> Plan:
    """The greedy plan that moves saved activations only; ``hardware`` holds the budgets.

    Raises CapacityError if what may not leave leaves too little room, or the tiers do.
    """
    storages = trace.storages
    can_leave = storages.resizable & (storages.kind == "activation").astype(bool)
    restricted = replace(trace, storages=replace(storages, resizable=can_leave))
    try:
        made = plan_greedy(restricted, hardware, bandwidth_share=bandwidth_share)
    except InfeasibleError as error:
        raise CapacityError(
            f"{error}; activation-only moves saved activations and nothing else"
        ) from None
    return build_plan(
        trace,
        made.moves,
        hardware,
        planner="activation-only",
        options=made.metadata.options,
        planning_seconds=made.metadata.planning_seconds,
        predicted_seconds=made.predicted_seconds,
    )
