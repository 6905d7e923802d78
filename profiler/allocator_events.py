"""The CPU allocator's own account of memory: an independent check of anyone's books.

torch's profiler reports every allocation and free of the CPU allocator by the thread that started
it. Frees of memory that was allocated before are not reported, so start it before anything that
will be freed; nor are those by other threads, whose memory counts as held for good.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch

_MARK = "teraio allocator window"


class AllocatorWatch:
    """Bytes held by the CPU allocator since ``start``; ``peak_bytes`` is the most in any window.

    >>> with AllocatorWatch() as watch:
    ...     model = build()
    ...     with watch.window():
    ...         train_step(model)
    >>> watch.peak_bytes
    """

    def __init__(self) -> None:
        self._profiler = torch.autograd.profiler.profile(profile_memory=True)
        self.peak_bytes = 0

    def __enter__(self) -> Self:
        self._profiler.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._profiler.__exit__(None, None, None)
        if exception[0] is None:
            self.peak_bytes = self._peak_bytes()

    @contextmanager
    def window(self) -> Iterator[None]:
        """Mark what ``peak_bytes`` shall speak of."""
        with torch.autograd.profiler.record_function(_MARK):
            yield

    def _peak_bytes(self) -> int:
        windows, changes = [], []
        profiled: Any = self._profiler.kineto_results
        for event in profiled.events():
            if event.name() == "[memory]":
                changes.append((event.start_ns(), event.nbytes()))
            elif event.name() == _MARK:
                windows.append((event.start_ns(), event.end_ns()))
        held = peak = 0
        for at, change in sorted(changes, key=lambda change: change[0]):
            # What is held when a window begins was changed last before it.
            if any(start <= at <= end for start, end in windows):
                peak = max(peak, held)
            held += change
            if any(start <= at <= end for start, end in windows):
                peak = max(peak, held)
        return peak
