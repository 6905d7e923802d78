"""A run's whole state in safetensors files, written and read tensor by tensor.

A folder: ``model.safetensors`` or shards with an index, under the names of ``state_dict``, as other
libraries read them; ``optimizer...`` the same, as ``PARAMETER.KEY``; ``optimizers.pt``, what is no
tensor; and ``teraio.json``, the mark of such a folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from teraio.contracts.output import recover_directory, replacing_directory
from teraio.errors import InputError, MissingDependencyError
from teraio.executor.checkpoint_reading import INDEX_SUFFIX, Checkpoint, some_of
from teraio.executor.materialising import Materialiser, state_of
from teraio.executor.mode import ExecutorMode

SHARD_BYTES = 10**9
"""Most host memory that a save takes, unless one tensor is larger."""

_FORMAT = {"format": "teraio state", "version": 1}
_MARK_FILE, _SETTINGS_FILE = "teraio.json", "optimizers.pt"
_IN_FILES = "<tensor>"
"""Stands in the settings for a value that lies in the files."""

Borrow = Callable[[torch.UntypedStorage], AbstractContextManager[None]]


class StateFiles:
    """Saves and loads what a mode's models and optimizers hold.

    ``borrow``: has a storage on the compute device inside its block.
    """

    def __init__(self, mode: ExecutorMode, materialiser: Materialiser, borrow: Borrow) -> None:
        self._mode = mode
        self._materialiser = materialiser
        self._borrow = borrow

    def save(self, path: Path) -> None:
        """Write a folder, which replaces an earlier one. Raises InputError if anything else stands
        there, or if there is nothing to save yet.
        """
        names = self._mode.names
        if not names.models:
            raise InputError("save: the run knows no model yet; give it to execute, or train first")
        model = state_of(names.models)
        unique = {id(tensor): name for name, tensor in reversed(model.items())}
        settings, states = self._optimizer_state()
        with replacing_directory(path, is_ours=is_state_folder) as folder:
            self._write(folder, "model", {n: model[n] for n in reversed(unique.values())})
            self._write(folder, "optimizer", states)
            with torch._C._DisableTorchDispatch():
                torch.save(settings, folder / _SETTINGS_FILE)
            (folder / _MARK_FILE).write_text(json.dumps(_FORMAT) + "\n")

    def load(self, path: Path) -> None:
        """Read what :meth:`save` wrote into the models (meta ones get memory) and optimizers that
        the run knows. Raises InputError if they are others.
        """
        recover_directory(path)
        if not is_state_folder(path):
            raise InputError(f"{path}: not a state that run.save has written")
        names = self._mode.names
        if not names.models:
            raise InputError("load: the run knows no model; give it: run.load(PATH, model)")
        settings = torch.load(path / _SETTINGS_FILE, weights_only=True)
        if len(settings) != len(names.optimizers):
            raise InputError(
                f"load: {path} holds the state of {len(settings)} optimizers, the run knows "
                f"{len(names.optimizers)}; give them: run.load(PATH, model, optimizer)"
            )
        self._materialiser.materialise(names.models, checkpoint=Checkpoint(path))
        if not settings:
            return
        states = Checkpoint(path, "optimizer") if (_has(path, "optimizer")) else None
        with self._mode.aside():
            for one, optimizer in zip(settings, names.optimizers, strict=True):
                self._load_optimizer(optimizer, one, states)
        self._mode.take_places(must_start=False)

    # Optimizers

    def _optimizer_state(self) -> tuple[list[Any], dict[str, torch.Tensor]]:
        """Per optimizer what is no tensor; and all tensors of parameters' states, by name."""
        settings, tensors = [], {}
        for index, optimizer in enumerate(self._mode.names.optimizers):
            prefix = "" if index == 0 else f"optimizer{index}."
            state: dict[str, dict[str, Any]] = {}
            groups = []
            for group, names in zip(optimizer.param_groups, self._names_of(optimizer), strict=True):
                groups.append({k: v for k, v in group.items() if k != "params"} | {"names": names})
                for parameter, name in zip(group["params"], names, strict=True):
                    values = optimizer.state.get(parameter, {})
                    state[name] = {
                        key: _IN_FILES if isinstance(value, torch.Tensor) else value
                        for key, value in values.items()
                    }
                    for key, value in values.items():
                        if isinstance(value, torch.Tensor):
                            tensors[f"{prefix}{name}.{key}"] = value
            settings.append({"param_groups": groups, "state": state, "prefix": prefix})
        return settings, tensors

    def _names_of(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """Of the parameters, by group; one that no model has is numbered."""
        book = {id(t): name for t, name, _ in reversed([*self._mode.names.tensors()])}
        return [[book[id(p)] for p in group["params"]] for group in optimizer.param_groups]

    def _load_optimizer(
        self, optimizer: torch.optim.Optimizer, settings: Any, states: Checkpoint | None
    ) -> None:
        saved, prefix = settings["param_groups"], settings["prefix"]
        names = self._names_of(optimizer)
        if [group["names"] for group in saved] != names:
            known = {name for group in names for name in group}
            other = known ^ {name for group in saved for name in group["names"]}
            raise InputError(
                "load: the optimizer has other parameters or groups than the saved one"
                + (f": {some_of(other)}" if other else "")
            )
        _load_settings(optimizer, saved)
        for group, group_names in zip(optimizer.param_groups, names, strict=True):
            on_device = bool(group.get("fused") or group.get("capturable"))
            for parameter, name in zip(group["params"], group_names, strict=True):
                for key, value in settings["state"].get(name, {}).items():
                    made = value
                    if isinstance(value, str) and value == _IN_FILES and states is not None:
                        full_name = f"{prefix}{name}.{key}"
                        values = states.read(full_name)
                        is_local = key == "step" and not on_device
                        made = _room_for(values, parameter, on_cpu=is_local)
                        self._materialiser.fill(made, values)
                        self._materialiser.send_home(made, full_name)
                    optimizer.state[parameter][key] = made

    # Files

    def _write(self, folder: Path, stem: str, tensors: Mapping[str, torch.Tensor]) -> None:
        save_file = _save_file()
        shards = list(_shards(tensors))
        weight_map: dict[str, str] = {}
        for number, names in enumerate(shards, start=1):
            file = f"{stem}.safetensors"
            if len(shards) > 1:
                file = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
            copies = {name: self._copy(tensors[name]) for name in names}
            with torch._C._DisableTorchDispatch():
                save_file(copies, folder / file, {"format": "pt"})
            weight_map |= dict.fromkeys(names, file)
        if len(shards) > 1:
            total = sum(_nbytes(tensor) for tensor in tensors.values())
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (folder / f"{stem}{INDEX_SUFFIX}").write_text(json.dumps(index, indent=1) + "\n")

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """In host memory, contiguous."""
        quietly = torch._C._DisableTorchDispatch()
        with self._borrow(tensor.untyped_storage()), quietly, torch.no_grad():
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            return copy.copy_(tensor)


def is_state_folder(path: Path) -> bool:
    """Whether ``run.save`` wrote what stands at ``path``."""
    mark = path / _MARK_FILE
    return mark.is_file() and mark.read_text().startswith('{"format": "teraio state"')


def _room_for(values: torch.Tensor, parameter: torch.Tensor, *, on_cpu: bool) -> torch.Tensor:
    """Memory beside the parameter, laid out as it is if the shapes are the same."""
    device = torch.device("cpu") if on_cpu else parameter.device
    if values.shape == parameter.shape:
        return torch.empty_strided(
            parameter.shape, parameter.stride(), dtype=values.dtype, device=device
        )
    return torch.empty(values.shape, dtype=values.dtype, device=device)


def _load_settings(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Through the optimizer's own door, which numbers parameters; the states come afterwards."""
    numbered, start = [], 0
    for group in groups:
        settings = {key: value for key, value in group.items() if key != "names"}
        stop = start + len(group["names"])
        numbered.append({**settings, "params": list(range(start, stop))})
        start = stop
    optimizer.load_state_dict({"state": {}, "param_groups": numbered})


def _shards(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """Names in order, so many that their bytes stay within SHARD_BYTES."""
    names: list[str] = []
    total = 0
    for name, tensor in tensors.items():
        nbytes = _nbytes(tensor)
        if names and total + nbytes > SHARD_BYTES:
            yield names
            names, total = [], 0
        names.append(name)
        total += nbytes
    if names:
        yield names


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _has(path: Path, stem: str) -> bool:
    return any((path / f"{stem}{s}").is_file() for s in (".safetensors", INDEX_SUFFIX))


def _save_file() -> Callable[..., None]:
    try:
        from safetensors.torch import save_file
    except ModuleNotFoundError:
        raise MissingDependencyError(
            'checkpoints need safetensors: pip install "teraio[torch]"'
        ) from None
    return save_file
