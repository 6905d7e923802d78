"""One optimizer whose parameters step as soon as their gradients are complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from teraio.errors import InputError
from teraio.executor.stepping_order import SteppingOrder
from teraio.profiler.dispatch import KernelMode

_UNCUT_BYTES = 2**62
"""Bucket size under which no list is cut: a unit is one bucket already."""

_PLAIN = (bool, int, float, str)


@dataclass(eq=False)
class _Unit:
    """Parameters that step together, by parameter group; ``missing`` gradients until they can."""

    by_group: list[list[torch.nn.Parameter]]
    size: int = 0
    missing: int = 0

    @property
    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """All of them."""
        return (parameter for group in self.by_group for parameter in group)


class EarlySteps:
    """Hooks on the parameters of an optimizer, and on its ``step``.

    Nothing steps early before the loop has called ``step`` once, unless the optimizer has the state
    that it needs already; ``when_late`` is called then. Errors are InputErrors, raised out of
    ``backward`` or ``step``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        mode: KernelMode,
        order: SteppingOrder,
        names: Mapping[int, str],
        when_late: Callable[[], None],
    ) -> None:
        self.optimizer = optimizer
        self._mode = mode
        self._order = order
        self._names = names
        self._micro_batches = order.micro_batches
        self._when_late = when_late
        self._step = _own_step(optimizer)
        self._is_ready = bool(optimizer.state) or not order.needs_state
        self._handles: list[Any] = []
        self._unit_of: dict[int, _Unit] = {}
        self._num_gradients: dict[int, int] = {}
        self._stepped: set[int] = set()
        self._settings: Any = None
        self._is_scaled = False
        self._whole_groups: list[list[torch.nn.Parameter]] | None = None

    def attach(self) -> None:
        """Set the hooks. Raises InputError for parameters and optimizers that cannot have any."""
        if self.optimizer._optimizer_step_pre_hooks:
            raise InputError(
                "execute: the optimizer has step pre-hooks, which would run after parameters have "
                "stepped; plan without the transform optimizer-in-backward"
            )
        units = enumerate(self._order.units)
        unit_of_name = {name: number for number, unit in units for name in unit}
        groups = self.optimizer.param_groups
        by_number: dict[int, _Unit] = {}
        for index, group in enumerate(groups):
            for parameter in group["params"]:
                name = self._names.get(id(parameter), "")
                number = unit_of_name.get(name, -1 - len(self._unit_of))
                unit = by_number.setdefault(number, _Unit([[] for _ in groups]))
                self._add(parameter, unit, index)
        self._handles += [
            self.optimizer.register_step_pre_hook(self._step_begins),
            self.optimizer.register_step_post_hook(self._step_ends),
        ]
        self._begin_iteration()

    def detach(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._restore_groups()

    def _add(self, parameter: torch.nn.Parameter, unit: _Unit, group: int) -> None:
        if hasattr(parameter, "__tensor_flatten__"):
            raise InputError(
                f"execute: {self._name(parameter)} is sharded, and its gradient is reduced after "
                "the hook on it; plan without the transform optimizer-in-backward"
            )
        unit.by_group[group].append(parameter)
        unit.size += 1
        self._unit_of[id(parameter)] = unit
        if parameter.requires_grad:
            hook = parameter.register_post_accumulate_grad_hook(self._gradient_came)
            self._handles.append(hook)

    # During the backward pass

    def _gradient_came(self, parameter: torch.Tensor) -> None:
        key = id(parameter)
        if key in self._stepped:
            raise InputError(
                f"execute: {self._name(parameter)} gets a gradient after it has stepped: more "
                f"backward passes than the plan's {self._micro_batches} without a call of "
                "optimizer.step(); plan from a trace of this loop, or without the transform "
                "optimizer-in-backward"
            )
        if not self._is_ready:
            return
        self._num_gradients[key] = self._num_gradients.get(key, 0) + 1
        if self._num_gradients[key] == self._micro_batches:
            unit = self._unit_of[key]
            unit.missing -= 1
            if not unit.missing:
                self._step_unit(unit)

    def _step_unit(self, unit: _Unit) -> None:
        settings = self._read_settings()
        if self._settings is None:
            self._settings = settings
        self._check_settings(settings)
        self._scale(unit)
        with self._only(unit.by_group), self._as_optimizer():
            self._step(self.optimizer)
        if self._read_settings() != settings:
            raise InputError(
                f"execute: {type(self.optimizer).__name__} counts its steps for all parameters "
                "together, so that they cannot step one by one; plan without the transform "
                "optimizer-in-backward"
            )
        for parameter in unit.parameters:
            self._stepped.add(id(parameter))
            if self._names.get(id(parameter)) not in self._order.kept:
                parameter.grad = None

    @torch.no_grad()
    def _scale(self, unit: _Unit) -> None:
        """Divide gradients as the pipeline's schedule would after the last backward pass."""
        for parameter in unit.parameters:
            is_scaled = self._names.get(id(parameter)) in self._order.scaled
            if is_scaled and parameter.grad is not None:
                parameter.grad.div_(float(self._micro_batches))

    @contextmanager
    def _only(self, by_group: list[list[torch.nn.Parameter]]) -> Iterator[None]:
        """The optimizer knows of these parameters only."""
        groups = self.optimizer.param_groups
        whole = [group["params"] for group in groups]
        try:
            for index, group in enumerate(groups):
                group["params"] = by_group[index] if index < len(by_group) else []
            yield
        finally:
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters

    @contextmanager
    def _as_optimizer(self) -> Iterator[None]:
        """Kernels are the optimizer's, and their lists are buckets already."""
        mode = self._mode
        before = mode.in_optimizer, mode.bucket_bytes
        mode.in_optimizer, mode.bucket_bytes = True, _UNCUT_BYTES
        try:
            yield
        finally:
            mode.in_optimizer, mode.bucket_bytes = before

    # After it

    def gradients_are_scaled(self, factor: float) -> None:
        """A pipeline's schedule divides by ``factor`` those gradients that are left."""
        if self._stepped and (factor != self._micro_batches or not self._order.scaled):
            self._refuse_scaling(f"divides gradients by {factor:g}")
        self._is_scaled = True

    def _refuse_scaling(self, what: str) -> None:
        raise InputError(
            f"execute: the loop {what}, other than the plan's trace, and parameters have stepped; "
            "plan from a trace of this loop, or without the transform optimizer-in-backward"
        )

    def _step_begins(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Leave to the loop's step what has not stepped."""
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise InputError(
                "execute: optimizer.step() was given a closure, which runs the backward pass "
                "again; plan without the transform optimizer-in-backward"
            )
        if not self._is_ready:
            self._when_late()
        if not self._stepped:
            return
        if self._order.scaled and not self._is_scaled:
            self._refuse_scaling("divides no gradients in a pipeline's schedule")
        self._check_settings(self._read_settings())
        groups = self.optimizer.param_groups
        self._whole_groups = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [p for p in group["params"] if id(p) not in self._stepped]

    def _step_ends(self, *_: Any) -> None:
        self._restore_groups()
        self._is_ready = True
        self._begin_iteration()

    def _restore_groups(self) -> None:
        if self._whole_groups is not None:
            for group, parameters in zip(
                self.optimizer.param_groups, self._whole_groups, strict=True
            ):
                group["params"] = parameters
        self._whole_groups = None

    def _begin_iteration(self) -> None:
        self._num_gradients.clear()
        self._stepped.clear()
        self._settings = None
        self._is_scaled = False
        for unit in self._unit_of.values():
            unit.missing = unit.size

    # Settings

    def _read_settings(self) -> Any:
        """What a step depends on beside parameters, gradients and states; tensors by version."""
        own = {key: v for key, v in vars(self.optimizer).items() if isinstance(v, _PLAIN)}
        groups = [
            {
                key: (id(v), v._version) if isinstance(v, torch.Tensor) else v
                for key, v in group.items()
                if key != "params"
            }
            for group in self.optimizer.param_groups
        ]
        return own, groups

    def _check_settings(self, settings: Any) -> None:
        if settings != self._settings:
            raise InputError(
                "execute: a setting of the optimizer (a learning rate?) changed between the "
                "backward pass, where parameters stepped with the old one, and optimizer.step(); "
                "change it after the step, or plan without the transform optimizer-in-backward"
            )

    def _name(self, parameter: torch.Tensor) -> str:
        return self._names.get(id(parameter)) or "a parameter"


def _own_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The class's step without the hooks that torch puts around it, which are the loop's."""
    step = type(optimizer).step
    wrapped: Callable[..., Any] = getattr(step, "__wrapped__", step)
    return wrapped if getattr(step, "hooked", False) else step
