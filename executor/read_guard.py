"""Guards for what reads a tensor's memory without dispatching an operator.

``torch.save``, ``copy.deepcopy``, ``numpy()``, ``tolist()`` and raw pointers reach the bytes
directly: on a storage that is away they would read nothing, silently. While a run is being executed
they first bring back what they read. A pointer that leaves PyTorch (``data_ptr``, ``numpy``,
DLPack) fixes its storage on the GPU, because nobody can tell how long it is used.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

_COPYING = ("tolist", "__deepcopy__", "__reduce_ex__")
_POINTING = ("numpy", "data_ptr", "__array__", "__dlpack__")
WORKER_THREAD_PREFIX = "teraio"


class ReadGuard:
    """Patches while active. ``require(tensor, is_pointer)`` makes one tensor resident;
    ``bring_back()`` everything, and returns what undoes it after the save.
    """

    def __init__(
        self,
        require: Callable[[torch.Tensor, bool], None],
        bring_back: Callable[[], Callable[[], None]],
    ) -> None:
        self._require = require
        self._bring_back = bring_back
        self._undo: list[Callable[[], None]] = []

    def start(self) -> None:
        """Put the guards in place."""
        for name in (*_COPYING, *_POINTING):
            self._patch_reader(name, is_pointer=name in _POINTING)
        self._patch_save()

    def stop(self) -> None:
        """Take them away."""
        while self._undo:
            self._undo.pop()()

    def _patch_reader(self, name: str, *, is_pointer: bool) -> None:
        is_own = name in torch.Tensor.__dict__
        original = getattr(torch.Tensor, name)
        require = self._require

        @functools.wraps(original)
        def guarded(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not threading.current_thread().name.startswith(WORKER_THREAD_PREFIX):
                require(tensor, is_pointer)
            return original(tensor, *args, **kwargs)

        setattr(torch.Tensor, name, guarded)
        if is_own:
            self._undo.append(lambda: setattr(torch.Tensor, name, original))
        else:
            self._undo.append(lambda: delattr(torch.Tensor, name))

    def _patch_save(self) -> None:
        original = torch.save
        bring_back = self._bring_back

        @functools.wraps(original)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            send_away_again = bring_back()
            try:
                return original(*args, **kwargs)
            finally:
                send_away_again()

        torch.save = guarded
        self._undo.append(lambda: setattr(torch, "save", original))
