"""Regions compiled by TorchInductor: one call that a dispatch mode does not see.

With ``torch._inductor.config.wrap_inductor_compiled_regions`` set before compiling, a region is an
operator like any other. Without it, its inputs are made resident here and held until it has run.
Its outputs and buffers are then accounted for only once an operator has touched them, so memory may
exceed the budget meanwhile: the run warns of that once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from teraio.errors import OffloadWarning
from teraio.executor.mode import ExecutorMode
from teraio.executor.patches import Patches
from teraio.profiler.operators import nested_tensors


class CompiledRegionGuard:
    """Patches the call of compiled graphs while active."""

    def __init__(self, host: ExecutorMode) -> None:
        self._host = host
        self._patches = Patches()
        self._has_warned = False

    def start(self) -> None:
        """Put the guard in place."""
        with suppress(ImportError):  # A build without the compiler compiles nothing.
            from torch._inductor.output_code import CompiledFxGraph

            self._patches.wrap(CompiledFxGraph, "__call__", self._guarded)

    def stop(self) -> None:
        """Take it away."""
        self._patches.undo()

    def _guarded(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(graph: Any, inputs: Any) -> Any:
            host = self._host
            if host.is_idle or _is_operator(graph):
                return original(graph, inputs)
            if not host.is_running:
                self._warn()
            with host.lock, host.holding_back(list(nested_tensors(inputs))):
                return original(graph, inputs)

        return guarded

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "a compiled region allocates memory that the GPU budget does not count; set "
                "torch._inductor.config.wrap_inductor_compiled_regions = True before compiling",
                OffloadWarning,
                stacklevel=3,
            )


def _is_operator(graph: Any) -> bool:
    """Whether the graph's call is about to reach the active mode as an operator."""
    is_wrapped: bool = getattr(graph, "_wrap_compiled_regions", False)
    return is_wrapped and is_in_torch_dispatch_mode()
