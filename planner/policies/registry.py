"""The policies compared with ours, by name: planners like the others, each with its source."""

from __future__ import annotations

from types import MappingProxyType
from typing import Protocol

from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Plan
from teraio.planner.policies.activation_only import plan_activation_only
from teraio.planner.policies.flashneuron import plan_flashneuron
from teraio.planner.policies.g10 import plan_g10
from teraio.planner.policies.recompute_only import plan_recompute_only
from teraio.planner.policies.zero_infinity import plan_zero_infinity
from teraio.planner.policies.zero_offload import plan_zero_offload
from teraio.traces.trace import Trace


class Policy(Protocol):
    """Makes a plan for a trace on hardware that holds the budgets."""

    def __call__(self, trace: Trace, hardware: Hardware, *, bandwidth_share: float) -> Plan: ...


POLICIES: MappingProxyType[str, Policy] = MappingProxyType(
    {
        "activation-only": plan_activation_only,
        "flashneuron": plan_flashneuron,
        "g10": plan_g10,
        "recompute-only": plan_recompute_only,
        "zero-infinity": plan_zero_infinity,
        "zero-offload": plan_zero_offload,
    }
)
"""Policies by name, as they stand on the command line and in tables."""

PAGED_POLICIES: frozenset[str] = frozenset({"g10"})
"""Those whose plans need not fit: what is left over is evicted and fetched on demand, and counted
in ``demand_fetches`` and ``evictions`` of a comparison."""
