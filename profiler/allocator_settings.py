"""Settings of CUDA's caching allocator that make its books predictable.

By default a cached block may be handed out for a request up to 1 MiB smaller, and counts whole:
what ``torch.cuda.max_memory_allocated`` shows then depends on history, not on the program. With
expandable segments every block is split to multiples of 512 bytes, and fragmentation is lower.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@contextmanager
def exact_blocks(device_type: str) -> Iterator[None]:
    """Let the caching allocator split blocks exactly; the user's settings come back afterwards."""
    if device_type != "cuda":
        yield
        return
    given = next((os.environ[name] for name in _VARIABLES if name in os.environ), "")
    if "expandable_segments" in given or "cudaMallocAsync" in given:
        yield
        return
    prefix = f"{given}," if given else ""
    _set(f"{prefix}expandable_segments:True")
    try:
        yield
    finally:
        _set(f"{prefix}expandable_segments:False")


def _set(settings: str) -> None:
    # Newer versions have one function for all accelerators, and warn of the other.
    newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (newer or torch.cuda.memory._set_allocator_settings)(settings)
