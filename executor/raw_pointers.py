"""Kernels that take raw pointers, in an executed run (docs/execution.md: raw pointers)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from teraio.executor.mode import ExecutorMode
from teraio.executor.patches import Patches
from teraio.executor.ranks import is_parallel
from teraio.profiler.raw_kernels import RawKernels
from teraio.profiler.raw_kernels import guard as guard

_COMPARING = (("torch.distributed.fsdp._fully_shard._fsdp_param", "FSDPParam.reset_sharded_param"),)
"""Of parallel training: what asks for pointers to compare them, and gives none away."""


class RawPointerGuard:
    """Makes raw kernels kernels of the run while started.

    Inside other kernels (a custom operator that launches Triton) and in other threads they are no
    kernels: what they take is made resident, over the budget if need be, and held until they
    return.
    """

    def __init__(self, mode: ExecutorMode) -> None:
        self._mode = mode
        self._kernels = RawKernels(mode, self._hold)
        self._patches = Patches()

    def start(self) -> None:
        """Watch for raw kernels."""
        self._kernels.__enter__()
        if is_parallel():
            for module, name in _COMPARING:
                # Private to PyTorch: where it is not, pointers count as given away.
                with suppress(ImportError, AttributeError):
                    self._let_compare(importlib.import_module(module), *name.split("."))

    def stop(self) -> None:
        """Watch no longer."""
        self._patches.undo()
        self._kernels.__exit__(None, None, None)

    def _let_compare(self, module: Any, owner: str, name: str) -> None:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **kwargs: self._hold([], lambda: original(*args, **kwargs))

        self._patches.wrap(getattr(module, owner), name, make)

    def _hold(self, tensors: list[torch.Tensor], call: Callable[[], Any]) -> Any:
        mode = self._mode
        if mode.is_idle:
            return call()
        with mode.lock, mode.residency.keeping(), mode.holding_back(tensors):
            return call()
