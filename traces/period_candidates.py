"""Where a trace may repeat itself: its kernels and storages as comparable numbers.

The kernels of micro-batches tell where periods may begin and how long they are; whether they are
equal in all else is for :mod:`teraio.traces.period_matching` to say.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from teraio.contracts.table import MISSING, BoolArray, IntArray
from teraio.traces.trace import Kernels, Trace

UNNAMED = "unnamed:"
"""Prefix of persistent storages that have no name but where an iteration first meets them."""

RANKS = 2**32
"""More than the storages of one kernel: birth ordinals below half of it, first accesses above."""


@dataclass(frozen=True, eq=False)
class Origins:
    """Where each storage comes from, int64 (S,): the kernel of its birth and its rank there.

    The batches that a script keeps in a list live for ever, yet each micro-batch reads another.
    Such an unnamed persistent storage counts as if it were born at its first access, and
    ``position`` is that access's number among the kernel's. Ranks count from the last, because
    views that precede a kernel come first. MISSING for all other persistent storages.
    """

    kernel: IntArray
    rank: IntArray
    position: IntArray

    @classmethod
    def of(cls, trace: Trace) -> Origins:
        """Births, and first accesses of unnamed persistent storages."""
        kernel, rank = trace.storages.birth.copy(), trace.storages.birth_ordinal.copy()
        position = np.full(len(kernel), MISSING)
        names, accesses = trace.storages.name, trace.accesses
        is_unnamed = trace.is_persistent.copy()
        is_unnamed[is_unnamed] = [name.startswith(UNNAMED) for name in names[is_unnamed]]
        touching = np.flatnonzero(is_unnamed[accesses.storage])
        rows, at = np.unique(accesses.storage[touching], return_index=True)
        first = touching[at]
        begin = np.searchsorted(accesses.kernel, accesses.kernel[first], side="left")
        end = np.searchsorted(accesses.kernel, accesses.kernel[first], side="right")
        kernel[rows] = accesses.kernel[first]
        rank[rows] = RANKS // 2 + (end - 1 - first)
        position[rows] = first - begin
        return cls(kernel, rank, position)


def lives_full_cycle(trace: Trace) -> BoolArray:
    """Which storages die just before their own next birth, bool (S,): kept for ever, say."""
    storages = trace.storages
    before_birth = (storages.birth - 1) % trace.num_kernels
    result: BoolArray = (storages.birth != MISSING) & (storages.death == before_birth)
    return result


def describe_kernel(trace: Trace, kernel: int) -> str:
    """A kernel with its operator and module, for a message."""
    module = trace.kernels.module[kernel]
    place = trace.kernels.op[kernel] + (f" in {module}" if module else "")
    return f"kernel {kernel} ({place})"


class Search:
    """A trace, with all that is compared as integers, and the periods that it may have."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        kernels, storages = trace.kernels, trace.storages
        self.origins = Origins.of(trace)
        self.lives_full_cycle = lives_full_cycle(trace)
        self.num_micro_batches = int(kernels.micro_batch.max()) + 1
        names = np.where(trace.is_persistent, "", storages.name)
        self.kernel_code = number_distinct(
            zip(
                kernels.op.tolist(),
                kernels.module.tolist(),
                kernels.phase.tolist(),
                kernels.signature.tolist(),
                kernels.call.tolist(),
                kernels.group.tolist(),
                kernels.peer_rank.tolist(),
                kernels.stream.tolist(),
                (kernels.micro_batch == MISSING).tolist(),
                strict=True,
            )
        )
        self.storage_code = number_distinct(
            zip(
                storages.nbytes.tolist(),
                storages.allocated_bytes.tolist(),
                storages.kind.tolist(),
                storages.dtype.tolist(),
                storages.resizable.tolist(),
                trace.is_persistent.tolist(),
                names.tolist(),
                strict=True,
            )
        )
        self.owner = owning_kernels(kernels.micro_batch)
        self.micro_batch = np.append(kernels.micro_batch, MISSING)[self.owner]
        self.place = self._places()

    def _places(self) -> IntArray:
        """A number for what a kernel is to its micro-batch, the same in all of them, int64 (K,).

        It counts equal kernels from the end of the micro-batch's phase, so that a kernel which only
        one micro-batch has disturbs no other.
        """
        phases = number_distinct(self.trace.kernels.phase.tolist())
        phase = np.append(phases, MISSING)[self.owner]
        kind = number_distinct(
            zip(phase.tolist(), self.kernel_code.tolist(), self.micro_batch.tolist(), strict=True)
        )
        return number_distinct(
            zip(
                phase.tolist(),
                self.kernel_code.tolist(),
                count_from_end(kind).tolist(),
                strict=True,
            )
        )

    def candidates(self) -> list[tuple[int, int]]:
        """Starts and lengths of periods whose kernels equal those of the next, latest first.

        The latest, because what the first micro-batches lack (a predecessor) is there by then.
        """
        starts = self._block_starts()
        lengths = {
            int(after - before)
            for blocks in starts.values()
            for before, after in pairwise(blocks)
            if after > before
        }
        boundaries = {kernel for blocks in starts.values() for kernel in blocks}
        found: set[tuple[int, int]] = set()
        for length in lengths:
            for begin, end in _runs(self._equals_later(length)):
                last = end - length
                inside = {start for start in boundaries if begin <= start <= last}
                found |= {(start, length) for start in inside | {begin, last} if last >= begin}
        return sorted((p for p in found if self._has_all_phases(*p)), reverse=True)

    def _has_all_phases(self, start: int, length: int) -> bool:
        """Whether it has all phases of a micro-batch: not the forward passes of a warm-up alone."""
        kernels = self.trace.kernels
        labelled = kernels.micro_batch != MISSING
        inside = slice(start, start + length)
        phases = set(kernels.phase[labelled].tolist())
        return phases == set(kernels.phase[inside][labelled[inside]].tolist())

    def _block_starts(self) -> dict[str, list[int]]:
        """First kernel of each micro-batch's forward, and backward; and of what precedes it."""
        kernels = self.trace.kernels
        starts: dict[str, list[int]] = {}
        for phase in ("forward", "backward"):
            rows = np.flatnonzero((kernels.phase == phase) & (kernels.micro_batch != MISSING))
            _, first = np.unique(kernels.micro_batch[rows], return_index=True)
            starts[phase] = rows[first].tolist()
            starts[f"before {phase}"] = [int(self.owner.searchsorted(k)) for k in starts[phase]]
        return starts

    def _equals_later(self, length: int) -> BoolArray:
        """Whether each kernel equals the one a period later, a micro-batch on, bool (K - P,)."""
        code, micro_batch = self.kernel_code, self.trace.kernels.micro_batch
        is_next = micro_batch[length:] == micro_batch[:-length] + 1
        result: BoolArray = (code[length:] == code[:-length]) & (
            is_next | (micro_batch[:-length] == MISSING)
        )
        return result

    def difference(self) -> str:
        """What keeps the last two micro-batches from being equal, for a message."""
        starts = self._block_starts()["forward"]
        if len(starts) < 2:
            return "or the trace does not say which kernels belong to which"
        length = starts[-1] - starts[-2]
        unequal = np.flatnonzero(~self._equals_later(length)[starts[-2] :])
        offset = int(unequal[0]) if len(unequal) else 0
        return f"first difference at {describe_kernel(self.trace, starts[-1] + offset)}"


