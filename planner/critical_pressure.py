"""Critical pressure over bins of time, in blocks, so that long periods are evaluated quickly."""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from teraio.contracts.table import FloatArray, IntArray

_BLOCK = 64


class Pressure(NamedTuple):
    """Bytes above capacity per bin, int64 (bins,), negative where there is room.

    ``seconds`` float64 (bins,) are the bins' lengths; ``highest``, ``lowest`` (bytes) and
    ``block_seconds`` hold the same for blocks of bins.
    """

    excess: IntArray
    seconds: FloatArray
    highest: IntArray
    lowest: IntArray
    block_seconds: FloatArray


def open_pressure(excess_bytes: IntArray, seconds: FloatArray) -> Pressure:
    """Pressure from the excess of each bin; the array is copied."""
    starts = np.arange(0, len(excess_bytes), _BLOCK)
    return Pressure(
        excess=excess_bytes.copy(),
        seconds=seconds,
        highest=np.maximum.reduceat(excess_bytes, starts),
        lowest=np.minimum.reduceat(excess_bytes, starts),
        block_seconds=np.add.reduceat(seconds, starts),
    )


@numba.njit(cache=True)
def relief_byte_seconds(pressure: Pressure, first: int, last: int, num_bytes: int) -> float:
    """Integral of the pressure removed by ``num_bytes`` less in bins [first, last), unrolled."""
    num_bins = len(pressure.excess)
    total = 0.0
    while first < last:
        shift = first // num_bins * num_bins
        end = min(last, shift + num_bins)
        total += _relief(pressure, first - shift, end - shift, num_bytes)
        first = end
    return total


@numba.njit(cache=True)
def _relief(pressure: Pressure, first: int, last: int, num_bytes: int) -> float:
    num_bins = len(pressure.excess)
    total = 0.0
    index = first
    while index < last:
        block = index // _BLOCK
        block_end = min((block + 1) * _BLOCK, num_bins)
        is_whole = index == block * _BLOCK and block_end <= last
        block_end = min(block_end, last)
        if pressure.highest[block] <= 0:
            index = block_end
        elif is_whole and pressure.lowest[block] >= num_bytes:
            total += pressure.block_seconds[block] * num_bytes
            index = block_end
        else:
            while index < block_end:
                excess = pressure.excess[index]
                if excess > 0:
                    total += pressure.seconds[index] * min(excess, num_bytes)
                index += 1
    return total


@numba.njit(cache=True)
def lower_pressure(pressure: Pressure, first: int, last: int, num_bytes: int) -> None:
    """Take ``num_bytes`` off the bins [first, last), unrolled, at most one cycle."""
    num_bins = len(pressure.excess)
    while first < last:
        shift = first // num_bins * num_bins
        end = min(last, shift + num_bins)
        pressure.excess[first - shift : end - shift] -= num_bytes
        for block in range((first - shift) // _BLOCK, (end - shift - 1) // _BLOCK + 1):
            part = pressure.excess[block * _BLOCK : (block + 1) * _BLOCK]
            pressure.highest[block] = part.max()
            pressure.lowest[block] = part.min()
        first = end
