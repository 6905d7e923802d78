"""Windows of absence that a policy asks for, cut to what the GPU's memory allows.

A policy names the periods that leave, and for each the kernel until which its memory may be kept
and the one from which it may be taken again. All periods begin with the longest possible absence;
the slack that this leaves is given out, the soonest need first, then the latest release first, and
never beyond what the policy asks for. So a policy's plan fits wherever its choice of periods can.
"""

from __future__ import annotations

import numpy as np

from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Moves
from teraio.contracts.table import IntArray
from teraio.errors import CapacityError
from teraio.planner.residency import cyclic_sum, resident_bytes
from teraio.planner.retiming import Windows, grow_offloads, grow_prefetches
from teraio.planner.slack_tree import slack_tree
from teraio.traces.lifetimes import InactivePeriods
from teraio.traces.trace import Trace
from teraio.units import format_bytes


def movable_periods(trace: Trace, periods: InactivePeriods) -> IntArray:
    """Rows of the periods of storages that hold bytes and can give them back."""
    storages = trace.storages
    can_leave = storages.resizable & (storages.nbytes > 0)
    return np.flatnonzero(can_leave[periods.storage])


def longest_absence(periods: InactivePeriods, rows: IntArray) -> Windows:
    """Away in every kernel between the accesses; for a tail through the death."""
    return Windows(periods.after_kernel[rows] + 1, periods.end_kernel[rows] + periods.is_tail[rows])


def fit_windows(
    trace: Trace,
    periods: InactivePeriods,
    rows: IntArray,
    wanted: Windows,
    hardware: Hardware,
    *,
    policy: str,
    staying: str,
) -> Windows:
    """The windows nearest to ``wanted`` (unrolled kernels, int64 (rows,)) that fit the GPU.

    Raises CapacityError that names the ``policy``, the kernel and ``staying``, what the policy
    leaves on the GPU, if it does not fit even with the longest absences.
    """
    windows = longest_absence(periods, rows)
    num_kernels = trace.num_kernels
    size = trace.storages.allocated_bytes[periods.storage[rows]]
    slack = _slack_bytes(trace, windows, size, hardware, policy, staying)
    tree = slack_tree(slack)
    is_tail = periods.is_tail[rows]
    by_need = np.argsort(windows.prefetch_start, kind="stable")
    by_need = by_need[~is_tail[by_need]]
    by_release = np.argsort(-windows.free_by, kind="stable")
    grow_prefetches(tree, num_kernels, windows, size, by_need, wanted.prefetch_start)
    grow_offloads(tree, num_kernels, windows, size, by_release, wanted.free_by)
    return windows


def _slack_bytes(
    trace: Trace,
    windows: Windows,
    size: IntArray,
    hardware: Hardware,
    policy: str,
    staying: str,
) -> IntArray:
    """Bytes free at each kernel while all windows are away, int64 (K,)."""
    num_kernels = trace.num_kernels
    resident = resident_bytes(
        trace.storages, trace.kernels.workspace_bytes, Moves.empty(), num_kernels
    )
    shift = windows.free_by // num_kernels * num_kernels
    start, end = windows.free_by - shift, windows.prefetch_start - shift
    slack = hardware.gpu_of_rank(trace.metadata.rank).memory_bytes - resident
    slack += cyclic_sum(start, end, size, num_kernels)
    kernel = int(np.argmin(slack))
    if slack[kernel] < 0:
        capacity = hardware.gpu_of_rank(trace.metadata.rank).memory_bytes
        needed = capacity - int(slack[kernel])
        raise CapacityError(
            f"kernel {kernel} ({trace.kernels.op[kernel]}) needs {needed} bytes "
            f"({format_bytes(needed)}) of GPU memory, because under {policy} {staying} stay there, "
            f"but {capacity} ({format_bytes(capacity)}) are available"
        )
    return slack
