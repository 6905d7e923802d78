"""Quantities derived from a trace, vectorised; never stored (paper, section 3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from teraio.contracts.table import MISSING, BoolArray, FloatArray, IntArray
from teraio.traces.trace import Trace


@dataclass(frozen=True)
class InactivePeriods:
    """The units of planning, int64 or float64 (periods,), ordered by ``after_kernel``.

    ``before_kernel`` is unrolled: it exceeds K where the period wraps into the next iteration, and
    is MISSING for a tail. ``end_kernel`` is the unrolled kernel that ends the absence possible:
    before_kernel, or for a tail the death. ``seconds`` is the ideal time of the kernels strictly
    inside, their gaps included, plus the gap before ``before_kernel``.
    """

    storage: IntArray
    after_kernel: IntArray
    before_kernel: IntArray
    end_kernel: IntArray
    seconds: FloatArray

    def __len__(self) -> int:
        return len(self.storage)

    @property
    def is_tail(self) -> BoolArray:
        """Which periods run from the last access to the death, bool (periods,)."""
        result: BoolArray = self.before_kernel == MISSING
        return result


def live_bytes(trace: Trace, *, allocated: bool = False) -> IntArray:
    """Bytes alive while each kernel runs, int64 (K,): nbytes, or as allocated."""
    storages, num_kernels = trace.storages, trace.num_kernels
    sizes = storages.allocated_bytes if allocated else storages.nbytes
    persistent = trace.is_persistent
    wraps = ~persistent & (storages.death < storages.birth)
    delta = np.zeros(num_kernels + 1, dtype=np.int64)
    np.add.at(delta, storages.birth[~persistent], sizes[~persistent])
    np.add.at(delta, storages.death[~persistent] + 1, -sizes[~persistent])
    at_start = int(sizes[persistent | wraps].sum())
    live: IntArray = at_start + np.cumsum(delta[:-1])
    return live


def active_bytes(trace: Trace) -> IntArray:
    """Bytes (nbytes) that each kernel accesses, int64 (K,)."""
    accesses = trace.accesses
    sizes = trace.storages.nbytes[accesses.storage]
    result = np.zeros(trace.num_kernels, dtype=np.int64)
    np.add.at(result, accesses.kernel, sizes)
    return result


def critical_pressure(trace: Trace, capacity_bytes: int) -> IntArray:
    """Allocated bytes and workspace above ``capacity_bytes`` at each kernel, int64 (K,)."""
    used = live_bytes(trace, allocated=True) + trace.kernels.workspace_bytes
    pressure: IntArray = np.maximum(used - capacity_bytes, 0)
    return pressure


def kernel_starts_seconds(trace: Trace) -> FloatArray:
    """Ideal start of each kernel's gap, and the iteration's end, float64 (K + 1,)."""
    kernels = trace.kernels
    starts = np.zeros(trace.num_kernels + 1)
    np.cumsum(kernels.gap_before_seconds + kernels.duration_seconds, out=starts[1:])
    return starts


def inactive_periods(trace: Trace) -> InactivePeriods:
    """All inactive periods: between consecutive accesses with a kernel between, cyclically; tails.

    Zero-sized and non-resizable storages have periods too; planners skip them.
    """
    storage, position, birth = _ordered_accesses(trace)
    num_kernels, storages = trace.num_kernels, trace.storages
    is_last = np.ones(len(storage), dtype=bool)
    is_last[:-1] = storage[1:] != storage[:-1]
    first_row = np.flatnonzero(np.r_[True, is_last[:-1]]) if len(storage) else np.empty(0, int)
    group = np.cumsum(np.r_[0, is_last[:-1]]) if len(storage) else np.empty(0, int)
    next_position = np.r_[position[1:], 0] if len(storage) else position
    wrapped = position[first_row][group] + num_kernels
    next_position = np.where(is_last, wrapped, next_position)
    lives_on = storages.birth[storage] < 0
    death = (storages.death[storage] - birth) % num_kernels
    is_tail = is_last & ~lives_on
    end = np.where(is_tail, death, next_position)
    keep = np.where(is_tail, end > position, end > position + 1)
    after = (position + birth)[keep] % num_kernels
    shift = after - position[keep]
    end_kernel = end[keep] + shift
    before = np.where(is_tail[keep], MISSING, end_kernel)
    seconds = _ideal_seconds_inside(trace, after, end_kernel, is_tail[keep])
    order = np.lexsort((storage[keep], after))
    return InactivePeriods(
        storage=storage[keep][order],
        after_kernel=after[order],
        before_kernel=before[order],
        end_kernel=end_kernel[order],
        seconds=seconds[order],
    )


def _ordered_accesses(trace: Trace) -> tuple[IntArray, IntArray, IntArray]:
    """Accesses by storage, then by position counted from birth (persistent: from kernel 0)."""
    accesses, storages = trace.accesses, trace.storages
    birth = np.maximum(storages.birth, 0)[accesses.storage]
    position = (accesses.kernel - birth) % trace.num_kernels
    order = np.lexsort((position, accesses.storage))
    return accesses.storage[order], position[order], birth[order]


def _ideal_seconds_inside(
    trace: Trace, after: IntArray, end: IntArray, is_tail: BoolArray
) -> FloatArray:
    starts = kernel_starts_seconds(trace)
    num_kernels = trace.num_kernels
    last_inside = np.where(is_tail, end + 1, end)

    def time_of(kernel: IntArray) -> FloatArray:
        result: FloatArray = starts[kernel % num_kernels] + starts[-1] * (kernel // num_kernels)
        return result

    gap = np.where(is_tail, 0.0, trace.kernels.gap_before_seconds[end % num_kernels])
    result: FloatArray = time_of(last_inside) - time_of(after + 1) + gap
    return result
