"""Ending a profiled script at the same step on all ranks, so that none waits for one that has left.

Ranks may have seen enough after different numbers of steps. Each says so in the group's key-value
store; all leave at the end of the step after the last of them did. No collective is used: the
training's own keep ranks within one step of each other.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class AgreedEnd:
    """Calls ``sys.exit()`` inside ``Optimizer.step`` once every rank has called :meth:`complete`.

    Where training is not parallel that is at once. Use as a context manager around the script,
    entered before the recorder.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._is_complete = False
        self._handle: Any = None

    def __enter__(self) -> AgreedEnd:
        self._handle = register_optimizer_step_post_hook(self._stepped)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._handle.remove()

    def complete(self) -> None:
        """This rank has seen enough; may be said again at every step after."""
        if self._is_complete:
            return
        store = _shared_store()
        if store is None:
            sys.exit()
        self._is_complete = True
        store.set(_key(torch.distributed.get_rank()), str(self._steps))

    def _stepped(self, *_: Any) -> None:
        self._steps += 1
        store = _shared_store() if self._is_complete else None
        if store is None:
            return
        keys = [_key(rank) for rank in range(torch.distributed.get_world_size())]
        if store.check(keys) and self._steps > max(int(store.get(key)) for key in keys):
            sys.exit()


def _key(rank: int) -> str:
    return f"teraio/profile/complete/{rank}"


def _shared_store() -> Any:
    """The store of the default process group; None where there is no other rank."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    if distributed.get_world_size() == 1:
        return None
    return distributed.distributed_c10d._get_default_store()
