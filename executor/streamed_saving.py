"""``torch.save`` within the budget: each storage comes back only while it is written."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

Borrow = Callable[[torch.UntypedStorage], AbstractContextManager[None]]
"""Has a storage on the GPU inside the block, and back where it was afterwards."""


class StreamedArchive:
    """A ``PyTorchFileWriter`` that borrows every storage for the time in which it is written."""

    def __init__(self, archive: Any, borrow: Borrow) -> None:
        self._archive = archive
        self._borrow = borrow

    def write_record(self, name: str, data: Any, nbytes: int) -> None:
        """As the archive's own."""
        if isinstance(data, torch.UntypedStorage):
            with self._borrow(data):
                self._archive.write_record(name, data, nbytes)
        else:
            self._archive.write_record(name, data, nbytes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._archive, name)
