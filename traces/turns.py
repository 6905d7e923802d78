"""Turns: where a trace of many micro-batches does the same over and over.

A *turn* is what separates the starts of two successive micro-batches in the middle of an iteration:
forward and backward of one, or, on a rank of a 1F1B pipeline, the forward of one and the backward
of another. Only kernels are compared here; :mod:`teraio.traces.folding` compares storages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from teraio.contracts.table import MISSING, BoolArray, IntArray
from teraio.traces.period_candidates import Origins, count_from_end, owning_kernels
from teraio.traces.trace import Kernels, Trace

_SAME_IN_ALL_TURNS = (
    "signature",
    "call",
    "stream",
    "peer_rank",
    "op",
    "module",
    "phase",
    "group",
)


@dataclass(frozen=True)
class Turns:
    """``count`` turns of ``length`` kernels each, from kernel ``first_kernel``."""

    first_kernel: int
    length: int
    count: int

    @property
    def end_kernel(self) -> int:
        """First kernel after the last turn."""
        return self.first_kernel + self.count * self.length


@dataclass(frozen=True, eq=False)
class Places:
    """Where storages come from within their micro-batch, int64 (S,), alike in all micro-batches.

    ``kernel`` and ``rank`` are the birth (:class:`Origins`), ``position`` the first access of an
    unnamed persistent storage, ``micro_batch`` the one that the kernel belongs to, or precedes.
    ``place`` numbers the kernel from the end of its run of kernels of one phase, and those runs
    from the last of the micro-batch, because the first micro-batches may begin differently.
    All are MISSING for persistent storages with a name.
    """

    kernel: IntArray
    rank: IntArray
    position: IntArray
    micro_batch: IntArray
    place: IntArray

    @classmethod
    def of(cls, trace: Trace) -> Places:
        """Places of all storages of a trace."""
        origins = Origins.of(trace)
        num_kernels = trace.num_kernels
        starts, micro_batches = _blocks(trace.kernels)
        lengths = np.diff(np.append(starts, num_kernels))
        block = np.repeat(np.arange(len(starts)), lengths)
        from_end = (starts + lengths)[block] - np.arange(num_kernels)
        place = count_from_end(micro_batches)[block] * (num_kernels + 1) + from_end
        is_known = origins.kernel != MISSING
        return cls(
            kernel=origins.kernel,
            rank=origins.rank,
            position=origins.position,
            micro_batch=np.where(is_known, micro_batches[block][origins.kernel], MISSING),
            place=np.where(is_known, place[origins.kernel], MISSING),
        )

    def identities(self, rows: IntArray, later: int = 0) -> list[tuple[int, int, int]]:
        """Micro-batch plus ``later``, place and rank of each row: unique where not MISSING."""
        micro_batch = self.micro_batch[rows] + later
        columns = micro_batch.tolist(), self.place[rows].tolist(), self.rank[rows].tolist()
        return list(zip(*columns, strict=True))


def find_turns(kernels: Kernels) -> Turns | None:
    """All equal turns around the middle of the iteration; None where no two are equal."""
    starts, micro_batches = _blocks(kernels)
    numbers, first_block = np.unique(micro_batches, return_index=True)
    starts = starts[first_block[numbers != MISSING]]
    numbers = numbers[numbers != MISSING]
    if len(numbers) < 3 or numbers[-1] != len(numbers) - 1:
        return None
    # Late in the middle: a pipeline's first forward passes run ahead of all backward passes.
    chosen = min(2 * len(numbers) // 3, len(numbers) - 2)
    at, length = int(starts[chosen]), int(starts[chosen + 1] - starts[chosen])
    equal = equals_later(kernels, length) if length > 0 else np.zeros(len(kernels), dtype=bool)
    if at >= len(equal) or not equal[at]:
        return None
    unequal = np.flatnonzero(~equal)
    after = int(np.searchsorted(unequal, at))
    begin = int(unequal[after - 1]) + 1 if after else 0
    end = length + (int(unequal[after]) if after < len(unequal) else len(equal))
    is_in_step = starts - at == (np.arange(len(starts)) - chosen) * length
    first_kernel = int(starts[is_in_step & (starts >= begin)].min())
    return Turns(first_kernel, length, (end - first_kernel) // length)


def equals_later(kernels: Kernels, length: int) -> BoolArray:
    """Whether each kernel equals the one ``length`` later, of the next micro-batch, (K - length,).

    Their times, their workspace and the numbers of collectives may differ.
    """
    micro_batch = kernels.micro_batch
    before, after = micro_batch[:-length], micro_batch[length:]
    equal: BoolArray = np.where(before == MISSING, after == MISSING, after == before + 1)
    for name in _SAME_IN_ALL_TURNS:
        values = getattr(kernels, name)
        equal &= (values[length:] == values[:-length]).astype(bool)
    return equal


def _blocks(kernels: Kernels) -> tuple[IntArray, IntArray]:
    """First kernel and micro-batch of each run of one micro-batch and phase, int64 (blocks,).

    A kernel of no micro-batch belongs to the next that has one; after the last, to none.
    """
    owner = owning_kernels(kernels.micro_batch)
    micro_batch = np.append(kernels.micro_batch, MISSING)[owner]
    phase = np.append(kernels.phase, "")[owner]
    begins = (np.diff(micro_batch) != 0) | (phase[1:] != phase[:-1]).astype(bool)
    starts = np.append(0, np.flatnonzero(begins) + 1)
    return starts, micro_batch[starts]
