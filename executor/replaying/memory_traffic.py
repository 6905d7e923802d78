"""Memory traffic for stand-in kernels: what makes kernels and transfers slow each other down."""

from __future__ import annotations

import time

import torch

_DEVICE_BYTES = 256 * 2**20
"""Several times the last cache of a GPU, so that copies reach its memory."""

_CPU_BYTES = 32 * 2**20
_ROUNDS = 5


class MemoryTraffic:
    """Copies within two buffers of its own, which count beside the replay's budget.

    ``bytes_per_second`` is what a copy reads and writes, measured when nothing else runs.
    """

    def __init__(self, device_type: str) -> None:
        size = _DEVICE_BYTES if device_type == "cuda" else _CPU_BYTES
        self._source = torch.zeros(size, dtype=torch.uint8, device=device_type)
        self._target = torch.zeros(size, dtype=torch.uint8, device=device_type)
        self._is_device = device_type == "cuda"
        self._copy(size)
        self.bytes_per_second = 2 * size / min(self._seconds_of(size) for _ in range(_ROUNDS))

    def move(self, num_bytes: float, seconds: float) -> float:
        """Read and write ``num_bytes`` in all, but no more than take ``seconds`` when nothing else
        runs; the seconds that they take then.
        """
        moved = min(num_bytes, seconds * self.bytes_per_second)
        left = int(moved / 2)
        while left > 0:
            part = min(left, len(self._source))
            self._copy(part)
            left -= part
        return moved / self.bytes_per_second

    def _copy(self, size: int) -> None:
        self._target[:size].copy_(self._source[:size])

    def _seconds_of(self, size: int) -> float:
        if not self._is_device:
            start = time.perf_counter()
            self._copy(size)
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self._copy(size)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
