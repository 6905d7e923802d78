"""Which kernels must run again so that a layer's saved activations need not be kept.

A *slice* belongs to one forward visit of a layer (:mod:`teraio.traces.layers`), or, in a trace that
names no modules, to one of about sqrt(forward kernels) equal runs of kernels per micro-batch (Chen
et al., 2016). Storages born in it are

- *kept* if a forward kernel outside it uses them (the layer's outputs: the checkpoints),
- *dropped* if they are not kept and the backward pass uses them,
- intermediate otherwise.

The slice is every kernel that a dropped storage depends on, within the visit.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from teraio.contracts.table import BoolArray, IntArray
from teraio.traces.layers import is_numbered, layer_visits, layers_of_kernels
from teraio.traces.trace import Trace


class Slice(NamedTuple):
    """What to run again before kernel ``point``: ``kernels`` in order.

    ``dropped`` are the storages that the backward pass then finds anew, ``made`` also the
    intermediate ones on the way to them.
    """

    point: int
    kernels: list[int]
    dropped: set[int]
    made: set[int]


@dataclass(frozen=True)
class Groups:
    """The visits that can be recomputed: ``of_kernel`` int64 (K,) numbers them, -1 for all other
    kernels; ``layer`` int64 (groups,) numbers each one's layer in forward order.
    """

    of_kernel: IntArray
    layer: IntArray

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return int(self.layer.max(initial=-1)) + 1


def forward_groups(trace: Trace) -> Groups:
    """Forward visits of numbered layers; equal runs of kernels where no module is named."""
    is_forward = (trace.kernels.phase == "forward").astype(bool)
    if not (trace.kernels.module != "").any():
        return _runs_without_modules(trace, is_forward)
    visits, layers = layer_visits(trace), layers_of_kernels(trace)
    of_kernel = np.full(trace.num_kernels, -1, dtype=np.int64)
    numbers: dict[str, int] = {}
    layer_of_group: list[int] = []
    for first, end in zip(visits.first_kernel[:-1], visits.first_kernel[1:], strict=True):
        known = layers[first:end]
        known = known[known != ""]
        if is_forward[first] and len(known) and is_numbered(known[0]):
            # Kernels without a module (a receive, say) are nobody's to run again.
            of_kernel[first:end][layers[first:end] != ""] = len(layer_of_group)
            layer_of_group.append(numbers.setdefault(known[0], len(numbers)))
    return Groups(of_kernel, np.array(layer_of_group, dtype=np.int64))


def _runs_without_modules(trace: Trace, is_forward: BoolArray) -> Groups:
    of_kernel = np.full(trace.num_kernels, -1, dtype=np.int64)
    layer_of_group: list[int] = []
    for micro_batch in np.unique(trace.kernels.micro_batch[is_forward]):
        rows = np.flatnonzero(is_forward & (trace.kernels.micro_batch == micro_batch))
        for number, run in enumerate(np.array_split(rows, max(1, int(np.sqrt(len(rows)))))):
            of_kernel[run] = len(layer_of_group)
            layer_of_group.append(number)
    return Groups(of_kernel, np.array(layer_of_group, dtype=np.int64))


def find_slices(trace: Trace, groups: Groups, num_layers: int) -> list[Slice]:
    """The slices of the first ``num_layers`` layers, in the order of their visits.

    A visit is left out if its inputs are overwritten before the backward pass could run it again.
    """
    finder = _SliceFinder(trace, groups)
    wanted = np.flatnonzero(groups.layer < num_layers)
    found = (finder.slice_of(int(group)) for group in wanted)
    return [part for part in found if part is not None]


class _SliceFinder:
    """Walks the accesses of one visit backwards."""

    def __init__(self, trace: Trace, groups: Groups) -> None:
        accesses, storages = trace.accesses, trace.storages
        num_kernels = trace.num_kernels
        self.num_kernels = num_kernels
        self.first_access = np.searchsorted(accesses.kernel, np.arange(num_kernels + 1)).tolist()
        self.storage = accesses.storage.tolist()
        self.reads, self.writes = accesses.reads.tolist(), accesses.writes.tolist()
        self.birth = storages.birth.tolist()
        self.is_buffer = (storages.kind == "buffer").tolist()
        born = np.where(storages.birth >= 0, groups.of_kernel[storages.birth], -1)
        of_access = born[accesses.storage]
        is_forward = (trace.kernels.phase == "forward").astype(bool)[accesses.kernel]
        inside = (of_access >= 0) & (groups.of_kernel[accesses.kernel] == of_access)
        is_kept, is_saved = (np.zeros(len(storages), dtype=bool) for _ in range(2))
        is_kept[accesses.storage[is_forward & ~inside]] = True
        is_saved[accesses.storage[~is_forward]] = True
        is_dropped = (born >= 0) & is_saved & ~is_kept
        self.group_if_remade = np.where(is_kept, -1, born).tolist()
        order = np.argsort(groups.of_kernel, kind="stable")
        bounds = np.searchsorted(groups.of_kernel[order], np.arange(len(groups.layer) + 1))
        self.kernels_of = [order[a:b].tolist() for a, b in pairwise(bounds)]
        self.dropped: dict[int, set[int]] = defaultdict(set)
        for storage in np.flatnonzero(is_dropped).tolist():
            self.dropped[int(born[storage])].add(storage)
        rows = np.flatnonzero(~is_forward & is_dropped[accesses.storage])
        first = np.array([kernels[0] for kernels in self.kernels_of], dtype=np.int64)
        away = (accesses.kernel[rows] - first[of_access[rows]]) % num_kernels
        nearest = np.full(len(groups.layer), num_kernels, dtype=np.int64)
        np.minimum.at(nearest, of_access[rows], away)
        self.point = ((first + nearest) % num_kernels).tolist()
        self.rewritten = _writes_after_birth(trace)

    def slice_of(self, group: int) -> Slice | None:
        """The slice of a visit; None if there is nothing to drop, or it cannot run again."""
        needed = set(self.dropped[group])
        if not needed:
            return None
        kernels = []
        for kernel in reversed(self.kernels_of[group]):
            rows = range(self.first_access[kernel], self.first_access[kernel + 1])
            if not any(self.writes[row] and self.storage[row] in needed for row in rows):
                continue
            kernels.append(kernel)
            for row in rows:
                storage = self.storage[row]
                if self.group_if_remade[storage] == group:
                    if self.reads[row] or self.writes[row]:
                        needed.add(storage)
                elif self.birth[storage] == kernel:
                    # A kept output is put out again, beside the one that is kept.
                    continue
                elif not self._is_unchanged(storage, row, kernel, self.point[group]):
                    return None
        return Slice(self.point[group], kernels[::-1], self.dropped[group], needed)

    def _is_unchanged(self, storage: int, row: int, kernel: int, point: int) -> bool:
        """Whether an input still holds at ``point`` what ``kernel`` found; buffers are excused."""
        if self.is_buffer[storage]:
            return True
        if self.writes[row]:
            return False
        wait = (point - kernel) % self.num_kernels
        return all(
            (writer - kernel) % self.num_kernels >= wait
            for writer in self.rewritten.get(storage, ())
        )


def _writes_after_birth(trace: Trace) -> dict[int, list[int]]:
    """Kernels that write each storage, but for the one that makes it."""
    accesses = trace.accesses
    rows = np.flatnonzero(
        accesses.writes & (accesses.kernel != trace.storages.birth[accesses.storage])
    )
    result: dict[int, list[int]] = defaultdict(list)
    for storage, kernel in zip(
        accesses.storage[rows].tolist(), accesses.kernel[rows].tolist(), strict=True
    ):
        result[storage].append(kernel)
    return result
