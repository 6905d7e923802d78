"""Parameters that step in the backward pass, as a plan of ``optimizer-in-backward`` asks.

A hook on each parameter counts its gradients. With that of the last micro-batch, as soon as all
parameters of its unit have theirs, the optimizer's own ``step`` runs for that unit alone, which
gives the same values as a step of all at the end, bit for bit, and the gradients are dropped. The
loop's call of ``step`` then does what is left: parameters whose gradients did not come in every
micro-batch, and everything in a run's first step, which creates the optimizer's state.

What a step in the backward pass cannot see must not exist: gradients changed after it (clipping,
scaled losses), settings changed between it and the loop's call, more backward passes than the plan
knows of. Each ends the run with an InputError.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from teraio.errors import InputError
from teraio.executor.early_steps import EarlySteps
from teraio.executor.patches import Patches
from teraio.executor.stepping_order import SteppingOrder
from teraio.profiler.dispatch import KernelMode

NAME = "optimizer-in-backward"

_REDUCING = ("DistributedDataParallel", "FullyShardedDataParallel")
"""Modules that reduce gradients after the hooks on them have run."""


class OptimizerInBackward:
    """Steps the parameters of optimizers early while started; see the module's docstring.

    Optimizers that are not given are noticed at their first step. ``when_late`` is called in a
    first step at which everything steps as the loop says.
    """

    def __init__(
        self,
        mode: KernelMode,
        order: SteppingOrder,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        when_late: Callable[[], None] = lambda: None,
    ) -> None:
        self._mode = mode
        self._order = order
        self._optimizers = list(optimizers)
        self._when_late = when_late
        self._steps: list[EarlySteps] = []
        self._patches = Patches()
        self._handle: Any = None
        self._watches_pipelines = False
        self._thread = threading.get_ident()

    def start(self) -> None:
        """Hook the parameters. Raises InputError for training that cannot step in its backward."""
        for optimizer in self._optimizers:
            self._attach(optimizer)
        self._handle = register_optimizer_step_pre_hook(self._notice)
        clipping = importlib.import_module("torch.nn.utils.clip_grad")
        for name in ("_get_total_norm", "_group_tensors_by_device_and_dtype"):
            if hasattr(clipping, name):
                self._patches.wrap(clipping, name, _refusing_to_clip)
        self._patches.wrap(torch.amp.GradScaler, "scale", _refusing_to_scale)

    def stop(self) -> None:
        """Take all hooks off."""
        self._patches.undo()
        if self._handle is not None:
            self._handle.remove()
        for steps in self._steps:
            steps.detach()

    def _notice(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        is_known = any(steps.optimizer is optimizer for steps in self._steps)
        if not is_known and threading.get_ident() == self._thread:
            self._attach(optimizer)

    def _attach(self, optimizer: torch.optim.Optimizer) -> None:
        self._check_models()
        self._watch_pipelines()
        names = {
            id(tensor): name
            for tensor, name, kind in reversed(list(self._mode.names.tensors()))
            if kind == "parameter"
        }
        steps = EarlySteps(optimizer, self._mode, self._order, names, self._when_late)
        self._steps.append(steps)
        steps.attach()

    def _watch_pipelines(self) -> None:
        """Be told when a pipeline's schedule scales gradients, some of which are gone by then."""
        stage = sys.modules.get("torch.distributed.pipelining.stage")
        base = getattr(stage, "_PipelineStageBase", None)
        if base is None or self._watches_pipelines:
            return
        self._watches_pipelines = True

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def scale_grads(stage: Any, grad_scale_factor: float) -> Any:
                for steps in self._steps:
                    steps.gradients_are_scaled(grad_scale_factor)
                return original(stage, grad_scale_factor)

            return scale_grads

        self._patches.wrap(base, "scale_grads", make)

    def _check_models(self) -> None:
        for model in self._mode.names.models:
            for module in model.modules():
                if type(module).__name__ in _REDUCING:
                    raise InputError(
                        f"execute: {type(module).__name__} reduces gradients after each "
                        f"parameter's hook; plan without the transform {NAME}"
                    )


def _refusing_to_clip(original: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise InputError(
            f"execute: the plan's transform {NAME} steps parameters before all gradients are "
            "there, so gradients cannot be clipped; plan without it, or do not clip"
        )

    return refuse


def _refusing_to_scale(original: Callable[..., Any]) -> Callable[..., Any]:
    def scale(scaler: Any, outputs: Any) -> Any:
        if scaler.is_enabled():
            raise InputError(
                f"execute: the plan's transform {NAME} steps parameters before a GradScaler "
                "could unscale their gradients; plan without it, or train in bfloat16"
            )
        return original(scaler, outputs)

    return scale
