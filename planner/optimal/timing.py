"""Exact times of chosen moves on a timeline with stalls.

For given moves and a given timeline, writing as early and reading as late as the channels allow
keeps the fewest bytes on the GPU at every instant, so times are no decisions. Memory is exact in
index space: all moves begin with the longest absence possible, and what then fits is given back,
first to reads and writes that need the time, then to offloads, as late as it fits.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import numpy as np

from teraio.contracts.table import BoolArray, FloatArray, IntArray
from teraio.planner.optimal.periods import STAYS, Problem
from teraio.planner.optimal.transfer_times import end_seconds
from teraio.planner.retiming import Windows, drop_unneeded, grow_offloads, grow_prefetches
from teraio.planner.slack_tree import slack_tree
from teraio.traces.lifetimes import kernel_starts_seconds
from teraio.units import PICOSECONDS_PER_SECOND

_TINY_SECONDS = 1e-12


class Pace(enum.Enum):
    """Rates that transfers are timed with: of one direction alone, or of both at once."""

    SOLO = "solo"
    DUPLEX = "duplex"


class Timed(NamedTuple):
    """Rows of the problem that move, whether each writes, and its window, (moves,) each."""

    rows: IntArray
    writes: BoolArray
    windows: Windows


def stretched_starts(problem: Problem, stretch: FloatArray) -> FloatArray:
    """Start of each kernel's gap and the end, float64 (K + 1,), kernels slowed by ``stretch``."""
    result = np.zeros(problem.num_kernels + 1)
    np.cumsum(np.diff(kernel_starts_seconds(problem.trace)) * stretch, out=result[1:])
    return result


def time_moves(
    problem: Problem,
    device: IntArray,
    starts: FloatArray,
    *,
    pace: Pace = Pace.SOLO,
    lead_seconds: float = 0.0,
) -> Timed | None:
    """Windows for a choice on a timeline; None if the choice does not fit however long the absence.

    ``starts`` float64 (K + 1,) is when each kernel's gap begins. Transfers are taken to be as fast
    as ``pace`` says. Prefetches start ``lead_seconds`` before they have to, where memory allows.
    """
    rows = np.flatnonzero(device != STAYS)
    writes = problem.writes(device)[rows]
    clock = _Clock(problem, starts)
    free_by, prefetch_start = _wanted(
        problem, rows, device[rows], writes, clock, pace, lead_seconds
    )
    windows = Windows(problem.away_first[rows].copy(), problem.away_end[rows].copy())
    slack = problem.capacity_bytes - problem.resident_with(rows, *windows)
    if slack.min() < 0:
        return None
    tree, size = slack_tree(slack), problem.relief_bytes[rows]
    num_kernels = problem.num_kernels
    by_need = np.argsort(windows.prefetch_start, kind="stable")
    by_need = by_need[~problem.is_tail[rows][by_need]]
    by_release = np.argsort(windows.free_by, kind="stable")[::-1].copy()
    grow_prefetches(tree, num_kernels, windows, size, by_need, prefetch_start)
    grow_offloads(tree, num_kernels, windows, size, by_release, free_by)
    grow_offloads(tree, num_kernels, windows, size, by_release, problem.away_end[rows])
    return Timed(rows, writes, windows)


def needed_moves(problem: Problem, timed: Timed) -> BoolArray:
    """Which moves relieve anything, bool (moves,): an absence that fits into what is left does not;
    the shortest are given up first.
    """
    slack = problem.capacity_bytes - problem.resident_with(timed.rows, *timed.windows)
    needed = np.ones(len(timed.rows), dtype=bool)
    by_length = np.argsort(problem.seconds[timed.rows], kind="stable")
    size = problem.relief_bytes[timed.rows]
    windows = Windows(*(kernels.copy() for kernels in timed.windows))
    drop_unneeded(slack_tree(slack), problem.num_kernels, windows, size, by_length, needed)
    return needed


def _wanted(
    problem: Problem,
    rows: IntArray,
    device: IntArray,
    writes: BoolArray,
    clock: _Clock,
    pace: Pace,
    lead_seconds: float,
) -> tuple[IntArray, IntArray]:
    """Kernels, unrolled, by which writes have ended, and before which reads must be issued."""
    machine = problem.machine
    is_solo = pace is Pace.SOLO
    rates = machine.solo_rate if is_solo else machine.duplex_rate
    link_rates = machine.link_solo_rate if is_solo else machine.link_duplex_rate
    released = clock.gap_begins(problem.after[rows] + 1)
    due = clock.kernel_begins(problem.end[rows])
    returns = np.flatnonzero(~problem.is_tail[rows])
    leaves = np.flatnonzero(writes)
    written, begun = released.copy(), due.copy()
    for direction, who, seconds, result, sign in (
        (1, leaves, released, written, 1.0),
        (0, returns, due, begun, -1.0),
    ):
        result[who] = sign * end_seconds(
            sign * seconds[who],
            problem.num_bytes[rows[who]],
            device[who],
            rates=rates[direction::2],
            link_rate=float(link_rates[direction]),
            latency_seconds=(machine.latency / PICOSECONDS_PER_SECOND)[direction::2],
            iteration_seconds=clock.iteration_seconds,
        )
    first, last = problem.away_first[rows], problem.away_end[rows]
    free_by = np.where(writes, np.clip(clock.kernel_after(written), first, last - 1), first)
    prefetch_start = np.clip(clock.kernel_before(begun - lead_seconds), free_by + 1, last)
    return free_by, np.where(problem.is_tail[rows], last, prefetch_start)


class _Clock:
    """Times of unrolled kernels, from one iteration before the first to two after it."""

    def __init__(self, problem: Problem, starts: FloatArray) -> None:
        self.iteration_seconds = float(starts[-1])
        self._num_kernels = problem.num_kernels
        self._gaps = problem.trace.kernels.gap_before_seconds
        laps = starts[-1] * np.arange(-1, 3)[:, np.newaxis]
        self._gap_begins = (starts[:-1] + laps).reshape(-1)
        self._kernel_begins = (starts[:-1] + self._gaps + laps).reshape(-1)

    def gap_begins(self, kernel: IntArray) -> FloatArray:
        result: FloatArray = self._gap_begins[kernel + self._num_kernels]
        return result

    def kernel_begins(self, kernel: IntArray) -> FloatArray:
        result: FloatArray = self._kernel_begins[kernel + self._num_kernels]
        return result

    def kernel_after(self, seconds: FloatArray) -> IntArray:
        """The first kernel that does not begin before."""
        place = np.searchsorted(self._kernel_begins, seconds - _TINY_SECONDS)
        result: IntArray = place - self._num_kernels
        return result

    def kernel_before(self, seconds: FloatArray) -> IntArray:
        """The last kernel whose gap does not begin after: its predecessor has ended."""
        place = np.searchsorted(self._gap_begins, seconds + _TINY_SECONDS, side="right")
        result: IntArray = place - 1 - self._num_kernels
        return result
