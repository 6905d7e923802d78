"""From a trace and a machine to an instance: picoseconds to ticks, bytes to units."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from teraio.contracts.hardware import HOST, Hardware
from teraio.contracts.table import IntArray
from teraio.planner.milp.instance import Instance, Periods
from teraio.planner.milp.periods import bytes_to_be_away, select, useful
from teraio.planner.slot_packing import align_up
from teraio.simulator.machine_arrays import Machine, machine_arrays
from teraio.simulator.state import READ, WRITE
from teraio.simulator.trace_arrays import kernel_times, picoseconds
from teraio.traces.lifetimes import inactive_periods
from teraio.traces.trace import Trace
from teraio.units import PICOSECONDS_PER_SECOND, to_picoseconds

TICKS_PER_STEP = 12
"""Ticks per common divisor of all times. The iteration time of a plan is the length of a loop of
waits divided by the iterations that it spans: a whole number of ticks for 1, 2, 3, 4, 6 or 12."""

FOREVER = 10**17
"""Picoseconds, more than a day: longer than any iteration."""

MOST_UNITS = 2**27
"""The sum of a row of sizes, above which they are rounded to a larger unit."""


def make_instance(
    trace: Trace,
    hardware: Hardware,
    bandwidth_share: float,
    first_kernel: IntArray,
    periods: Periods,
    most_ticks: int = 10**6,
    most_picoseconds: float = math.inf,
) -> Instance:
    """Sizes and times of those periods that can be of use; ``hardware`` holds the budgets.

    The best iteration, known to take at most ``most_picoseconds``, has about ``most_ticks`` ticks
    at most; times are rounded where that takes larger ticks than their common divisor.
    """
    machine = machine_arrays(hardware, trace.metadata.rank)
    needed_bytes = bytes_to_be_away(trace, machine.gpu_memory_bytes, first_kernel)
    periods = select(periods, useful(periods, needed_bytes))
    host_bytes = machine.capacity_bytes[0]
    usable = np.flatnonzero((machine.capacity_bytes > 0) & (machine.bounce_bytes <= host_bytes))
    sizes = _Sizes(trace, machine, usable, periods)
    duration, gap = _step_times(trace, first_kernel)
    offload, prefetch = (sizes.picoseconds(way, bandwidth_share) for way in (WRITE, READ))
    times = np.concatenate([some.reshape(-1) for some in (duration, gap, offload, prefetch)])
    scale = _tick_scale(times, min(most_picoseconds, float(times.sum())), most_ticks)
    relief_bytes = sizes.relief_bytes
    relief, needed = to_units(relief_bytes, needed_bytes)
    slot, capacity, bounce = sizes.slots()
    return Instance(
        first_kernel=first_kernel,
        duration=scale.ticks(duration),
        gap=scale.ticks(gap),
        needed=needed,
        periods=periods,
        relief=relief,
        devices=[machine.devices[device] for device in usable],
        slot=slot,
        offload=scale.ticks(offload),
        prefetch=scale.ticks(prefetch),
        wear=scale.ticks(sizes.wear(hardware.write_budgets(trace.metadata.rank))),
        capacity=capacity,
        bounce=bounce,
        relief_bytes=relief_bytes,
        needed_bytes=needed_bytes,
        tick_seconds=scale.denominator / scale.numerator / PICOSECONDS_PER_SECOND,
        is_whole=scale.is_whole and len(first_kernel) == trace.num_kernels + 1,
        has_constant_rates=_has_constant_rates(machine, usable),
    )


@dataclass(frozen=True)
class _Sizes:
    """Bytes and picoseconds of the periods, added up over those that leave together."""

    trace: Trace
    machine: Machine
    usable: IntArray
    periods: Periods

    def _totals(self, of_storage: IntArray) -> IntArray:
        storage = inactive_periods(self.trace).storage
        sums = [int(of_storage[storage[rows]].sum()) for rows in self.periods.rows]
        return np.array(sums, dtype=np.int64)

    def _per_device(self, of_storage: list[IntArray]) -> IntArray:
        columns = [self._totals(values) for values in of_storage]
        return np.array(columns, dtype=np.int64).reshape(len(columns), len(self.periods)).T

    @property
    def relief_bytes(self) -> IntArray:
        """What the GPU gains, int64 (periods,)."""
        return self._totals(self.trace.storages.allocated_bytes)

    def picoseconds(self, way: int, share: float) -> IntArray:
        """Transfers on an idle machine, int64 (periods, devices)."""
        machine, num_bytes = self.machine, self.trace.storages.nbytes
        link = machine.link_solo_rate[way]
        channels = 2 * self.usable + way
        rates = np.minimum(machine.solo_rate[channels], link)
        weight = machine.memory_weight[channels]
        shared = np.divide(
            machine.memory_rate, weight, out=np.full(len(weight), np.inf), where=weight > 0
        )
        rates = np.minimum(rates, shared) * share
        return self._per_device(
            [
                machine.latency[channel] + picoseconds(num_bytes / rate)
                for channel, rate in zip(channels, rates, strict=True)
            ]
        )

    def wear(self, write_budgets: dict[str, float]) -> IntArray:
        """Picoseconds in which a device may be written what an offload writes, 0 without a budget.

        At most FOREVER; int64 (periods, devices).
        """
        result = np.zeros((len(self.periods), len(self.usable)), dtype=np.int64)
        num_bytes = self._totals(self.trace.storages.nbytes)
        for column, device in enumerate(self.usable):
            budget = write_budgets.get(self.machine.devices[device])
            if budget is not None:
                with np.errstate(divide="ignore"):
                    seconds = num_bytes / np.float64(budget)
                ps = np.minimum(seconds * PICOSECONDS_PER_SECOND, FOREVER)
                result[:, column] = np.floor(ps)
        return result

    def slots(self) -> tuple[IntArray, IntArray, IntArray]:
        """Slot sizes (periods, devices), capacities and bounce buffers (devices,), in units."""
        machine, usable = self.machine, self.usable
        num_bytes = self.trace.storages.nbytes
        aligned = [align_up(num_bytes, int(machine.alignment[device])) for device in usable]
        slot, capacity = self._per_device(aligned), machine.capacity_bytes[usable]
        bounce = machine.bounce_bytes[usable].astype(np.int64)
        for column in range(len(usable)):
            extra = bounce if column == 0 and machine.devices[usable[0]] == HOST else bounce[:0]
            everything = int(slot[:, column].sum() + extra.sum())
            unit = max(1, -(-everything // MOST_UNITS))
            slot[:, column] //= unit
            extra //= unit
            # More than everything is as good as everything.
            capacity[column] = min(-(-capacity[column] // unit), everything + 1)
        return slot, capacity, bounce


def _step_times(trace: Trace, first_kernel: IntArray) -> tuple[IntArray, IntArray]:
    """Duration and gap before it of each step in picoseconds, int64 (steps,)."""
    times = kernel_times(trace)
    gaps = times.gap + to_picoseconds(trace.metadata.dispatch_seconds)
    gap = gaps[first_kernel[:-1]]
    return np.add.reduceat(times.duration + gaps, first_kernel[:-1]) - gap, gap


@dataclass(frozen=True)
class _TickScale:
    """Ticks per picosecond as a fraction; ``is_whole``: no time is rounded."""

    numerator: int
    denominator: int
    is_whole: bool

    def ticks(self, of_picoseconds: IntArray) -> IntArray:
        """Rounded down, so that no plan takes longer in ticks than it does."""
        return of_picoseconds * self.numerator // self.denominator


def _tick_scale(times: IntArray, most_picoseconds: float, most_ticks: int) -> _TickScale:
    divisor = max(1, int(np.gcd.reduce(times)))
    if most_picoseconds * TICKS_PER_STEP <= most_ticks * divisor:
        return _TickScale(TICKS_PER_STEP, divisor, is_whole=True)
    return _TickScale(1, math.ceil(most_picoseconds / most_ticks), is_whole=False)


def to_units(relief_bytes: IntArray, needed_bytes: IntArray) -> tuple[IntArray, IntArray]:
    """Sizes whose sums stay small: exact where a common divisor allows, else relief rounded up and
    needs rounded down.
    """
    total = int(relief_bytes.sum()) + int(needed_bytes.max(initial=0))
    unit = max(1, int(np.gcd.reduce(np.concatenate([relief_bytes, needed_bytes]))))
    unit *= max(1, -(-total // (unit * MOST_UNITS)))
    return -(-relief_bytes // unit), needed_bytes // unit


def _has_constant_rates(machine: Machine, usable: IntArray) -> bool:
    """Whether every transfer has the rate that it has alone, and kernels do not feel it."""
    channels = np.concatenate([2 * usable, 2 * usable + 1])
    memory_rate = machine.memory_weight[channels] @ machine.solo_rate[channels]
    if (machine.slowdown > 1).any() or memory_rate > machine.memory_rate:
        return False
    if (machine.duplex_rate != machine.solo_rate)[channels].any():
        return False
    link = machine.link_duplex_rate
    if len(usable) == 1:
        rates = np.minimum(machine.solo_rate[channels], machine.link_solo_rate)
        return bool((rates <= link).all())
    reads, writes = machine.solo_rate[2 * usable].sum(), machine.solo_rate[2 * usable + 1].sum()
    return bool(reads <= link[READ] and writes <= link[WRITE])
