"""Characteristics of a trace: how little of the memory is in use at any moment, and for how long
the rest lies idle (paper, section 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from teraio.contracts.hardware import Hardware, Ssd
from teraio.contracts.table import BoolArray, FloatArray, IntArray
from teraio.traces.idleness import Idleness, idleness
from teraio.traces.lifetimes import InactivePeriods, active_bytes, inactive_periods, live_bytes
from teraio.traces.trace import KINDS, Trace

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Characteristics:
    """What ``teraio show`` reports. Bytes are nbytes except where they are called allocated.

    The active bytes of a kernel are those of the storages that it accesses; live bytes are all
    that exist while it runs. A ``mean`` is over kernels, a ``time_mean`` weighs each kernel by its
    duration, a ``fraction_of_gpu`` is over the GPU's memory (None without hardware).
    ``active_max_kernel`` is the first kernel that uses the most, ``active_max_op`` its operator.
    ``kind_bytes_at_peak`` splits the live bytes at the kernel where they peak. ``storage_sizes``
    and ``inactive_lengths`` count by decade of bytes and of seconds. ``large_storages`` tells how
    long those of 10 MB to 1 GB lie idle. ``movable_period_fraction`` is the share of inactive
    periods in which the rank's first SSD, if it did nothing else, could take the storage out and
    bring it back; ``movable_bytes_fraction`` weighs them by size (None without an SSD).
    """

    kernels: int
    storages: int
    accesses: int
    inactive_periods: int
    ideal_seconds: float
    peak_live_bytes: int
    peak_allocated_bytes: int
    peak_kernel: int
    live_mean_bytes: float
    live_time_mean_bytes: float
    active_mean_bytes: float
    active_time_mean_bytes: float
    active_max_bytes: int
    active_max_kernel: int
    active_max_op: str
    active_mean_fraction_of_peak: float | None
    active_mean_fraction_of_gpu: float | None
    active_time_mean_fraction_of_gpu: float | None
    active_max_fraction_of_gpu: float | None
    movable_period_fraction: float | None
    movable_bytes_fraction: float | None
    kind_bytes_at_peak: dict[str, int]
    storage_sizes: pd.DataFrame
    inactive_lengths: pd.DataFrame
    large_storages: Idleness

    def to_dict(self) -> dict[str, Any]:
        """The keys that ``teraio show --json`` promises."""
        return dict(vars(self))


def characteristics(trace: Trace, hardware: Hardware | None = None) -> Characteristics:
    """All characteristics of a trace; those relative to a machine need ``hardware``."""
    periods = inactive_periods(trace)
    nbytes = trace.storages.nbytes
    live = live_bytes(trace)
    peak_kernel = int(np.argmax(live))
    capacity_bytes = hardware.gpu_of_rank(trace.metadata.rank).memory_bytes if hardware else 0
    movable = _movable_fractions(trace, periods, hardware)
    return Characteristics(
        kernels=trace.num_kernels,
        storages=len(trace.storages),
        accesses=len(trace.accesses),
        inactive_periods=len(periods),
        ideal_seconds=trace.ideal_seconds,
        peak_live_bytes=int(live[peak_kernel]),
        peak_allocated_bytes=trace.peak_allocated_bytes,
        peak_kernel=peak_kernel,
        live_mean_bytes=float(live.mean()),
        live_time_mean_bytes=_time_mean(trace, live),
        **_active(trace, int(live[peak_kernel]), capacity_bytes),
        movable_period_fraction=movable[0],
        movable_bytes_fraction=movable[1],
        kind_bytes_at_peak=_kind_bytes(trace, peak_kernel),
        storage_sizes=_by_decade(nbytes, nbytes, "bytes", "storages"),
        inactive_lengths=_by_decade(periods.seconds, nbytes[periods.storage], "seconds", "periods"),
        large_storages=idleness(trace, periods=periods),
    )


def _active(trace: Trace, peak_bytes: int, capacity_bytes: int) -> dict[str, Any]:
    """The fields about active bytes; shares of nothing are None."""
    active = active_bytes(trace)
    kernel = int(np.argmax(active))
    mean_bytes, time_mean_bytes = float(active.mean()), _time_mean(trace, active)
    max_bytes = int(active[kernel])
    return {
        "active_mean_bytes": mean_bytes,
        "active_time_mean_bytes": time_mean_bytes,
        "active_max_bytes": max_bytes,
        "active_max_kernel": kernel,
        "active_max_op": str(trace.kernels.op[kernel]),
        "active_mean_fraction_of_peak": mean_bytes / peak_bytes if peak_bytes else None,
        "active_mean_fraction_of_gpu": mean_bytes / capacity_bytes if capacity_bytes else None,
        "active_time_mean_fraction_of_gpu": (
            time_mean_bytes / capacity_bytes if capacity_bytes else None
        ),
        "active_max_fraction_of_gpu": max_bytes / capacity_bytes if capacity_bytes else None,
    }


def _time_mean(trace: Trace, values: IntArray) -> float:
    """Mean of a value per kernel, weighed by duration; plain if no kernel takes time."""
    durations = trace.kernels.duration_seconds
    return float(np.average(values, weights=durations if durations.any() else None))


def _movable_fractions(
    trace: Trace, periods: InactivePeriods, hardware: Hardware | None
) -> tuple[float | None, float | None]:
    """Shares, of periods and of their bytes, that outlast the way to the first SSD and back."""
    ssds = hardware.ssds_of_rank(trace.metadata.rank) if hardware is not None else ()
    nbytes = trace.storages.nbytes[periods.storage]
    if not ssds or not nbytes.any():
        return None, None
    movable = periods.seconds >= round_trip_seconds(ssds[0], nbytes)
    return float(movable.mean()), float(nbytes[movable].sum() / nbytes.sum())


def round_trip_seconds(ssd: Ssd, nbytes: IntArray | FloatArray) -> FloatArray:
    """Time to write each storage to an idle SSD and to read it back, float64 (storages,)."""
    rates = nbytes / ssd.write_rate + nbytes / ssd.read_rate
    result: FloatArray = rates + 2 * ssd.latency_seconds
    return result


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


def _live_bytes_of(trace: Trace, rows: BoolArray, *, allocated: bool) -> IntArray:
    storages = trace.storages
    sizes = (storages.allocated_bytes if allocated else storages.nbytes)[rows]
    birth, death = storages.birth[rows], storages.death[rows]
    mortal = birth >= 0
    at_start = sizes[~mortal | (death < birth)].sum()
    delta = np.zeros(trace.num_kernels + 1, dtype=np.int64)
    np.add.at(delta, birth[mortal], sizes[mortal])
    np.add.at(delta, death[mortal] + 1, -sizes[mortal])
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
