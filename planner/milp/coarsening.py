"""A large trace as a small instance: several kernels to a step, storages that behave alike as one.

Nothing is issued inside a step, so a period leaves only for whole steps; storages whose periods and
versions are the same in steps leave together, as one of their total size. Periods that free the
least are left out (they stay) if there are still too many. Every plan of the coarse problem is one
of the trace that fits, but not the other way round: its optimum is not the trace's.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np

from teraio.contracts.table import BoolArray, IntArray
from teraio.errors import InputError
from teraio.planner.milp.instance import NONE, Periods
from teraio.planner.milp.periods import bytes_to_be_away, find_periods, select, useful
from teraio.traces.lifetimes import inactive_periods, kernel_starts_seconds
from teraio.traces.trace import Trace

MOST_STEPS = 48
MOST_PERIODS = 40
"""What the program takes; above either, the trace is coarsened."""

_STEPS_TO_TRY = (48, 32, 24, 16, 12)


def equal_steps(trace: Trace, num_steps: int) -> IntArray:
    """First kernels of steps that take about the same ideal time, int64 (up to num_steps + 1,)."""
    starts = kernel_starts_seconds(trace)
    wanted = np.linspace(0.0, starts[-1], num_steps + 1)[1:-1]
    inner = np.searchsorted(starts, wanted)
    cuts: IntArray = np.unique(np.concatenate(([0], inner, [trace.num_kernels])))
    return cuts


def merge_alike(periods: Periods) -> Periods:
    """Storages with the same periods and versions, in steps, as one."""
    by_storage: dict[int, list[int]] = defaultdict(list)
    for row, storage in enumerate(periods.storage.tolist()):
        by_storage[storage].append(row)
    alike: dict[tuple[tuple[int, ...], ...], list[list[int]]] = defaultdict(list)
    for rows in by_storage.values():
        alike[tuple(_signature(periods, row, rows[0]) for row in rows)].append(rows)
    first = [row for group in alike.values() for row in group[0]]
    members = [
        np.concatenate([periods.rows[rows[i]] for rows in group])
        for group in alike.values()
        for i in range(len(group[0]))
    ]
    keep = np.zeros(len(periods), dtype=bool)
    keep[first] = True
    merged = dict(zip(first, members, strict=True))
    chosen = select(periods, keep)
    return replace(chosen, rows=[merged[row] for row in np.flatnonzero(keep).tolist()])


def _signature(periods: Periods, row: int, first: int) -> tuple[int, ...]:
    previous = int(periods.previous[row])
    return (
        int(periods.after[row]),
        int(periods.end[row]),
        int(periods.is_tail[row]),
        NONE if previous == NONE else previous - first,
        int(periods.is_unwritten[row]),
    )


def coarsen(trace: Trace, capacity_bytes: int) -> tuple[IntArray, Periods]:
    """First kernels of the steps, and the periods left: the finest steps that leave room enough.

    Raises InputError if none do.
    """
    allocated_bytes = trace.storages.allocated_bytes
    storage = inactive_periods(trace).storage
    for num_steps in _STEPS_TO_TRY:
        first_kernel = equal_steps(trace, num_steps)
        needed_bytes = bytes_to_be_away(trace, capacity_bytes, first_kernel)
        periods = find_periods(trace, first_kernel)
        periods = merge_alike(select(periods, useful(periods, needed_bytes)))
        relief = [int(allocated_bytes[storage[rows]].sum()) for rows in periods.rows]
        relief_bytes = np.array(relief, dtype=np.int64)
        is_away = _could_be_away(periods, len(needed_bytes))
        worth = relief_bytes * (is_away & (needed_bytes > 0)).sum(axis=1)
        keep = np.zeros(len(periods), dtype=bool)
        keep[np.argsort(-worth, kind="stable")[:MOST_PERIODS]] = True
        if (relief_bytes[keep] @ is_away[keep] >= needed_bytes).all():
            return first_kernel, select(periods, keep)
    raise InputError(
        f"planner: milp takes up to {MOST_STEPS} kernels and {MOST_PERIODS} inactive periods; this "
        f"trace has {trace.num_kernels} kernels, and cut into {_STEPS_TO_TRY[-1]} to "
        f"{_STEPS_TO_TRY[0]} steps no {MOST_PERIODS} groups of periods free the GPU memory needed; "
        "use another planner, fewer micro-batches, or a larger gpu_memory"
    )


def _could_be_away(periods: Periods, num_steps: int) -> BoolArray:
    """Steps in which each period may be away, bool (periods, steps)."""
    result = np.zeros((len(periods), num_steps), dtype=bool)
    for row, (after, end) in enumerate(zip(periods.after, periods.end, strict=True)):
        result[row, np.arange(after + 1, end) % num_steps] = True
    return result
