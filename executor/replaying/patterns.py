"""What storages hold in a replay, so that a transfer that moved wrong bytes is seen.

A stand-in kernel that writes a storage fills words of it with numbers that tell the storage, how
often it has been written, and the word's place. Whatever comes back from a tier must hold the
numbers of the last write. ``sampled`` looks at a word of every page and at the last one: lost,
swapped, stale or torn transfers are seen; ``full`` looks at every byte.
"""

from __future__ import annotations

import torch

from teraio.errors import StoreError

CHECKS = ("full", "sampled", "off")
"""How much of a storage is written and compared."""

_PAGE_BYTES = 4096
_RAMP_LENGTH = 1 << 15
"""Short enough for a cache, and for PyTorch to leave the work to one thread."""

_MULTIPLIER = 0x9E3779B97F4A7C15
"""Odd, so that different writes of different storages give different numbers (Knuth, 6.4)."""

_STEP = 0x100000001
"""Between neighbouring words. Its low byte is odd: bytes differ too, where words are bytes."""


class Patterns:
    """The expected content of every storage, by row; ``num_checked`` counts comparisons.

    On a CPU a difference is an error at once. On a GPU it is noted there, so that the host does not
    wait, and is an error in :meth:`finish`.
    """

    def __init__(self, num_storages: int, device_type: str, check: str) -> None:
        self.is_on = check != "off"
        self.num_checked = 0
        self._stride_bytes = 1 if check == "full" else _PAGE_BYTES
        self._is_immediate = device_type == "cpu"
        self._num_writes = [0] * num_storages
        self._views: dict[int, torch.Tensor] = {}
        self._unwritten: set[int] = set()
        length = _RAMP_LENGTH if self.is_on else 0
        self._ramp = torch.arange(length, dtype=torch.int64, device=device_type) * _STEP
        self._is_wrong = torch.zeros(
            num_storages if self.is_on else 0, dtype=torch.bool, device=device_type
        )

    def born(self, row: int, data: torch.Tensor) -> None:
        """A storage exists from now on; ``data``: all its bytes, uint8 (nbytes,)."""
        if self.is_on and data.numel() > 0:
            self._views[row] = _words(data, self._stride_bytes)
            self._unwritten.add(row)

    def died(self, row: int) -> None:
        """It is gone; its next life begins without content."""
        self._views.pop(row, None)

    def write(self, row: int) -> None:
        """A kernel writes the storage."""
        view = self._views.get(row)
        if view is None:
            return
        self._num_writes[row] += 1
        self._unwritten.discard(row)
        ramp, seed = self._ramp, self._seed(row)
        for begin in range(0, len(view), len(ramp)):
            part = view[begin : begin + len(ramp)]
            torch.add(ramp[: len(part)], _signed(seed + begin), out=part)

    def check(self, row: int, kernel: int) -> None:
        """The storage has come back for ``kernel``. Raises StoreError on a CPU if it is another's
        or an older content.
        """
        view = self._views.get(row)
        if view is None or row in self._unwritten:
            return
        self.num_checked += 1
        ramp, seed = self._ramp, self._seed(row)
        for begin in range(0, len(view), len(ramp)):
            part = view[begin : begin + len(ramp)]
            expected = (ramp[: len(part)] + _signed(seed + begin)).to(part.dtype)
            if not self._is_immediate:
                self._is_wrong[row] |= (part != expected).any()
            elif not torch.equal(part, expected):
                raise StoreError(_message(row, f" for kernel {kernel}"))

    def finish(self) -> None:
        """Raises StoreError that names a storage whose bytes were found to be wrong."""
        wrong = torch.nonzero(self._is_wrong).flatten().tolist()
        if wrong:
            raise StoreError(_message(wrong[0], f" ({len(wrong)} storages in all)"))

    def _seed(self, row: int) -> int:
        return (row * 1_000_003 + self._num_writes[row]) * _MULTIPLIER


def _words(data: torch.Tensor, stride_bytes: int) -> torch.Tensor:
    """Words of the bytes at equal distances, the last one among them."""
    num_bytes = data.numel()
    words = data.view(torch.int64) if num_bytes % 8 == 0 else data
    stride = max(1, stride_bytes // words.element_size())
    return words[(len(words) - 1) % stride :: stride]


def _signed(value: int) -> int:
    """The low 64 bits as PyTorch takes them."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def _message(row: int, where: str) -> str:
    return (
        f"verify: storage {row} came back from its tier with other bytes than were written{where}; "
        "the device or its driver is at fault, or two slots of the plan overlap"
    )
