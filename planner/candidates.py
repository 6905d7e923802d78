"""Candidates of planning, in arrays for compiled code: the inactive periods that may leave."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from teraio.contracts.hardware import HOST, Hardware
from teraio.contracts.table import BoolArray, FloatArray, IntArray
from teraio.planner.channel_reservations import TimeBins
from teraio.planner.clean_copies import move_versions
from teraio.planner.slot_packing import align_up
from teraio.traces.lifetimes import InactivePeriods, inactive_periods
from teraio.traces.trace import Trace


class Candidates(NamedTuple):
    """One row per inactive period that may leave the GPU, ordered by after_kernel, then storage.

    Kernels and bins are unrolled from ``after_kernel``. A storage can be away in the kernels
    [away_first, away_end). ``first_bin`` is where an offload is released, ``clean_bin`` the first
    bin in which a dropped clean copy is away throughout, ``last_bin`` the last bin in which a
    prefetch may run (tail: the first bin after the absence). ``version`` numbers versions over all
    storages, ``position`` orders the periods of one, and ``slot_first`` and ``slot_last`` are the
    bins in which a copy is kept, on the axis of ``position``.
    """

    storage: IntArray
    relief_bytes: IntArray
    num_bytes: FloatArray
    slot_bytes: IntArray
    seconds: FloatArray
    is_tail: BoolArray
    after_kernel: IntArray
    away_first: IntArray
    away_end: IntArray
    first_bin: IntArray
    clean_bin: IntArray
    last_bin: IntArray
    version: IntArray
    position: IntArray
    slot_first: IntArray
    slot_last: IntArray
    is_unwritten: BoolArray
    rows_by_version: IntArray
    version_begin: IntArray


def find_candidates(
    trace: Trace, bins: TimeBins, hardware: Hardware
) -> tuple[Candidates, InactivePeriods, IntArray]:
    """All periods of resizable storages that hold bytes; with the periods and the rows used."""
    periods = inactive_periods(trace)
    storages, num_kernels = trace.storages, trace.num_kernels
    rows = np.flatnonzero(
        storages.resizable[periods.storage] & (storages.nbytes[periods.storage] > 0)
    )
    storage, after = periods.storage[rows], periods.after_kernel[rows]
    end, is_tail = periods.end_kernel[rows], periods.is_tail[rows]
    version, position, is_unwritten = move_versions(
        storage, after, storages, trace.accesses, num_kernels
    )
    version = np.unique(storage * (num_kernels + 1) + version, return_inverse=True)[1].reshape(-1)
    rows_by_version = np.lexsort((position, version))
    alignment_bytes = max(hardware.alignment_bytes(d) for d in (HOST, *hardware.ssd_names))
    bin_of = _UnrolledBins(bins, num_kernels)
    num_bins = len(bins.seconds)
    release = bin_of(after + 1)
    starts_bin = bins.first_kernel[release % num_bins] == (after + 1) % num_kernels
    candidates = Candidates(
        storage=storage,
        relief_bytes=storages.allocated_bytes[storage],
        num_bytes=storages.nbytes[storage].astype(np.float64),
        slot_bytes=align_up(storages.nbytes[storage], alignment_bytes),
        seconds=periods.seconds[rows],
        is_tail=is_tail,
        after_kernel=after,
        away_first=after + 1,
        away_end=end + is_tail,
        first_bin=release,
        clean_bin=np.where(starts_bin, release, release + 1),
        last_bin=np.where(is_tail, bin_of(end + 1), bin_of(end - 1)),
        version=version,
        position=position,
        slot_first=bin_of(position),
        slot_last=bin_of(position + end - after),
        is_unwritten=is_unwritten,
        rows_by_version=rows_by_version,
        version_begin=np.searchsorted(
            version[rows_by_version], np.arange(version.max(initial=-1) + 2)
        ),
    )
    return candidates, periods, rows


class _UnrolledBins(NamedTuple):
    """Bin of an unrolled kernel index."""

    bins: TimeBins
    num_kernels: int

    def __call__(self, kernel: IntArray) -> IntArray:
        cycle, within = np.divmod(kernel, self.num_kernels)
        result: IntArray = self.bins.bin_of_kernel[within] + cycle * len(self.bins.seconds)
        return result
