"""The variants of the greedy planner: which periods, to which device, in which windows.

Numbers in brackets are the steps of :mod:`teraio.planner.greedy`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from teraio.contracts.hardware import HOST, Hardware
from teraio.contracts.plan import Moves
from teraio.contracts.table import IntArray
from teraio.errors import CapacityError, InfeasibleError
from teraio.planner.candidates import Candidates, find_candidates
from teraio.planner.channel_reservations import (
    Reservations,
    TimeBins,
    open_reservations,
    time_bins,
)
from teraio.planner.clean_copies import chain_moves
from teraio.planner.critical_pressure import open_pressure
from teraio.planner.drafts import draft_moves
from teraio.planner.fallback import FITS, relieve_remaining
from teraio.planner.greedy_choice import NO_LIMIT, Choice, choose_by_benefit, open_choice
from teraio.planner.residency import cyclic_sum, resident_bytes
from teraio.planner.retiming import (
    Windows,
    kernel_of_bin,
    longest_windows,
    planned_windows,
    spend_slack,
)
from teraio.traces.lifetimes import InactivePeriods
from teraio.traces.trace import Trace
from teraio.units import format_bytes

PATIENCES = (0.0, 0.8, 1.0)
"""Shares of the host's benefit that an SSD must give to be preferred (5)."""

MAX_BINS = 8192
"""Bins of the ideal timeline; traces with no more kernels are planned kernel by kernel."""


READINGS = ("planned windows", "longest absences")
"""How long the periods of steps 1 to 6 are away while the fallback adds others (7)."""

_STUCK = FITS - 1


class Chosen(NamedTuple):
    """What steps 1 to 6 leave: the choice, the booked channels, and the readings to try."""

    choice: Choice
    channels: Reservations
    patience: float
    readings: tuple[str, ...]


@dataclass(frozen=True)
class Selection:
    """Periods with their devices, the windows that channels allow, and the variant's options."""

    choice: Choice
    planned: Windows
    options: dict[str, Any]


