"""Where a measurement is made from: one GPU, or the CPU in its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from teraio.errors import InputError
from teraio.executor.probing.numa import gpu_nodes


@dataclass(frozen=True)
class GpuPlace:
    """What plays one GPU: ``device`` as PyTorch names it, and its node (None: unknown)."""

    index: int
    device: str
    node: int | None = None

    @property
    def is_cuda(self) -> bool:
        """Whether it is a GPU and not the CPU."""
        return self.device != "cpu"

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make it PyTorch's current device."""
        if self.device == "cpu":
            yield
            return
        with torch.cuda.device(self.index):
            yield


def places_of(device: str) -> list[GpuPlace]:
    """``cuda`` is all GPUs, ``cuda:1`` one, ``cpu`` the CPU. Raises InputError for others."""
    try:
        wanted = torch.device(device)
    except RuntimeError:
        wanted = torch.device("meta")
    if wanted.type not in ("cpu", "cuda"):
        raise InputError(f"device: must be cpu, cuda or cuda:N, got {device!r}")
    if wanted.type == "cpu":
        return [GpuPlace(0, "cpu")]
    count = torch.cuda.device_count()
    gpus = range(count) if wanted.index is None else range(wanted.index, wanted.index + 1)
    if not gpus or gpus[-1] >= count:
        raise InputError(f"device: {device} was asked for, PyTorch sees {count} CUDA devices")
    nodes = gpu_nodes(gpus) or [None] * len(gpus)
    return [GpuPlace(gpu, f"cuda:{gpu}", node) for gpu, node in zip(gpus, nodes, strict=True)]
