"""Safetensors checkpoints, read tensor by tensor: one file, or shards with an index."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from teraio.errors import InputError, MissingDependencyError

INDEX_SUFFIX = ".safetensors.index.json"
_MAX_NAMED = 5


class Checkpoint:
    """Names, shapes and values in safetensors files; nothing is held in memory.

    ``path``: a file, an ``...index.json``, or a folder with ``stem.safetensors`` or its index.
    Raises InputError for what is none of these, MissingDependencyError without safetensors.
    """

    def __init__(self, path: str | Path, stem: str = "model") -> None:
        self.path = Path(path)
        self._file_of = _files_by_name(_find(self.path, stem))
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file in sorted(set(self._file_of.values())):
            with opened(file) as shard:
                for name in set(shard.keys()) & self._file_of.keys():
                    if self._file_of[name] == file:
                        self._shapes[name] = tuple(shard.get_slice(name).get_shape())
        absent = self._file_of.keys() - self._shapes.keys()
        if absent:
            raise InputError(f"{self.path}: the index names {some_of(absent)}, which no shard has")

    def read(self, name: str) -> torch.Tensor:
        """One tensor, in CPU memory that is the file's own pages: not to be written."""
        with opened(self._file_of[name]) as shard:
            tensor: torch.Tensor = shard.get_tensor(name)
        return tensor

    def match(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """Under which name each of the tensors lies here; of a tied one's names any may be here.

        Raises InputError for names that are missing or too many, and for other shapes.
        """
        aliases: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            aliases.setdefault(id(tensor), []).append(name)
        here = {
            name: next((alias for alias in names if alias in self._shapes), "")
            for names in aliases.values()
            for name in names
        }
        self._check_names(
            missing=[name for name, found in here.items() if not found],
            unexpected=self._shapes.keys() - here.keys(),
        )
        for name, found in here.items():
            shape = tuple(tensors[name].shape)
            if self._shapes[found] != shape:
                raise InputError(
                    f"{self.path}: {found} has shape {list(self._shapes[found])}, but in training "
                    f"{list(shape)}"
                )
        return here

    def _check_names(self, *, missing: Collection[str], unexpected: Collection[str]) -> None:
        if missing:
            raise InputError(f"{self.path}: lacks {some_of(missing)}; is it of this model?")
        if unexpected:
            raise InputError(
                f"{self.path}: has {some_of(unexpected)}, which training has not; is it of this "
                "model?"
            )


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """``safetensors.safe_open``, whose errors say which file."""
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError:
        raise MissingDependencyError(
            'checkpoints need safetensors: pip install "teraio[torch]"'
        ) from None
    try:
        with safe_open(str(file), framework="pt", device="cpu") as shard:
            yield shard
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file}: cannot be read as safetensors: {error}") from None


def some_of(names: Iterable[str]) -> str:
    """A few of the names, and how many more there are."""
    ordered = sorted(names)
    text = ", ".join(ordered[:_MAX_NAMED])
    more = len(ordered) - _MAX_NAMED
    return f"{text} and {more} more" if more > 0 else text


def _find(path: Path, stem: str) -> Path:
    candidates = [path]
    if path.is_dir():
        candidates = [path / f"{stem}{INDEX_SUFFIX}", path / f"{stem}.safetensors"]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise InputError(
        f"{path}: no checkpoint there; give a .safetensors file, an index (...{INDEX_SUFFIX}) or a "
        f"folder with {stem}.safetensors"
    )


def _files_by_name(file: Path) -> dict[str, Path]:
    if file.suffix != ".json":
        with opened(file) as shard:
            return dict.fromkeys(shard.keys(), file)
    try:
        weight_map = json.loads(file.read_text())["weight_map"]
        return {name: file.parent / shard for name, shard in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{file}: not an index of safetensors shards ({error!r})") from None
