"""The tables of a trace after the optimizer's kernels have moved into the backward pass.

Below, *old* kernels are those of the trace as recorded and *new* ones those of the result. The
optimizer's kernels come last among the old ones, and are counted by *place* from its first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from teraio.contracts.table import MISSING, IntArray
from teraio.traces.transforms.gradient_hooks import Hook
from teraio.traces.transforms.optimizer_units import OptimizerUnits


@dataclass(frozen=True)
class KernelOrder:
    """Which old kernel every new one is, and for which unit it runs.

    ``first``: the optimizer's first old kernel; ``placed``: units of each place; ``hooks``: where
    each unit goes.
    """

    first: int
    units: OptimizerUnits
    placed: list[tuple[int, ...]]
    hooks: list[Hook]

    @cached_property
    def _moved(self) -> IntArray:
        """(place, unit) of the moved kernels, int64 (moved, 2)."""
        pairs = [(place, unit) for place, units in enumerate(self.placed) for unit in units]
        return np.array(pairs, dtype=np.int64)

    @cached_property
    def _order(self) -> IntArray:
        """Kept kernels (by old index), then moved ones (by row), in the new order."""
        turn = np.empty(len(self.hooks), dtype=np.int64)
        by_time = sorted(
            range(len(turn)), key=lambda u: (self.hooks[u].boundary, self.hooks[u].rank)
        )
        turn[by_time] = np.arange(len(turn))
        boundary = np.array([hook.boundary for hook in self.hooks])
        place, unit = self._moved.T
        # A unit of boundary b runs between the kept kernels b - 1 and b.
        when = np.r_[2 * np.arange(self.first) + 1, 2 * boundary[unit]]
        kept = np.zeros(self.first, dtype=np.int64)
        return np.lexsort((np.r_[kept, place], np.r_[kept, turn[unit]], when))

    @cached_property
    def source(self) -> IntArray:
        """Old kernel of each new one, int64 (new kernels,)."""
        old: IntArray = np.r_[np.arange(self.first), self._moved[:, 0] + self.first]
        return old[self._order]

    @cached_property
    def unit(self) -> IntArray:
        """Unit for which each new kernel runs, MISSING for those that stayed."""
        unit: IntArray = np.r_[np.full(self.first, MISSING), self._moved[:, 1]]
        return unit[self._order]

    @cached_property
    def new_of_kept(self) -> IntArray:
        """New kernel of each old one that stayed, int64 (first,)."""
        kept: IntArray = np.flatnonzero(self.unit == MISSING)
        return kept

    @cached_property
    def new_of_moved(self) -> dict[tuple[int, int], int]:
        """New kernel by (place, unit)."""
        new = np.flatnonzero(self.unit != MISSING)
        places = (self.source[new] - self.first).tolist()
        return dict(
            zip(zip(places, self.unit[new].tolist(), strict=True), new.tolist(), strict=True)
        )

    @cached_property
    def span(self) -> list[tuple[int, int]]:
        """First and last new kernel of each unit."""
        new = np.flatnonzero(self.unit != MISSING)
        unit = self.unit[new]
        return [
            (int(mine[0]), int(mine[-1]))
            for mine in (new[unit == u] for u in range(len(self.hooks)))
        ]

    def share(self, place: int, unit: int) -> float:
        """Share of a place's work that is a unit's, by parameters."""
        sizes = {u: len(self.units.parameters[u]) for u in self.placed[place]}
        return sizes[unit] / sum(sizes.values())
