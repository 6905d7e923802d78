"""What a training loop tells the recorder because no order of kernels shows it.

A pipeline runs several micro-batches at a time, forward passes of one between backward passes of
another, and a transfer to another stage looks the same in both. So the loop says which is which.
One loop at a time trains in a process, as one dispatch mode at a time works.
"""

from __future__ import annotations

import torch

from teraio.profiler.storages import storage_of

_micro_batch: int | None = None
_transfers: dict[int, tuple[str, int]] = {}


def announce_micro_batch(index: int | None) -> None:
    """Kernels belong to this micro-batch until the next call; None: to whichever they seem to."""
    global _micro_batch
    _micro_batch = index
    if index is None:
        _transfers.clear()


def announced_micro_batch() -> int | None:
    """What :func:`announce_micro_batch` was last told."""
    return _micro_batch


def announce_transfer(tensor: torch.Tensor, phase: str, micro_batch: int) -> None:
    """The next send or receive of this tensor belongs to this phase and micro-batch."""
    storage = storage_of(tensor)
    if storage is not None:
        _transfers[storage._cdata] = phase, micro_batch


def take_announced_transfer(tensor: torch.Tensor) -> tuple[str, int] | None:
    """Phase and micro-batch announced for a transfer of this tensor, None if none; good once."""
    storage = storage_of(tensor)
    return None if storage is None else _transfers.pop(storage._cdata, None)
