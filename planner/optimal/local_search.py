"""Local search: small changes of a choice where the iteration waits, kept if it becomes faster.

A change takes one period, in every turn in which it repeats, to another device, or lets it stay or
leave. Periods are drawn among those that kernels wait for, and among those that hold memory while a
kernel waits, in proportion to the waits; each change is repaired, timed and judged as a whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from teraio.contracts.table import FloatArray, IntArray
from teraio.planner.optimal.periods import STAYS, Problem
from teraio.planner.optimal.search import Found, Search
from teraio.traces.lifetimes import kernel_starts_seconds

_SEED = 0


def search_locally(search: Search, group: IntArray, max_changes: int | None) -> None:
    """Improve the best choice of ``search`` until its time is up or ``max_changes`` were tried.

    ``group`` int64 (rows,): rows with one number change together; negative ones alone.
    """
    random = np.random.default_rng(_SEED)
    best = search.best
    begun = "" if best is None else best.origin
    tried = 0
    while best is not None and not search.is_over():
        if max_changes is not None and tried >= max_changes:
            return
        tried += 1
        changed = _change(search.problem, best, group, random)
        if changed is None:
            return
        found = search.try_change(changed, best.timeline, f"{begun}, local search")
        if found is not None and found.cost < best.cost:
            best = found


def _change(
    problem: Problem, best: Found, group: IntArray, random: np.random.Generator
) -> IntArray | None:
    """The choice with one group elsewhere; None if nothing waits or nothing can change."""
    ideal = np.diff(kernel_starts_seconds(problem.trace))
    waits = np.maximum(np.diff(best.starts) - ideal, 0.0)
    if waits.sum() <= 0:
        return None
    open_devices = [STAYS, *np.flatnonzero(problem.machine.capacity_bytes > 0).tolist()]
    if len(open_devices) == 1:
        return None
    rows = _rows_in_the_way(problem, waits, random)
    if random.integers(2):
        rows = itertools.chain(_rows_waited_for(problem, best, random), rows)
    for row in rows:
        others = [device for device in open_devices if device != best.device[row]]
        changed = best.device.copy()
        members = group == group[row] if group[row] >= 0 else row
        changed[members] = others[random.integers(len(others))]
        return changed
    return None


def _rows_waited_for(problem: Problem, best: Found, random: np.random.Generator) -> Iterator[int]:
    """A row that moves, of a storage for which kernels wait long, if there is one."""
    rows = best.timed.rows
    waits = best.waits[problem.storage[rows]]
    if waits.sum() > 0:
        yield int(random.choice(rows, p=waits / waits.sum()))


def _rows_in_the_way(
    problem: Problem, waits: FloatArray, random: np.random.Generator
) -> Iterator[int]:
    """Rows that could be away while some waiting kernel runs, large ones more often."""
    num_kernels = problem.num_kernels
    lap = problem.away_first // num_kernels * num_kernels
    first, end = problem.away_first - lap, problem.away_end - lap
    for kernel in random.choice(num_kernels, size=16, p=waits / waits.sum()).tolist():
        covers = ((first <= kernel) & (kernel < end)) | (kernel + num_kernels < end)
        rows = np.flatnonzero(covers)
        if len(rows):
            size = problem.num_bytes[rows]
            yield int(random.choice(rows, p=size / size.sum()))
