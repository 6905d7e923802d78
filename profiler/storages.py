"""Identity of storages: births, deaths and generations, never an address alone.

An address (``_cdata``) names a storage only while it lives. A weak reference to the Python storage
object dies exactly with the C++ storage, and its callback removes the address from the table, so a
reused address always meets an empty entry.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

_resize_listeners: list[Callable[[torch.UntypedStorage], None]] = []


def _observed_resize(storage: torch.UntypedStorage, nbytes: int) -> Any:
    result = torch._C.StorageBase.resize_(storage, nbytes)  # type: ignore[attr-defined]
    for listener in tuple(_resize_listeners):
        listener(storage)
    return result


def listen_to_resizes(listener: Callable[[torch.UntypedStorage], None]) -> None:
    """Call ``listener`` after each ``UntypedStorage.resize_`` of user code (FSDP frees that way).

    Dispatch modes do not see these calls, so the method is replaced while anyone listens.
    """
    if not _resize_listeners:
        setattr(torch.UntypedStorage, "resize_", _observed_resize)  # noqa: B010
    _resize_listeners.append(listener)


def stop_listening_to_resizes(listener: Callable[[torch.UntypedStorage], None]) -> None:
    """Undo :func:`listen_to_resizes`; the last one to leave restores torch's own method."""
    _resize_listeners.remove(listener)
    if not _resize_listeners:
        delattr(torch.UntypedStorage, "resize_")


class StorageState:
    """One generation of one storage.

    ``birth_kernel`` is the index in ``birth_iteration`` of the kernel that created it, or by which
    it was first seen (``is_foreign``: created where no dispatch mode looks, such as a data loader).
    ``attachment`` belongs to the mode that uses the registry.
    """

    __slots__ = (
        "address",
        "attachment",
        "birth_iteration",
        "birth_kernel",
        "birth_ordinal",
        "dtype",
        "is_foreign",
        "nbytes",
        "reference",
        "serial",
    )

    def __init__(
        self,
        reference: weakref.ref[torch.UntypedStorage],
        address: int,
        nbytes: int,
        dtype: torch.dtype,
        serial: int,
        birth: tuple[int, int, int],
        *,
        is_foreign: bool,
    ) -> None:
        self.reference = reference
        self.address = address
        self.nbytes = nbytes
        self.dtype = dtype
        self.serial = serial
        self.birth_iteration, self.birth_kernel, self.birth_ordinal = birth
        self.is_foreign = is_foreign
        self.attachment: Any = None


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The tensor's storage, or None for layouts that have none (sparse, mkldnn).

    Of a wrapper (DTensor, jagged tensor) that of the tensor that it wraps.
    """
    while hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        parts = [getattr(tensor, name) for name in names]
        tensor = next(part for part in parts if isinstance(part, torch.Tensor))
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        return None


def original_resize(storage: torch.UntypedStorage, nbytes: int) -> None:
    """Resize without the notice that a running dispatch mode takes of ``UntypedStorage.resize_``.

    The contents are kept only up to the smaller size; 0 gives the memory back.
    """
    torch._C.StorageBase.resize_(storage, nbytes)  # type: ignore[attr-defined]


class _StorageReference(weakref.ref[torch.UntypedStorage]):
    """A weak reference that knows which entry dies with it; a closure would cost more to make."""

    __slots__ = ("address",)
    address: int


class StorageRegistry:
    """All storages of one device type that a dispatch mode has seen and that still live.

    ``on_death`` is called with the state when its memory is freed, from whatever thread frees it.
    """

    def __init__(self, device_type: str, on_death: Callable[[StorageState], None]) -> None:
        self.device_type = device_type
        self._on_death = on_death
        self._by_address: dict[int, StorageState] = {}
        self._next_serial = 0

    def __len__(self) -> int:
        return len(self._by_address)

    def alive(self) -> list[StorageState]:
        """States of all living storages, oldest first."""
        return sorted(self._by_address.values(), key=lambda state: state.serial)

    def find(self, tensor: torch.Tensor) -> StorageState | None:
        """The state of a tensor's storage if it is known."""
        storage = storage_of(tensor)
        return None if storage is None else self._by_address.get(storage._cdata)

    def find_address(self, address: int) -> StorageState | None:
        """The state of the storage that lives at this ``_cdata`` address if it is known."""
        return self._by_address.get(address)

    def find_or_add(
        self, tensor: torch.Tensor, birth: Callable[[], tuple[int, int, int]], *, is_foreign: bool
    ) -> tuple[StorageState | None, bool]:
        """(state, whether it is new); (None, False) for another device or a layout without one."""
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:
            return None, False
        address = storage._cdata
        # Most are known, and then of the right device.
        state = self._by_address.get(address)
        if state is not None:
            if state.reference() is not None:
                return state, False
            # An interrupt has kept the notice of its death from being taken.
            self._forget(state)
        if tensor.device.type != self.device_type:
            return None, False
        return self._add(storage, address, tensor.dtype, birth(), is_foreign=is_foreign), True

    def rebirth(self, state: StorageState, birth: tuple[int, int, int]) -> StorageState | None:
        """Start a new generation of a storage that was resized in place; None if it is gone."""
        storage = state.reference()
        if storage is None:
            return None
        self._forget(state)
        return self._add(storage, state.address, state.dtype, birth, is_foreign=False)

    def _add(
        self,
        storage: torch.UntypedStorage,
        address: int,
        dtype: torch.dtype,
        birth: tuple[int, int, int],
        *,
        is_foreign: bool,
    ) -> StorageState:
        serial = self._next_serial
        self._next_serial = serial + 1

        reference = _StorageReference(storage, self._reference_died)
        reference.address = address
        state = StorageState(
            reference,
            address,
            storage.nbytes(),
            dtype,
            serial,
            birth,
            is_foreign=is_foreign,
        )
        self._by_address[address] = state
        return state

    def _reference_died(self, reference: Any) -> None:
        state = self._by_address.get(reference.address)
        if state is not None and state.reference is reference:
            self._forget(state)

    def _forget(self, state: StorageState) -> None:
        del self._by_address[state.address]
        self._on_death(state)
