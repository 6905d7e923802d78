"""The guide's advice on a whole trace, found on a folded one where micro-batches are alike."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from teraio.contracts.table import FloatArray, IntArray
from teraio.planner.optimal.guide import solve_guide
from teraio.planner.optimal.periods import STAYS, Problem
from teraio.planner.optimal.rounding import round_guide
from teraio.planner.optimal.slots import guide_slots
from teraio.planner.optimal.timing import stretched_starts
from teraio.traces.folding import Folding, fold, map_periods

FOLDED_MICRO_BATCHES = 5
"""Two turns before the one that stands for many, and as many after it, for a two-stage pipeline."""

_QUICK_KERNELS = 15_000
"""A folded trace with at most so many kernels has a guide of about a second."""

_SLOTS_BYTES_SHARE = 1 / 6
_SLOTS_BYTES_SHARE_OF_SMALL = 1 / 30
"""Of the GPU's memory: what the optimizer's kernels of one slot may touch."""

_ROUND_TRIPS_OF_SMALL = 2.0
"""On small traces a gap worth moving in is so many times as long as what goes out and back in it
needs. A fluid may leave in place of another that waits longer, and no storage can. (The plan of the
paper's 70B, with 64 micro-batches, is 0.1 % slower so.)"""


class Advice(NamedTuple):
    """A device per row of the whole problem, and the timeline with the guide's stalls, float64
    (K + 1,).
    """

    device: IntArray
    starts: FloatArray


@dataclass(frozen=True, eq=False)
class Guiding:
    """The whole problem, the folded one (the same where nothing folds), and how they correspond:
    ``folded_row`` int64 (rows,) of each row of the whole problem; STAYS where there is none.
    """

    problem: Problem
    folded: Problem
    folding: Folding | None
    folded_row: IntArray

    @classmethod
    def of(cls, problem: Problem) -> Guiding:
        """Fold the trace if that saves micro-batches."""
        folding = None
        if problem.trace.metadata.micro_batches > FOLDED_MICRO_BATCHES:
            folding = fold(problem.trace, FOLDED_MICRO_BATCHES)
        if folding is None:
            return cls(problem, problem, None, np.arange(len(problem.period)))
        folded = Problem.of(folding.trace, problem.hardware)
        row_of_period = np.full(len(folded.all_periods) + 1, STAYS)
        row_of_period[folded.period] = np.arange(len(folded.period))
        # A period without a counterpart (MISSING) meets the last entry.
        found = map_periods(folding, problem.all_periods, folded.all_periods)[problem.period]
        return cls(problem, folded, folding, row_of_period[found])

    def with_host_alone(self) -> Guiding | None:
        """The same with the SSDs closed; None as of :meth:`Problem.with_host_alone`."""
        problem, folded = self.problem.with_host_alone(), self.folded.with_host_alone()
        if problem is None or folded is None:
            return None
        return replace(self, problem=problem, folded=folded)

    @property
    def is_quick(self) -> bool:
        """Whether the guide takes little time."""
        return self.folded.num_kernels <= _QUICK_KERNELS

    def advise(
        self,
        *,
        slot_seconds: float,
        spare_bytes: int = 0,
        unhurried: bool = True,
        by_size: bool = False,
        deadline: float | None = None,
    ) -> Advice | None:
        """Solve and round; None if no solution was found in time.

        ``slot_seconds`` limits slots in ideal time; ``spare_bytes`` of the GPU are left out;
        ``unhurried``: among equals, long gaps are moved first; ``by_size``: large storages.
        """
        time_limit = None
        if deadline is not None:
            time_limit = deadline - time.monotonic()
            if time_limit <= 0:
                return None
        folded = self.folded
        is_small = self.problem.is_small
        share = _SLOTS_BYTES_SHARE_OF_SMALL if is_small else _SLOTS_BYTES_SHARE
        slots = guide_slots(folded.trace, slot_seconds, share * folded.capacity_bytes)
        guide = solve_guide(
            folded,
            slots,
            self.folding,
            spare_bytes=spare_bytes,
            unhurried=unhurried,
            by_size=by_size,
            round_trips=_ROUND_TRIPS_OF_SMALL if is_small else 1.0,
            whole=is_small and self.folding is None,
            fill_tiers=is_small,
            time_limit=time_limit,
        )
        if guide is None:
            return None
        chosen = np.r_[round_guide(folded, guide), STAYS]
        stretch = guide.stretch if self.folding is None else guide.stretch[self.folding.kernel]
        return Advice(chosen[self.folded_row], stretched_starts(self.problem, stretch))