def collectives_by_group(kernels: Kernels, begin: int, end: int) -> IntArray:
    """How many numbered collectives each kernel's group has among kernels begin..end-1, (K,)."""
    group = number_distinct(kernels.group.tolist())
    is_counted = kernels.group_sequence[begin:end] != MISSING
    counts = np.bincount(group[begin:end][is_counted], minlength=int(group.max()) + 1)
    result: IntArray = counts[group]
    return result


def number_distinct(values: Iterable[Hashable]) -> IntArray:
    """Equal values get equal numbers, 0, 1, 2, ... in order of appearance; int64 (values,)."""
    numbers: dict[Hashable, int] = {}
    return np.fromiter((numbers.setdefault(v, len(numbers)) for v in values), dtype=np.int64)


def owning_kernels(micro_batch: IntArray) -> IntArray:
    """The kernel itself, or the next that belongs to a micro-batch; K after the last; (K,)."""
    count = len(micro_batch)
    owner = np.where(micro_batch == MISSING, count, np.arange(count))
    result: IntArray = np.minimum.accumulate(owner[::-1])[::-1]
    return result


def count_from_end(values: IntArray) -> IntArray:
    """How many equal values follow each, int64 (values,)."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    ends = np.searchsorted(ordered, ordered, side="right")
    result = np.empty_like(values)
    result[order] = ends - 1 - np.arange(len(values))
    return result


def _runs(flags: BoolArray) -> list[tuple[int, int]]:
    """First and end of each run of true values."""
    padded = np.zeros(len(flags) + 2, dtype=np.int8)
    padded[1:-1] = flags
    change = np.diff(padded)
    begins, ends = np.flatnonzero(change == 1), np.flatnonzero(change == -1)
    return list(zip(begins.tolist(), ends.tolist(), strict=True))
