"""Guards for what reads a tensor's memory without dispatching an operator.

``torch.save``, ``copy.deepcopy``, ``numpy()``, ``tolist()``, storages and raw pointers reach the
bytes directly: on a storage that is away they would read nothing, silently. While a run is being
executed they first bring back what they read. A pointer that leaves PyTorch (``data_ptr``,
``numpy``, DLPack, shared memory) fixes its storage on the GPU, because nobody can tell how long it
is used; one that a running kernel takes does not, because it ends with the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch

from teraio.executor.patches import Patches
from teraio.executor.streamed_saving import StreamedArchive
from teraio.profiler.storages import storage_of

_COPYING = ("tolist", "__deepcopy__", "__reduce_ex__", "__repr__")
_POINTING = ("numpy", "data_ptr", "__array__", "__dlpack__")
_STORAGE_COPYING = ("__getitem__", "__setitem__", "_write_file", "copy_", "fill_", "_byteswap")
_STORAGE_POINTING = ("data_ptr", "_share_fd_cpu_", "_share_filename_cpu_", "_share_cuda_")
_STORAGE_SIZES = ("nbytes", "size", "__len__")


class Guarded(Protocol):
    """What guards ask of a run."""

    def require(self, storage: torch.UntypedStorage, *, is_pointer: bool) -> None:
        """Bring a storage back; for good if a pointer to it is given away."""
        ...

    def nbytes_of(self, storage: torch.UntypedStorage) -> int | None:
        """Size of a storage that is away, None for any other."""
        ...

    def make_idle(self, storage: torch.UntypedStorage) -> None:
        """Let no transfer use the storage's memory, which the caller replaces."""
        ...

    def bring_back(self) -> Callable[[], None]:
        """Bring everything back; the result undoes it."""
        ...

    @property
    def is_streaming(self) -> bool:
        """Whether this thread is inside :meth:`saving`."""
        ...

    def saving(self) -> AbstractContextManager[None]:
        """Inside, storages that are away are read one by one: :meth:`borrow`."""
        ...

    def borrow(self, storage: torch.UntypedStorage) -> AbstractContextManager[None]:
        """Have a storage on the GPU inside the block, and where it was afterwards."""
        ...


class ReadGuard:
    """Patches while active, on behalf of one run."""

    def __init__(self, run: Guarded) -> None:
        self._run = run
        self._patches = Patches()

    def start(self) -> None:
        """Put the guards in place."""
        for name in (*_COPYING, *_POINTING):
            self._guard_tensor_method(torch.Tensor, name, is_pointer=name in _POINTING)
        for owner in (torch, torch.utils.dlpack):
            self._guard_tensor_method(owner, "to_dlpack", is_pointer=True)
        for name in (*_STORAGE_COPYING, *_STORAGE_POINTING):
            self._guard_storage_method(name, is_pointer=name in _STORAGE_POINTING)
        for name in _STORAGE_SIZES:
            self._guard_size(name)
        self._guard_resize()
        # What torch.save calls, whatever name the user has imported it under.
        self._guard_save()
        self._guard_legacy_save()

    def stop(self) -> None:
        """Take them away."""
        self._patches.undo()

    def _guard_tensor_method(self, owner: Any, name: str, *, is_pointer: bool) -> None:
        run = self._run
        # A save's pickle refers to storages, which are read one by one afterwards.
        is_read_later = name == "__reduce_ex__"

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def guarded(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                storage = None if is_read_later and run.is_streaming else storage_of(tensor)
                if storage is not None:
                    run.require(storage, is_pointer=is_pointer)
                return original(tensor, *args, **kwargs)

            return guarded

        self._patches.wrap(owner, name, make)

    def _guard_storage_method(self, name: str, *, is_pointer: bool) -> None:
        run = self._run
        # A save asks for addresses only to tell storages apart.
        is_read_later = name == "data_ptr"

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def guarded(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
                storages = [storage, *(a for a in args if isinstance(a, torch.UntypedStorage))]
                if run.is_streaming:
                    with ExitStack() as lent:
                        for one in [] if is_read_later else storages:
                            lent.enter_context(run.borrow(one))
                        return original(storage, *args, **kwargs)
                for one in storages:
                    run.require(one, is_pointer=is_pointer and one is storage)
                return original(storage, *args, **kwargs)

            return guarded

        self._patches.wrap(torch.UntypedStorage, name, make)

    def _guard_size(self, name: str) -> None:
        """A storage that is away keeps the size that its owner knows."""
        run = self._run

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def guarded(storage: torch.UntypedStorage) -> Any:
                size = original(storage)
                away_bytes = run.nbytes_of(storage) if size == 0 else None
                return size if away_bytes is None else away_bytes

            return guarded

        self._patches.wrap(torch.UntypedStorage, name, make)

    def _guard_resize(self) -> None:
        run = self._run

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def guarded(storage: torch.UntypedStorage, nbytes: int) -> Any:
                if nbytes > 0:
                    run.require(storage, is_pointer=False)
                run.make_idle(storage)
                return original(storage, nbytes)

            return guarded

        self._patches.wrap(torch.UntypedStorage, "resize_", make)

    def _guard_save(self) -> None:
        run = self._run

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def guarded(obj: Any, zip_file: Any, *args: Any, **kwargs: Any) -> Any:
                with run.saving():
                    archive = StreamedArchive(zip_file, run.borrow)
                    return original(obj, archive, *args, **kwargs)

            return guarded

        self._patches.wrap(torch.serialization, "_save", make)

    def _guard_legacy_save(self) -> None:
        run = self._run

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def guarded(*args: Any, **kwargs: Any) -> Any:
                send_away_again = run.bring_back()
                try:
                    return original(*args, **kwargs)
                finally:
                    send_away_again()

            return guarded

        self._patches.wrap(torch.serialization, "_legacy_save", make)
