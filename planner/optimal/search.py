"""The search for a fast choice: a guide, its rounding, exact times, the simulator's word, again.

A choice says which periods leave and where to. Its times depend on the timeline, which depends on
the stalls, which depend on the times: starting from the guide's timeline, the simulated one takes
its place a few times, and the fastest of all is kept.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from teraio.contracts.table import FloatArray, IntArray
from teraio.planner.optimal.judging import judge
from teraio.planner.optimal.occupancy import overfull_devices
from teraio.planner.optimal.periods import STAYS, Problem
from teraio.planner.optimal.timing import Pace, Timed, needed_moves, time_moves
from teraio.planner.optimal.wear import keeps_to_budgets, repair_within_budgets
from teraio.traces.lifetimes import kernel_starts_seconds

_MAX_ROUNDS = 4
_MAX_ROUNDS_OF_SMALL = 8
_LEAST_GAIN = 1e-5

SECONDS_PER_MOVE = 1e-5
"""What a move costs beside what is simulated: its executor needs ten times as long to issue it, and
mostly while the GPU has enough to do."""

_LEADS = (0.1, 0.03, 0.01, 0.003)
"""Of an iteration: by how much prefetches may come earlier than they have to."""

_SHORTER = 0.99
"""The next iteration whose write budgets are tried is shorter at least by this."""


class Found(NamedTuple):
    """A choice that fits: device per row, times, and the simulated seconds per iteration.

    ``starts`` and ``waits`` are as simulated; the times were made for ``timeline`` and ``pace``.
    """

    device: IntArray
    timed: Timed
    seconds: float
    starts: FloatArray
    waits: FloatArray
    origin: str
    timeline: FloatArray
    pace: Pace

    @property
    def cost(self) -> float:
        """Seconds, and a little for each move."""
        return self.seconds + SECONDS_PER_MOVE * len(self.timed.rows)


@dataclass
class Search:
    """Keeps choices for ``problem``; ``deadline`` is of ``time.monotonic``, or None."""

    problem: Problem
    deadline: float | None = None
    found: list[Found] = field(default_factory=list)

    @property
    def best(self) -> Found | None:
        """The best choice so far."""
        return min(self.found, key=lambda found: found.cost, default=None)

    def with_host_alone(self) -> Search | None:
        """A search that leaves the SSDs alone, and adds to what this one has found; None if there
        is nothing to leave alone, or the host is too small.
        """
        problem = self.problem.with_host_alone()
        return None if problem is None else replace(self, problem=problem)

    def is_over(self) -> bool:
        """Whether the time is up."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def try_longest_idle(self, max_rounds: int | None = None) -> None:
        """The first choice, without any guide: whatever is idle longest leaves."""
        nothing = np.full(len(self.problem.period), STAYS)
        starts = kernel_starts_seconds(self.problem.trace)
        self.try_choice(nothing, starts, "longest idle", max_rounds)

    def try_choice(
        self, device: IntArray, starts: FloatArray, origin: str, max_rounds: int | None = None
    ) -> Found | None:
        """Repair, time and judge a choice on a timeline; again on the simulated one while it helps,
        at most ``max_rounds`` times (None: as often as is usual).

        Returns the best of these; None if the choice cannot be made to fit, also into the write
        budgets of the iteration that it gives.
        """
        ideal_seconds = self.problem.trace.ideal_seconds
        seconds = max(ideal_seconds, float(starts[-1]))
        while True:
            repaired = repair_within_budgets(self.problem, device, seconds)
            best = None if repaired is None else self._fastest(repaired, starts, origin, max_rounds)
            if best is None:
                return None
            if keeps_to_budgets(self.problem, best.device, best.seconds):
                self.found.append(best)
                return best
            if seconds <= ideal_seconds:
                return None
            # A shorter iteration may write less: at last what even the ideal one may.
            seconds = best.seconds if best.seconds < _SHORTER * seconds else ideal_seconds

    def try_change(self, device: IntArray, starts: FloatArray, origin: str) -> Found | None:
        """Repair, time and judge a choice once; kept if it is the fastest so far."""
        best = self.best
        seconds = self.problem.trace.ideal_seconds if best is None else best.seconds
        repaired = repair_within_budgets(self.problem, device, seconds)
        found = None if repaired is None else self._judged(repaired, starts, origin)
        if found is None or (best is not None and found.cost >= best.cost):
            return None
        if not keeps_to_budgets(self.problem, found.device, found.seconds):
            return None
        if overfull_devices(self.problem, found.device).any():
            return None
        self.found.append(found)
        return found

    def try_without_needless(self) -> None:
        """Let storages stay whose whole absence would fit into what memory is left."""
        best = self.best
        if best is None:
            return
        needed = needed_moves(self.problem, best.timed)
        if not needed.all():
            thinner = best.device.copy()
            thinner[best.timed.rows[~needed]] = STAYS
            self.try_choice(thinner, best.starts, f"{best.origin}, without needless moves")

    def prefetch_earlier(self) -> None:
        """Give the best choice as much lead for its reads as memory allows without being slower:
        real transfers are not always as fast as planned.
        """
        best = self.best
        if best is None or self.is_over():
            return
        for part in _LEADS:
            lead_seconds = part * best.seconds
            timed = time_moves(
                self.problem,
                best.device,
                best.timeline,
                pace=best.pace,
                lead_seconds=lead_seconds,
            )
            if timed is None:
                return
            judged = judge(self.problem, timed, best.device)
            if judged.seconds <= best.seconds * (1 + _LEAST_GAIN):
                others = [found for found in self.found if found is not best]
                self.found[:] = [*others, best._replace(timed=timed, seconds=judged.seconds)]
                return

    def _fastest(
        self, repaired: IntArray, starts: FloatArray, origin: str, max_rounds: int | None
    ) -> Found | None:
        """Time and judge, on the timeline and on those that come of it: while that helps, and on
        small traces until it changes nothing, since a step back may lead to a larger one ahead.
        """
        is_small = self.problem.is_small
        best, seconds = None, 0.0
        for _ in range(max_rounds or (_MAX_ROUNDS_OF_SMALL if is_small else _MAX_ROUNDS)):
            found = self._judged(repaired, starts, origin)
            if found is None:
                break
            is_better = best is None or found.seconds < best.seconds * (1 - _LEAST_GAIN)
            is_settled = abs(found.seconds - seconds) <= _LEAST_GAIN * seconds
            if best is None or found.seconds < best.seconds:
                best = found
            if self.is_over() or (is_settled if is_small else not is_better):
                break
            starts, seconds = found.starts, found.seconds
        return best

    def _judged(self, device: IntArray, starts: FloatArray, origin: str) -> Found | None:
        """Timed for one direction alone and for both at once, whichever turns out faster."""
        paces = list(Pace) if self.problem.is_faster_one_way else [Pace.SOLO]
        best: Found | None = None
        for pace in paces:
            timed = time_moves(self.problem, device, starts, pace=pace)
            if timed is None:
                return None
            judged = judge(self.problem, timed, device)
            if best is None or judged.seconds < best.seconds:
                best = Found(device, timed, *judged, origin, starts, pace)
        return best
