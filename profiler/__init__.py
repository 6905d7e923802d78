"""Profiling: one training iteration, watched in stock PyTorch, becomes a trace.

Names load on first use, so that importing this package needs no torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any

from teraio.errors import MissingDependencyError

_HOME_OF_NAME = {
    "Profile": "teraio.profiler.profiling",
    "profile": "teraio.profiler.profiling",
    "profile_model": "teraio.profiler.profiling",
    "profile_script": "teraio.profiler.profiling",
    "time_kernels": "teraio.profiler.costs.kernel_timing",
    "trace": "teraio.profiler.fake.tracing",
}

__all__ = ["Profile", "profile", "profile_model", "profile_script", "time_kernels", "trace"]

if TYPE_CHECKING:
    from teraio.profiler.costs.kernel_timing import time_kernels
    from teraio.profiler.fake.tracing import trace
    from teraio.profiler.profiling import Profile, profile, profile_model, profile_script


def __getattr__(name: str) -> Any:
    home = _HOME_OF_NAME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError('profiling needs PyTorch: pip install "teraio[torch]"')
    importlib.import_module("teraio.profiler.torch_version").check_torch_version()
    # torch's profiler, which measures scratch memory, would announce itself on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
