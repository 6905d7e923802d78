"""Candidates of planning, in arrays for compiled code: the inactive periods that may leave."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from teraio.contracts.hardware import HOST, Hardware
from teraio.contracts.table import IntArray
from teraio.planner.channel_reservations import TimeBins
from teraio.planner.clean_copies import move_versions
from teraio.planner.slot_packing import align_up
from teraio.traces.lifetimes import InactivePeriods, inactive_periods
from teraio.traces.trace import Trace

Candidates = npt.NDArray[np.void]
"""Records, one per inactive period that may leave, ordered by after_kernel, then storage.

Kernels and bins are unrolled from ``after_kernel``. A storage can be away in the kernels
[away_first, away_end). ``first_bin`` is where an offload is released, ``clean_bin`` the first bin
in which a dropped clean copy is away throughout, ``last_bin`` the last bin in which a prefetch may
run (tail: the first bin after the absence). ``version`` numbers versions over all storages,
``position`` orders the periods of one, ``next_sibling`` is the row after it there (-1: none),
and a copy is kept in the bins from ``slot_first`` to ``slot_last``, on the axis of ``position``.
"""

_RECORD = np.dtype(
    [
        ("relief_bytes", np.int64),
        ("num_bytes", np.int64),
        ("slot_bytes", np.int64),
        ("seconds", np.float64),
        ("after_kernel", np.int64),
        ("away_first", np.int64),
        ("away_end", np.int64),
        ("first_bin", np.int64),
        ("clean_bin", np.int64),
        ("last_bin", np.int64),
        ("version", np.int64),
        ("position", np.int64),
        ("next_sibling", np.int64),
        ("slot_first", np.int64),
        ("slot_last", np.int64),
        ("is_tail", np.bool_),
        ("is_unwritten", np.bool_),
    ],
    align=True,
)


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
    alignment_bytes = max(hardware.alignment_bytes(d) for d in (HOST, *hardware.ssd_names))
    bin_of = _UnrolledBins(bins, num_kernels)
    num_bins = len(bins.seconds)
    release = bin_of(after + 1)
    starts_bin = bins.first_kernel[release % num_bins] == (after + 1) % num_kernels
    candidates = np.zeros(len(rows), dtype=_RECORD)
    columns = {
        "relief_bytes": storages.allocated_bytes[storage],
        "num_bytes": storages.nbytes[storage],
        "slot_bytes": align_up(storages.nbytes[storage], alignment_bytes),
        "seconds": periods.seconds[rows],
        "after_kernel": after,
        "away_first": after + 1,
        "away_end": end + is_tail,
        "first_bin": release,
        "clean_bin": np.where(starts_bin, release, release + 1),
        "last_bin": np.where(is_tail, bin_of(end + 1), bin_of(end - 1)),
        "version": version,
        "position": position,
        "next_sibling": _next_siblings(version, position),
        "slot_first": bin_of(position),
        "slot_last": bin_of(position + end - after),
        "is_tail": is_tail,
        "is_unwritten": is_unwritten,
    }
    for name, column in columns.items():
        candidates[name] = column
    return candidates, periods, rows


def _next_siblings(version: IntArray, position: IntArray) -> IntArray:
    """The row that follows each row in its version, -1 if none."""
    order = np.lexsort((position, version))
    following = np.full(len(order), -1, dtype=np.int64)
    is_same = version[order[1:]] == version[order[:-1]]
    following[order[:-1][is_same]] = order[1:][is_same]
    return following


class _UnrolledBins(NamedTuple):
    """Bin of an unrolled kernel index."""

    bins: TimeBins
    num_kernels: int

    def __call__(self, kernel: IntArray) -> IntArray:
        cycle, within = np.divmod(kernel, self.num_kernels)
        result: IntArray = self.bins.bin_of_kernel[within] + cycle * len(self.bins.seconds)
        return result
