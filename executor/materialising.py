"""Models that never fit: their tensors are made one module at a time, each in its planned tier.

A model on the meta device has shapes but no memory. Each of its modules gets memory on the compute
device, is initialised or read from a checkpoint, and is written to the place that the plan has for
it before the next one is made. A parameter stays the same Python object (``swap_tensors``), so ties
stay, and so does what an optimizer knows already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn

from teraio.errors import InputError
from teraio.executor.checkpoint_reading import Checkpoint
from teraio.executor.mode import ExecutorMode

Model = TypeVar("Model", bound=nn.Module)
Initialise = Callable[[nn.Module], object]
"""Fills a module's own parameters and buffers, not those of its children."""


class Materialiser:
    """Gives memory and values to tensors within a run's budget, on the run's ``device``."""

    def __init__(self, mode: ExecutorMode, device: torch.device) -> None:
        self._mode = mode
        self._device = device

    def build(self, make: Callable[[], Model]) -> Model:
        """The model that ``make`` builds on the compute device; what does not fit has left.

        Raises InputError if it makes no module.
        """
        with self._mode.aside(), self._device:
            model = make()
        if not isinstance(model, nn.Module):
            raise InputError(f"build: the function made a {type(model).__name__}, not a module")
        self._mode.names.add_model(model)
        with self._mode.lock:
            self._mode.bind_names()
        for tensor in (*model.parameters(), *model.buffers()):
            self.send_home(tensor)
        self._mode.take_places(must_start=False)
        return model

    def materialise(
        self,
        models: Sequence[nn.Module],
        initialise: Initialise | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        """Give memory to what is on the meta device, and values: by ``initialise`` (None: each
        module's ``reset_parameters``), then from the checkpoint to all that is in it.

        Raises InputError for a module that nothing initialises, and a checkpoint that does not fit.
        """
        mode = self._mode
        for model in models:
            mode.names.add_model(model)
        lies_at = {} if checkpoint is None else checkpoint.match(state_of(mode.names.models))
        names = {id(tensor): name for tensor, name, _ in reversed([*mode.names.tensors()])}
        modules = [module for model in models for module in model.modules()]
        # A tied weight is initialised by each module that has it, as it would be without a run.
        is_new = {module for module in modules if _names_left(module, names, lies_at)}
        if initialise is None:
            for module in filter(is_new.__contains__, modules):
                _check_initialiser(module, _names_left(module, names, lies_at)[0])
        with mode.aside():
            for module in modules:
                own = {names[id(tensor)]: tensor for tensor in _own_tensors(module)}
                for name, tensor in own.items():
                    if tensor.is_meta:
                        self._give_memory(name, tensor)
                if module in is_new:
                    (initialise or _reset)(module)
                for name, tensor in own.items():
                    if checkpoint is not None and name in lies_at:
                        self.fill(tensor, checkpoint.read(lies_at[name]))
                    self.send_home(tensor, name)
        mode.take_places(must_start=False)

    def fill(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite a tensor with CPU values, cast to its dtype."""
        mode = self._mode
        # Outside of every dispatch: where a CPU plays the GPU the values are not in its memory.
        quietly = torch._C._DisableTorchDispatch()
        with mode.lock, mode.holding_back([tensor]), quietly, torch.no_grad():
            tensor.detach().copy_(values)

    def send_home(self, tensor: torch.Tensor, name: str | None = None) -> None:
        """Bind a tensor to the plan's storage of this name, and move it to its place there."""
        mode = self._mode
        with mode.lock, torch._C._DisableTorchDispatch():
            state = mode.registry.find(tensor)
            if state is None or state.attachment is None:
                return
            row = None if name is None else mode.schedule.row_of_name.get(name)
            if row is not None:
                mode.binding.bind(state.attachment, row)
            mode.placement.send_home(mode.residency, state.attachment)

    def _give_memory(self, name: str, tensor: torch.Tensor) -> None:
        made = torch.empty_like(tensor, device=self._device)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            made.__class__ = type(tensor)
        made.__dict__.update(tensor.__dict__)
        try:
            torch.utils.swap_tensors(tensor, made)
        except RuntimeError as error:
            raise InputError(
                f"materialise: {name} is referred to elsewhere and cannot get memory ({error}); "
                "materialise before anything else uses the model"
            ) from None


def state_of(models: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """What ``state_dict`` has, as the tensors themselves; the names of a second model begin with
    ``model1.``. Raises InputError for state that is no tensor.
    """
    state = {}
    for index, model in enumerate(models):
        prefix = "" if index == 0 else f"model{index}."
        for name, tensor in model.state_dict(keep_vars=True).items():
            if not isinstance(tensor, torch.Tensor):
                raise InputError(
                    f"state of the model: {name} is a {type(tensor).__name__}, no tensor; keep it "
                    "yourself (torch.save)"
                )
            if hasattr(tensor, "__tensor_flatten__"):
                raise InputError(
                    f"state of the model: {name} is sharded over ranks or wraps other tensors; "
                    "torch.distributed.checkpoint saves and loads such models"
                )
            state[prefix + name] = tensor
    return state


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    """A module's own parameters and buffers, not its children's."""
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _reset(module: nn.Module) -> None:
    module.reset_parameters()  # type: ignore[operator]


def _names_left(
    module: nn.Module, names: Mapping[int, str], lies_at: Mapping[str, str]
) -> list[str]:
    """Of a module's own tensors without memory, those that no checkpoint has."""
    missing = [names[id(tensor)] for tensor in _own_tensors(module) if tensor.is_meta]
    return [name for name in missing if name not in lies_at]


def _check_initialiser(module: nn.Module, name: str) -> None:
    if not callable(getattr(module, "reset_parameters", None)):
        raise InputError(
            f"materialise: nothing gives values to {name}: {type(module).__name__} has no "
            "reset_parameters; give initialise=FUNCTION, which is called with each module, or "
            "let the model's own constructor run inside the budget: run.build(FUNCTION)"
        )
