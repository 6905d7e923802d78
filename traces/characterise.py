"""Characteristics of a trace: how little of the memory is in use at any moment, and for how long
the rest lies idle (paper, section 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from teraio.contracts.hardware import Hardware
from teraio.contracts.table import FloatArray, IntArray
from teraio.traces.lifetimes import active_bytes, inactive_periods, live_bytes
from teraio.traces.trace import KINDS, Trace

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Characteristics:
    """What ``teraio show`` reports. Bytes are nbytes except where they are called allocated.

    ``active_mean_bytes`` is the mean over kernels of the bytes that each accesses, and
    ``active_mean_fraction_of_gpu`` the same over the GPU's memory (None without hardware);
    ``active_time_mean_bytes`` weighs each kernel by its duration. ``kind_bytes_at_peak`` splits
    the live bytes at the kernel where they peak. ``storage_sizes`` and ``inactive_lengths`` count
    by decade of bytes and of seconds.
    """

    kernels: int
    storages: int
    accesses: int
    inactive_periods: int
    ideal_seconds: float
    peak_live_bytes: int
    peak_allocated_bytes: int
    peak_kernel: int
    active_mean_bytes: float
    active_time_mean_bytes: float
    active_mean_fraction_of_gpu: float | None
    kind_bytes_at_peak: dict[str, int]
    storage_sizes: pd.DataFrame
    inactive_lengths: pd.DataFrame

    def to_dict(self) -> dict[str, Any]:
        """The keys that ``teraio show --json`` promises."""
        return dict(vars(self))


def characteristics(trace: Trace, hardware: Hardware | None = None) -> Characteristics:
    """All characteristics of a trace; those relative to the GPU need ``hardware``."""
    active, durations = active_bytes(trace), trace.kernels.duration_seconds
    periods = inactive_periods(trace)
    capacity_bytes = hardware.gpu_of_rank(trace.metadata.rank).memory_bytes if hardware else 0
    active_mean_bytes = float(active.mean())
    peak_kernel = int(np.argmax(live_bytes(trace)))
    return Characteristics(
        kernels=trace.num_kernels,
        storages=len(trace.storages),
        accesses=len(trace.accesses),
        inactive_periods=len(periods),
        ideal_seconds=trace.ideal_seconds,
        peak_live_bytes=trace.peak_live_bytes,
        peak_allocated_bytes=trace.peak_allocated_bytes,
        peak_kernel=peak_kernel,
        active_mean_bytes=active_mean_bytes,
        active_time_mean_bytes=(
            float(np.average(active, weights=durations)) if durations.any() else active_mean_bytes
        ),
        active_mean_fraction_of_gpu=active_mean_bytes / capacity_bytes if capacity_bytes else None,
        kind_bytes_at_peak=_kind_bytes(trace, peak_kernel),
        storage_sizes=_by_decade(trace.storages.nbytes, trace.storages.nbytes, "bytes", "storages"),
        inactive_lengths=_by_decade(
            periods.seconds, trace.storages.nbytes[periods.storage], "seconds", "periods"
        ),
    )


def live_bytes_by_kind(trace: Trace, *, allocated: bool = False) -> dict[str, IntArray]:
    """Live bytes of each kind at each kernel, int64 (K,) per kind; kinds that never live left out.

    The values sum to :func:`teraio.traces.live_bytes`.
    """
    storages = trace.storages
    result = {}
    for kind in KINDS:
        rows = storages.kind == kind
        if rows.any():
            result[kind] = _live_bytes_of(trace, rows, allocated=allocated)
    return result


def _live_bytes_of(trace: Trace, rows: Any, *, allocated: bool) -> IntArray:
    storages = trace.storages.take(rows)
    sizes = storages.allocated_bytes if allocated else storages.nbytes
    mortal = storages.birth >= 0
    at_start = sizes[~mortal | (storages.death < storages.birth)].sum()
    delta = np.zeros(trace.num_kernels + 1, dtype=np.int64)
    np.add.at(delta, storages.birth[mortal], sizes[mortal])
    np.add.at(delta, storages.death[mortal] + 1, -sizes[mortal])
    live: IntArray = at_start + np.cumsum(delta[:-1])
    return live


def _kind_bytes(trace: Trace, kernel: int) -> dict[str, int]:
    return {kind: int(live[kernel]) for kind, live in live_bytes_by_kind(trace).items()}


def _by_decade(
    values: IntArray | FloatArray, nbytes: IntArray, unit: str, counted: str
) -> pd.DataFrame:
    """Count and bytes of the items whose value lies in [from, to), one row per decade in use."""
    import pandas as pd

    positive = values > 0
    exponent = np.full(len(values), -np.inf)
    exponent[positive] = np.floor(np.log10(values[positive]) + 1e-12)
    rows = []
    for power in np.unique(exponent):
        chosen = exponent == power
        lower, upper = (0.0, 0.0) if np.isinf(power) else (10.0**power, 10.0 ** (power + 1))
        rows.append((lower, upper, int(chosen.sum()), int(nbytes[chosen].sum())))
    columns = [f"from_{unit}", f"to_{unit}", counted, "total_bytes"]
    return pd.DataFrame(rows, columns=columns)
