"""What an iteration of a run did, kernel by kernel, until it has been compared with the plan."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch

from teraio.profiler.dispatch import KernelCall
from teraio.profiler.storages import StorageState

_NO_BACKWARD = -1


class ObservedKernel(NamedTuple):
    """``touched``: (storage, READ | WRITE) in order of appearance; ``born``: in order."""

    op: str
    signature: int
    phase: str
    touched: tuple[tuple[StorageState, int], ...]
    born: tuple[StorageState, ...]


class Observation:
    """The newest kernels of an iteration, at most ``limit``: before the first one of a training a
    script may run anything.
    """

    def __init__(self, limit: int) -> None:
        self.kernels: deque[ObservedKernel] = deque(maxlen=limit)
        self._num_seen = 0

    @property
    def is_whole(self) -> bool:
        """Whether every kernel of the iteration is there."""
        return self._num_seen == len(self.kernels)

    def hash_of_kernels(self) -> int:
        """Equal for iterations of the same kernels with the same shapes."""
        return hash(tuple((kernel.op, kernel.signature) for kernel in self.kernels))

    def note(self, call: KernelCall, *, in_optimizer: bool) -> None:
        """A kernel has run."""
        if torch._C._current_graph_task_id() != _NO_BACKWARD:
            phase = "backward"
        else:
            phase = "optimizer" if in_optimizer else "other"
        self._num_seen += 1
        self.kernels.append(
            ObservedKernel(
                call.operator.name,
                call.signature,
                phase,
                tuple(call.flags.items()),
                tuple(call.born),
            )
        )
