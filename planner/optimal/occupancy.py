"""How full a choice makes the tiers, before slots are packed."""

from __future__ import annotations

import numpy as np

from teraio.contracts.table import BoolArray, IntArray
from teraio.planner.optimal.periods import Problem
from teraio.planner.residency import cyclic_sum


def overfull_devices(problem: Problem, device: IntArray) -> BoolArray:
    """Devices whose slots would take more than there is at some kernel, bool (devices,).

    A slot is taken from the first offload of its version to the device until the end of the last
    gap; that of a storage never written, always. Packing may need somewhat more.
    """
    capacity_bytes = problem.machine.capacity_bytes
    result = np.zeros(len(capacity_bytes), dtype=bool)
    version = problem.version
    for number in np.flatnonzero(capacity_bytes < problem.trace.peak_live_bytes):
        rows = problem.by_version[device[problem.by_version] == number]
        taken = _taken_bytes(problem, rows, version[rows])
        result[number] = taken.max(initial=0) > capacity_bytes[number]
    return result


def _taken_bytes(problem: Problem, rows: IntArray, version: IntArray) -> IntArray:
    """Bytes of slots taken while each kernel runs, int64 (K,); ``rows`` by version, then time."""
    num_kernels = problem.num_kernels
    if not len(rows):
        return np.zeros(num_kernels, dtype=np.int64)
    begins = np.flatnonzero(np.diff(version, prepend=-1))
    last = np.r_[begins[1:], len(rows)] - 1
    first_kernel = problem.away_first[rows[begins]]
    span = problem.position[rows[last]] - problem.position[rows[begins]]
    span += problem.away_end[rows[last]] - problem.away_first[rows[last]]
    span = np.where(problem.is_unwritten[rows[begins]], num_kernels, span)
    first_kernel = first_kernel % num_kernels
    return cyclic_sum(
        first_kernel,
        first_kernel + np.minimum(span, num_kernels),
        problem.num_bytes[rows[begins]],
        num_kernels,
    )
