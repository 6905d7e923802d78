"""Which inactive periods the program decides on, in steps of one or several kernels."""

from __future__ import annotations

import numpy as np

from teraio.contracts.table import BoolArray, IntArray
from teraio.planner.clean_copies import move_versions
from teraio.planner.milp.instance import NONE, Periods
from teraio.traces.lifetimes import InactivePeriods, inactive_periods, live_bytes
from teraio.traces.trace import Trace


def find_periods(trace: Trace, first_kernel: IntArray) -> Periods:
    """All periods of storages that can leave which last over a whole step, each alone."""
    found, storages = inactive_periods(trace), trace.storages
    after, end = _period_steps(found, first_kernel, trace.num_kernels)
    can_leave = storages.resizable & (storages.nbytes > 0) & (storages.allocated_bytes > 0)
    version, position, is_unwritten = move_versions(
        found.storage, found.after_kernel, storages, trace.accesses, trace.num_kernels
    )
    order = np.lexsort((position, version, found.storage))
    order = order[(can_leave[found.storage] & (end > after + 1))[order]]
    storage, version = found.storage[order], version[order]
    previous = np.arange(-1, len(order) - 1)
    is_same = (storage[1:] == storage[:-1]) & (version[1:] == version[:-1])
    previous[1:][~is_same] = NONE
    return Periods(
        rows=list(order[:, np.newaxis]),
        storage=storage,
        after=after[order],
        end=end[order],
        is_tail=found.is_tail[order],
        previous=previous,
        is_unwritten=is_unwritten[order],
    )


def _period_steps(
    periods: InactivePeriods, first_kernel: IntArray, num_kernels: int
) -> tuple[IntArray, IntArray]:
    def step_of(kernel: IntArray) -> IntArray:
        cycle, within = np.divmod(kernel, num_kernels)
        step = np.searchsorted(first_kernel, within, side="right") - 1
        result: IntArray = step + cycle * (len(first_kernel) - 1)
        return result

    return step_of(periods.after_kernel), step_of(periods.end_kernel + periods.is_tail)


def bytes_to_be_away(trace: Trace, capacity_bytes: int, first_kernel: IntArray) -> IntArray:
    """Bytes by which the fullest kernel of each step exceeds the GPU; int64 (steps,), not below 0.

    A storage that is away counts in every kernel of the step, so their maximum is what it takes.
    """
    used = live_bytes(trace, allocated=True) + trace.kernels.workspace_bytes
    excess: IntArray = np.maximum.reduceat(used, first_kernel[:-1]) - capacity_bytes
    return np.maximum(excess, 0)


def useful(periods: Periods, needed_bytes: IntArray) -> BoolArray:
    """Periods that may free memory where it is short, or leave a copy for a later one that does.

    To leave the others out loses nothing.
    """
    num_steps = len(needed_bytes)
    short = np.concatenate(([0], np.cumsum(np.tile(needed_bytes > 0, 3))))
    result: BoolArray = short[periods.end] > short[periods.after + 1]
    assert int(periods.end.max(initial=0)) <= 3 * num_steps
    for row in range(len(periods) - 1, -1, -1):
        if result[row] and periods.previous[row] != NONE:
            result[periods.previous[row]] |= not periods.is_unwritten[row]
    return result


def select(periods: Periods, keep: BoolArray) -> Periods:
    """The periods where ``keep``; those left out never leave the GPU, and chains skip them."""
    number = np.cumsum(keep) - 1
    previous = periods.previous.copy()
    for row in range(len(periods)):
        before = previous[row]
        if before != NONE and not keep[before]:
            previous[row] = previous[before]
    previous = previous[keep]
    rows = np.flatnonzero(keep)
    return Periods(
        rows=[periods.rows[row] for row in rows],
        storage=periods.storage[keep],
        after=periods.after[keep],
        end=periods.end[keep],
        is_tail=periods.is_tail[keep],
        previous=np.where(previous == NONE, NONE, number[previous]),
        is_unwritten=periods.is_unwritten[keep],
    )
