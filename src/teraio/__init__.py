"""teraio: train models bigger than your GPU's memory at nearly the speed of one that holds them.

Names load on first use, so that ``import teraio`` is fast and needs neither torch nor a GPU.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME_OF_NAME = {
    "Hardware": "teraio.contracts.hardware",
    "Plan": "teraio.contracts.plan",
    "Timeline": "teraio.contracts.timeline",
    "Trace": "teraio.traces.trace",
    "compare": "teraio.planner",
    "execute": "teraio.executor",
    "plan": "teraio.planner",
    "probe": "teraio.executor",
    "profile": "teraio.profiler",
    "replay": "teraio.executor",
    "simulate": "teraio.simulator",
    "trace": "teraio.profiler",
    "verify": "teraio.planner",
}

__all__ = [
    "Hardware",
    "Plan",
    "Timeline",
    "Trace",
    "__version__",
    "compare",
    "execute",
    "plan",
    "probe",
    "profile",
    "replay",
    "simulate",
    "trace",
    "verify",
]

if TYPE_CHECKING:
    from teraio.contracts.hardware import Hardware
    from teraio.contracts.plan import Plan
    from teraio.contracts.timeline import Timeline
    from teraio.executor import execute, probe, replay
    from teraio.planner import compare, plan, verify
    from teraio.profiler import profile, trace
    from teraio.simulator import simulate
    from teraio.traces.trace import Trace


def __getattr__(name: str) -> Any:
    home = _HOME_OF_NAME.get(name)
    if home is None:
        raise AttributeError(f"module 'teraio' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
