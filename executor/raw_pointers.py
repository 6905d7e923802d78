"""Kernels that take raw pointers, in an executed run (docs/execution.md: raw pointers)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from teraio.executor.mode import ExecutorMode
from teraio.profiler.raw_kernels import RawKernels
from teraio.profiler.raw_kernels import guard as guard


class RawPointerGuard:
    """Makes raw kernels kernels of the run while started.

    Inside other kernels (a custom operator that launches Triton) and in other threads they are no
    kernels: what they take is made resident, over the budget if need be, and held until they
    return.
    """

    def __init__(self, mode: ExecutorMode) -> None:
        self._mode = mode
        self._kernels = RawKernels(mode, self._hold)

    def start(self) -> None:
        """Watch for raw kernels."""
        self._kernels.__enter__()

    def stop(self) -> None:
        """Watch no longer."""
        self._kernels.__exit__(None, None, None)

    def _hold(self, tensors: list[torch.Tensor], call: Callable[[], Any]) -> Any:
        mode = self._mode
        if mode.is_idle:
            return call()
        with mode.lock, mode.residency.keeping(), mode.holding_back(tensors):
            return call()
