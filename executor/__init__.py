"""Execution: a plan in real training, over stores for host memory and files."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from teraio.errors import MissingDependencyError

if TYPE_CHECKING:
    from teraio.executor.execution import Execution, RunReport, execute, run_script
    from teraio.executor.probing import Measurements, measure_machine, probe
    from teraio.executor.raw_pointers import guard
    from teraio.executor.replaying.plan_replay import Replay, replay

_HOME_OF_NAME = {
    "Execution": "teraio.executor.execution",
    "Replay": "teraio.executor.replaying.plan_replay",
    "RunReport": "teraio.executor.execution",
    "Measurements": "teraio.executor.probing",
    "execute": "teraio.executor.execution",
    "guard": "teraio.executor.raw_pointers",
    "measure_machine": "teraio.executor.probing",
    "probe": "teraio.executor.probing",
    "replay": "teraio.executor.replaying.plan_replay",
    "run_script": "teraio.executor.execution",
}

__all__ = [
    "Execution",
    "Measurements",
    "Replay",
    "RunReport",
    "execute",
    "guard",
    "measure_machine",
    "probe",
    "replay",
    "run_script",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF_NAME.get(name)
    if home is None:
        raise AttributeError(f"module 'teraio.executor' has no attribute {name!r}")
    try:
        importlib.import_module("teraio.profiler.torch_version").check_torch_version()
        value = getattr(importlib.import_module(home), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingDependencyError(
            f'teraio.{name} needs PyTorch: pip install "teraio[torch]"'
        ) from None
    globals()[name] = value
    return value
