"""A planning problem in small integers: what the mixed-integer program reads, and nothing else.

Times are ticks and sizes are units, chosen so that every row of the program stays far below 2^31:
byte-sized coefficients make OR-Tools certify wrong optima. Where a rounding is needed it is
optimistic (durations and needs down, relief and capacity up), so the program stays a relaxation and
its optimum a bound; what it returns is checked again in bytes and picoseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from teraio.contracts.table import BoolArray, IntArray

NONE = -1
"""No previous period."""


@dataclass(frozen=True)
class Periods:
    """Inactive periods that may leave, ordered by storage and version; int64 or bool (periods,).

    ``rows`` are the rows of each in the trace's inactive periods: one, or several alike that leave
    together. ``after`` and ``end`` are unrolled steps: of the last access before, and of the next
    access (tail: the first step that begins after the death); it may be away in the steps between.
    ``storage`` tells the periods of one storage from others, ``previous`` is the period before it
    in its version (NONE: the first), ``is_unwritten`` is true if no kernel writes the storage.
    """

    rows: list[IntArray]
    storage: IntArray
    after: IntArray
    end: IntArray
    is_tail: BoolArray
    previous: IntArray
    is_unwritten: BoolArray

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class Instance:
    """Steps in order, periods, devices.

    A step is a kernel, or several in a row between which nothing is issued: ``first_kernel[s]`` up
    to ``first_kernel[s + 1]``. Per step ``duration`` and ``gap`` (before it) in ticks, ``needed``
    in units that must be away. Per period ``relief`` in units; per period and device ``slot`` in
    units, ``offload`` and ``prefetch`` in ticks on an idle machine, and ``wear``, the ticks in
    which the device's write budget allows what the offload writes. Per device ``capacity`` and
    ``bounce`` in units, where ``bounce`` is what using a device takes from the host.
    ``relief_bytes`` and ``needed_bytes`` are what the units stand for, to check by.

    ``is_whole``: steps are kernels and no time was rounded. ``has_constant_rates``: transfers never
    slow each other or a kernel down. With both, the optimum is the best plan's simulated time.
    """

    first_kernel: IntArray
    duration: IntArray
    gap: IntArray
    needed: IntArray
    periods: Periods
    relief: IntArray
    devices: list[str]
    slot: IntArray
    offload: IntArray
    prefetch: IntArray
    wear: IntArray
    capacity: IntArray
    bounce: IntArray
    relief_bytes: IntArray
    needed_bytes: IntArray
    tick_seconds: float
    is_whole: bool
    has_constant_rates: bool

    @property
    def num_steps(self) -> int:
        """Steps of an iteration."""
        return len(self.duration)

    @property
    def ideal(self) -> int:
        """Ticks of an iteration without any wait."""
        return int(self.duration.sum() + self.gap.sum())

    @property
    def longest(self) -> int:
        """Ticks that no plan exceeds: everything, one after the other."""
        slowest = (self.offload + self.prefetch).max(axis=1, initial=0)
        return self.ideal + int(slowest.sum())
