"""What a compiled region returns: which outputs are inputs, which share memory, and how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _View(NamedTuple):
    """Where a tensor lies within its storage; the offset counts elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> _View:
        shape, strides = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
        return cls(tensor.dtype, shape, strides, int(tensor.storage_offset()))

    def take(self, owner: Tensor) -> Tensor:
        """This view of the owner's storage."""
        typed = owner if owner.dtype == self.dtype else owner.view(self.dtype)
        return typed.as_strided(self.shape, self.strides, self.offset)


@dataclass(frozen=True, slots=True)
class _FromInput:
    """An output that is an input (``view`` None), or shows a part of one."""

    index: int
    view: _View | None


@dataclass(frozen=True, slots=True)
class _FromNew:
    """An output in memory of its own, or of its own and other outputs'."""

    number: int
    view: _View


class OutputLayout:
    """The outputs of a region by their places in memory, learned from one run of its graph.

    ``inputs`` and ``outputs`` may be fake. What is no tensor among the outputs stays as it is.
    """

    def __init__(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        self._new_bytes: list[int] = []
        self._first_dtypes: list[torch.dtype] = []
        self._devices: list[torch.device] = []
        self._sources: list[Any] = []
        self._numbers: dict[int, int] = {}
        owners = {_address(x): i for i, x in reversed(list(enumerate(inputs))) if _is_tensor(x)}
        for output in outputs:
            self._sources.append(self._source_of(output, inputs, owners))

    @property
    def new_bytes(self) -> int:
        """Bytes of the storages that the region makes for its outputs."""
        return sum(self._new_bytes)

    def _source_of(self, output: Any, inputs: Sequence[Any], owners: dict[int, int]) -> Any:
        if not _is_tensor(output):
            return output
        same = next((i for i, x in enumerate(inputs) if x is output), None)
        if same is not None:
            return _FromInput(same, None)
        address = _address(output)
        if address in owners:
            return _FromInput(owners[address], _View.of(output))
        number = self._numbers.get(address)
        if number is None:
            number = self._numbers[address] = len(self._new_bytes)
            self._new_bytes.append(output.untyped_storage().nbytes())
            self._first_dtypes.append(output.dtype)
            self._devices.append(output.device)
        return _FromNew(number, _View.of(output))

    def make(self, inputs: Sequence[Any]) -> list[Any]:
        """Outputs for these inputs, with unset values in new memory."""
        made: dict[int, Tensor] = {}
        return [self._make_one(source, inputs, made) for source in self._sources]

    def _make_one(self, source: Any, inputs: Sequence[Any], made: dict[int, Tensor]) -> Any:
        if isinstance(source, _FromInput):
            owner = inputs[source.index]
            return owner if source.view is None else source.view.take(owner)
        if not isinstance(source, _FromNew):
            return source
        if source.number not in made:
            made[source.number] = self._allocate(source.number)
        return source.view.take(made[source.number])

    def _allocate(self, number: int) -> Tensor:
        dtype = self._first_dtypes[number]
        count = -(-self._new_bytes[number] // dtype.itemsize)
        return torch.empty(count, dtype=dtype, device=self._devices[number])


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
