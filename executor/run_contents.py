"""What a run's models and optimizers hold: made, saved and loaded within its budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn

from teraio.errors import InputError
from teraio.executor.checkpoint_reading import Checkpoint
from teraio.executor.materialising import Initialise, Materialiser, Model
from teraio.executor.mode import ExecutorMode
from teraio.executor.run_handle import RunHandle
from teraio.executor.state_files import StateFiles


class RunContents:
    """The part of an Execution that is about models which fit on no GPU. All of it is called
    inside the ``with`` block (else InputError), between two iterations.
    """

    _mode: ExecutorMode | None
    _device_type: str

    def build(self, make: Callable[[], Model]) -> Model:
        """The model that ``make`` builds, within the budget: what does not fit leaves meanwhile.

        Random values are those that it would have built on the device without a run.
        """
        return self._materialiser().build(make)

    def materialise(
        self,
        model: nn.Module,
        *,
        initialise: Initialise | None = None,
        checkpoint: str | Path | None = None,
    ) -> None:
        """Give a model on the meta device memory and values, one module after another, each
        parameter in the tier that the plan has for it.

        ``initialise`` is called with each module that has tensors of its own without memory (None:
        its ``reset_parameters``). ``checkpoint``: a .safetensors file, an index of shards or a
        folder; its values are cast to the model's dtypes. Raises InputError that names a tensor
        which nothing initialises, and what the checkpoint lacks, has too many or in other shapes.
        """
        opened = None if checkpoint is None else Checkpoint(checkpoint)
        self._materialiser().materialise([model], initialise, opened)

    def save(self, path: str | Path) -> None:
        """Write models and optimizers to a folder of safetensors, tensor by tensor.

        An earlier state there is replaced as a whole. Raises InputError if something else is there.
        """
        with RunHandle(self._entered()).saving():
            self._state_files().save(Path(path))

    def load(
        self,
        path: str | Path,
        model: nn.Module | Iterable[nn.Module] = (),
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
    ) -> None:
        """Go on from a state that :meth:`save` has written, tensor by tensor.

        ``model`` and ``optimizer``: one or several that the run does not know yet. Parameters on
        the meta device get memory. Raises InputError if they are not those that were saved.
        """
        names = self._entered().names
        for module in [model] if isinstance(model, nn.Module) else model:
            names.add_model(module)
        for one in [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer:
            names.add_optimizer(one)
        self._state_files().load(Path(path))

    def _entered(self) -> ExecutorMode:
        if self._mode is None or self._mode.is_idle:
            raise InputError("execute: only inside the `with teraio.execute(...)` block")
        return self._mode

    def _materialiser(self) -> Materialiser:
        return Materialiser(self._entered(), torch.device(self._device_type))

    def _state_files(self) -> StateFiles:
        mode = self._entered()
        return StateFiles(mode, self._materialiser(), RunHandle(mode).borrow)
