"""What the optimal planner decides about: inactive periods as flat arrays, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from teraio.contracts.hardware import Hardware
from teraio.contracts.table import BoolArray, FloatArray, IntArray
from teraio.planner.clean_copies import move_versions
from teraio.planner.residency import cyclic_sum
from teraio.simulator.machine_arrays import Machine, machine_arrays
from teraio.traces.lifetimes import InactivePeriods, inactive_periods, live_bytes
from teraio.traces.trace import Trace

STAYS = -1
"""Device of a period whose storage does not leave."""

SMALL_KERNELS = 10_000
"""A trace with at most this many kernels is small: a choice is timed and judged in milliseconds."""


@dataclass(frozen=True, eq=False)
class Problem:
    """A trace, a machine with budgets, and the periods that may leave, (rows,) each.

    ``period`` is the row among the trace's inactive periods. ``away_first`` and ``away_end``
    (unrolled kernels) are the longest absence possible; ``end`` is the next access, of a tail the
    death. ``position`` is ``after`` on an axis without a cut inside a version. Rows of one version
    follow each other in ``by_version``, which begins anew where ``begins_version``.
    ``resident_bytes`` int64 (K,) is what each kernel finds with nothing away.
    A choice is an int64 array of devices per row, as the machine counts them, or STAYS.
    """

    trace: Trace
    hardware: Hardware
    machine: Machine
    all_periods: InactivePeriods
    period: IntArray
    storage: IntArray
    after: IntArray
    end: IntArray
    away_first: IntArray
    away_end: IntArray
    is_tail: BoolArray
    is_unwritten: BoolArray
    num_bytes: IntArray
    relief_bytes: IntArray
    seconds: FloatArray
    position: IntArray
    by_version: IntArray
    begins_version: BoolArray
    resident_bytes: IntArray

    @property
    def num_kernels(self) -> int:
        """Kernels in an iteration."""
        return self.trace.num_kernels

    @property
    def capacity_bytes(self) -> int:
        """GPU memory that the plan may use."""
        return self.machine.gpu_memory_bytes

    @classmethod
    def of(cls, trace: Trace, hardware: Hardware) -> Problem:
        """``hardware`` holds the budgets."""
        periods = inactive_periods(trace)
        storages, num_kernels = trace.storages, trace.num_kernels
        can_move = storages.resizable & (storages.nbytes > 0)
        period = np.flatnonzero(can_move[periods.storage])
        storage, after = periods.storage[period], periods.after_kernel[period]
        end, is_tail = periods.end_kernel[period], periods.is_tail[period]
        version, position, is_unwritten = move_versions(
            storage, after, storages, trace.accesses, num_kernels
        )
        order = np.lexsort((position, version, storage))
        begins = np.ones(len(order), dtype=bool)
        begins[1:] = (np.diff(storage[order]) != 0) | (np.diff(version[order]) != 0)
        return cls(
            trace=trace,
            hardware=hardware,
            machine=machine_arrays(hardware, trace.metadata.rank),
            all_periods=periods,
            period=period,
            storage=storage,
            after=after,
            end=end,
            away_first=after + 1,
            away_end=end + is_tail,
            is_tail=is_tail,
            is_unwritten=is_unwritten,
            num_bytes=storages.nbytes[storage],
            relief_bytes=storages.allocated_bytes[storage],
            seconds=periods.seconds[period],
            position=position,
            by_version=order,
            begins_version=begins,
            resident_bytes=live_bytes(trace, allocated=True) + trace.kernels.workspace_bytes,
        )

    @property
    def is_small(self) -> bool:
        """Whether there is time to try much."""
        return self.num_kernels <= SMALL_KERNELS

    @property
    def is_faster_one_way(self) -> bool:
        """Whether a direction is faster while the other rests."""
        machine = self.machine
        return bool(
            (machine.duplex_rate < machine.solo_rate).any()
            or (machine.link_duplex_rate < machine.link_solo_rate).any()
        )

    def with_host_alone(self) -> Problem | None:
        """The same, with the SSDs closed; None if there are none open, or the host has no room for
        what must leave.
        """
        machine, closed = self.machine, self.machine.capacity_bytes.copy()
        closed[1:] = 0
        least_bytes = int(self.resident_bytes.max()) - self.capacity_bytes
        if (closed == machine.capacity_bytes).all() or closed[0] < least_bytes:
            return None
        return replace(
            self,
            hardware=replace(self.hardware, ssd=()),
            machine=machine._replace(capacity_bytes=closed),
        )

    @property
    def version(self) -> IntArray:
        """Number of each row's version, int64 (rows,)."""
        result = np.empty(len(self.period), dtype=np.int64)
        result[self.by_version] = np.cumsum(self.begins_version) - 1
        return result

    def writes(self, device: IntArray) -> BoolArray:
        """Whether each row's move writes its copy, bool (rows,); a copy on the same device that an
        earlier move of the version left is used again.
        """
        order = self.by_version
        chosen = device[order] != STAYS
        rows, version = order[chosen], np.cumsum(self.begins_version)[chosen]
        by_device = np.lexsort((device[rows], version))
        rows, version = rows[by_device], version[by_device]
        is_first = np.ones(len(rows), dtype=bool)
        is_first[1:] = (np.diff(version) != 0) | (np.diff(device[rows]) != 0)
        result = np.zeros(len(device), dtype=bool)
        result[rows] = is_first & ~self.is_unwritten[rows]
        return result

    def resident_with(self, rows: IntArray, away_first: IntArray, away_end: IntArray) -> IntArray:
        """Bytes that each kernel finds if these rows are away in those kernels, int64 (K,)."""
        lap = away_first // self.num_kernels * self.num_kernels
        away = cyclic_sum(
            away_first - lap, away_end - lap, self.relief_bytes[rows], self.num_kernels
        )
        result: IntArray = self.resident_bytes - away
        return result
