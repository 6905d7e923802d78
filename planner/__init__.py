"""Planning: what moves when, how good that is, and an independent check of it.

Names load on first use: the verifier, for one, shares no code with the planners.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME_OF_NAME = {
    "PLANNERS": "teraio.planner.planning",
    "build_plan": "teraio.planner.plan_building",
    "compare": "teraio.planner.comparison",
    "evict_everything": "teraio.planner.policies.evict_everything",
    "lower_bound": "teraio.planner.fluid.bound",
    "plan": "teraio.planner.planning",
    "plan_ranks": "teraio.planner.rank_shares",
    "plan_summary": "teraio.planner.comparison",
    "share_of_rank": "teraio.planner.rank_shares",
    "rebuild_plan": "teraio.planner.plan_building",
    "verify": "teraio.planner.verifier",
}

__all__ = [
    "PLANNERS",
    "build_plan",
    "compare",
    "evict_everything",
    "lower_bound",
    "plan",
    "plan_ranks",
    "plan_summary",
    "rebuild_plan",
    "share_of_rank",
    "verify",
]

if TYPE_CHECKING:
    from teraio.planner.comparison import compare, plan_summary
    from teraio.planner.fluid.bound import lower_bound
    from teraio.planner.plan_building import build_plan, rebuild_plan
    from teraio.planner.planning import PLANNERS, plan
    from teraio.planner.policies.evict_everything import evict_everything
    from teraio.planner.rank_shares import plan_ranks, share_of_rank
    from teraio.planner.verifier import verify


def __getattr__(name: str) -> Any:
    home = _HOME_OF_NAME.get(name)
    if home is None:
        raise AttributeError(f"module 'teraio.planner' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