@dataclass(frozen=True)
class GreedySearch:
    """What all variants share; sizes in bytes, ``resident`` int64 (K,) without any move.

    ``write_seconds`` is the length of an iteration in which the write budgets of the SSDs are kept
    to (None: they are not).
    """

    trace: Trace
    hardware: Hardware
    rate_factor: float
    candidates: Candidates
    periods: InactivePeriods
    period_rows: IntArray
    bins: TimeBins
    resident: IntArray
    capacity_bytes: int
    write_seconds: float | None = None

    @classmethod
    def begin(cls, trace: Trace, hardware: Hardware, rate_factor: float) -> GreedySearch:
        """Candidates and pressure. Raises InfeasibleError if some kernel can never run."""
        bins = time_bins(trace, MAX_BINS)
        candidates, periods, rows = find_candidates(trace, bins, hardware)
        resident = resident_bytes(
            trace.storages, trace.kernels.workspace_bytes, Moves.empty(), trace.num_kernels
        )
        capacity_bytes = hardware.gpu_of_rank(trace.metadata.rank).memory_bytes
        _check_feasible(trace, candidates, resident, capacity_bytes)
        return cls(
            trace=trace,
            hardware=hardware,
            rate_factor=rate_factor,
            candidates=candidates,
            periods=periods,
            period_rows=rows,
            bins=bins,
            resident=resident,
            capacity_bytes=capacity_bytes,
        )

    @property
    def fits_already(self) -> bool:
        """Whether nothing needs to leave."""
        return bool((self.resident <= self.capacity_bytes).all())

    @property
    def patiences(self) -> tuple[float, ...]:
        """(5) Those that make a difference: with one tier there is nothing to wait for."""
        has_ssd = bool(self.hardware.ssds_of_rank(self.trace.metadata.rank))
        return PATIENCES if has_ssd and self.hardware.host.memory_bytes > 0 else PATIENCES[:1]

    def choose(self, patience: float, host_margin: float) -> Chosen:
        """(1 to 6) What transfers in time can relieve; ``host_margin`` is the share of the host
        budget to plan with.
        """
        channels, choice = self._open_channels(), self._open_choice(host_margin)
        highest = np.maximum.reduceat(self.resident, self.bins.first_kernel[:-1])
        pressure = open_pressure(highest - self.capacity_bytes, self.bins.seconds)
        choose_by_benefit(self.candidates, choice, channels, pressure, patience)
        rows = choice.chosen_rows()
        resident = self._resident_with(rows, self._chosen_windows(rows, choice))
        readings = READINGS if (resident > self.capacity_bytes).any() else READINGS[:1]
        return Chosen(choice, channels, patience, readings)

    def select(self, chosen: Chosen, reading: str) -> Selection:
        """(7) The choice with what the fallback adds to it.

        Raises CapacityError that names the kernel for which the tiers are too small.
        """
        choice, channels = chosen.choice.copy(), chosen.channels.copy()
        rows = choice.chosen_rows()
        kernel = _STUCK
        if reading == READINGS[0]:
            resident = self._resident_with(rows, self._chosen_windows(rows, choice))
            kernel = self._relieve(choice, channels, resident)
            # If no period is left to add, those chosen must leave for longer.
            rows = choice.chosen_rows()
        if kernel != FITS:
            resident = self._resident_with(rows, longest_windows(self.candidates, rows))
            kernel = self._relieve(choice, channels, resident)
        if kernel != FITS:
            room = [f"{name} {format_bytes(size)}" for name, size in self._room_bytes().items()]
            raise CapacityError(
                f"kernel {kernel} ({self.trace.kernels.op[kernel]}): the tiers have no room for "
                f"what must leave the GPU before it (without bounce buffers: {', '.join(room)})"
            )
        options = {"patience": chosen.patience, "fallback": reading}
        planned = self._planned_windows(choice.chosen_rows(), choice)
        return Selection(choice, planned, options)

    def draft(self, selection: Selection, *, prefetch_early: bool) -> Moves:
        """(8) Moves with their final times."""
        rows = selection.choice.chosen_rows()
        longest = longest_windows(self.candidates, rows)
        slack = self.capacity_bytes - self._resident_with(rows, longest)
        windows, needed = spend_slack(
            self.candidates, rows, slack, selection.planned, prefetch_early=prefetch_early
        )
        kept = Windows(windows.free_by[needed], windows.prefetch_start[needed])
        return self._moves(rows[needed], selection.choice, kept)

    def _relieve(self, choice: Choice, channels: Reservations, resident: IntArray) -> int:
        """Add periods until every kernel fits; FITS, or the kernel that cannot."""
        over = resident - self.capacity_bytes
        return int(relieve_remaining(self.candidates, choice, channels, over))

    def _open_channels(self) -> Reservations:
        rank = self.trace.metadata.rank
        return open_reservations(self.bins, self.hardware, rank, self.rate_factor)

    def _open_choice(self, host_margin: float) -> Choice:
        room = self._room_bytes()
        room[HOST] = int(host_margin * room[HOST])
        writes = None
        if self.write_seconds is not None:
            budgets = self.hardware.write_budgets(self.trace.metadata.rank)
            allowed = {name: int(rate * self.write_seconds) for name, rate in budgets.items()}
            writes = np.array([allowed.get(name, NO_LIMIT) for name in room])
        capacity_bytes = np.array([*room.values()])
        return open_choice(self.candidates, capacity_bytes, len(self.bins.seconds), writes)

    def _room_bytes(self) -> dict[str, int]:
        """What each device can hold, the host first; an SSD whose bounce buffer the host budget
        cannot hold is out of use.
        """
        room = {HOST: self.hardware.host.memory_bytes}
        for ssd in self.hardware.ssds_of_rank(self.trace.metadata.rank):
            bounce_bytes = 0 if ssd.gds else ssd.bounce_bytes
            is_usable = bounce_bytes <= room[HOST]
            room[ssd.name] = ssd.capacity_bytes if is_usable else 0
            room[HOST] -= bounce_bytes if is_usable else 0
        return room

    def _chosen_windows(self, rows: IntArray, choice: Choice) -> Windows:
        """The windows for which channels were booked."""
        first_kernel = self.bins.first_kernel
        return Windows(
            kernel_of_bin(choice.periods["away_first_bin"][rows], first_kernel),
            kernel_of_bin(choice.periods["away_end_bin"][rows], first_kernel),
        )

    def _resident_with(self, rows: IntArray, windows: Windows) -> IntArray:
        """Bytes per kernel if the chosen rows are away in these windows, int64 (K,)."""
        num_kernels = self.trace.num_kernels
        shift = windows.free_by // num_kernels * num_kernels
        sizes = self.candidates["relief_bytes"][rows]
        start, end = windows.free_by - shift, windows.prefetch_start - shift
        return self.resident - cyclic_sum(start, end, sizes, num_kernels)

    def _planned_windows(self, rows: IntArray, choice: Choice) -> Windows:
        draft = self._moves(rows, choice, longest_windows(self.candidates, rows))
        trace = self.trace
        chains = chain_moves(draft, trace.storages, trace.accesses, trace.num_kernels)
        return planned_windows(
            self.candidates,
            rows,
            choice.periods["device"][rows],
            chains.writes,
            self._open_channels(),
            self.bins.first_kernel,
        )

    def _moves(self, rows: IntArray, choice: Choice, windows: Windows) -> Moves:
        ssds = self.hardware.ssds_of_rank(self.trace.metadata.rank)
        names = np.array([HOST, *(ssd.name for ssd in ssds)], dtype=object)
        return draft_moves(
            self.trace,
            self.periods,
            self.period_rows[rows],
            offload_start=self.candidates["after_kernel"][rows],
            free_by=windows.free_by,
            prefetch_start=windows.prefetch_start,
            device=names[choice.periods["device"][rows]],
        )


def _check_feasible(
    trace: Trace, candidates: Candidates, resident: IntArray, capacity_bytes: int
) -> None:
    """Raise if a kernel needs too much even when all that can be away is away."""
    away = cyclic_sum(
        candidates["away_first"],
        candidates["away_end"],
        candidates["relief_bytes"],
        trace.num_kernels,
    )
    needed = resident - away
    kernel = int(np.argmax(needed))
    if needed[kernel] > capacity_bytes:
        raise InfeasibleError(
            f"kernel {kernel} ({trace.kernels.op[kernel]}) alone needs {needed[kernel]} bytes "
            f"({format_bytes(int(needed[kernel]))}) of GPU memory, "
            f"but {capacity_bytes} ({format_bytes(capacity_bytes)}) are available"
        )
