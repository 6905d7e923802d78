"""How long the storages of a range of sizes lie idle: the paper's claims of its section 2.1."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from teraio.traces.lifetimes import InactivePeriods, inactive_periods
from teraio.traces.trace import Trace

LARGE_BYTES = (10**7, 10**9)
"""10 MB to 1 GB: "most tensors have sizes" in this range, says the paper."""

LONG_SECONDS = 10e-3
"""10^4 us: "more than 40% of these tensors remain inactive" for longer, says the paper."""


@dataclass(frozen=True, kw_only=True)
class Idleness:
    """How many storages of ``from_bytes <= nbytes <= to_bytes`` lie idle for long.

    Long is ``long_seconds`` or more without a break. ``idle_storages`` have an inactive period at
    all, ``long_idle_storages`` a long one; both are given as counts, and the latter also as a
    share of all ``storages`` and in bytes. A storage that is used often has many periods:
    ``long_period_fraction`` is the share of the periods themselves, ``median_period_seconds``
    their median, and ``median_longest_seconds`` the median over storages of the longest of each
    (0 for a storage that is never idle). Shares and medians of nothing are None.
    """

    from_bytes: int
    to_bytes: int | None
    long_seconds: float
    storages: int
    storage_fraction: float | None
    total_bytes: int
    idle_storages: int
    long_idle_storages: int
    long_idle_storage_fraction: float | None
    long_idle_bytes: int
    periods: int
    long_periods: int
    long_period_fraction: float | None
    median_period_seconds: float | None
    median_longest_seconds: float | None


def idleness(
    trace: Trace,
    from_bytes: int = LARGE_BYTES[0],
    to_bytes: int | None = LARGE_BYTES[1],
    long_seconds: float = LONG_SECONDS,
    periods: InactivePeriods | None = None,
) -> Idleness:
    """Count long inactive periods of storages in a range of sizes; ``to_bytes`` None: no end.

    ``periods`` spares working them out again. Tails (from the last access to the death) are
    periods too. ``storage_fraction`` is the range's share of all storages that hold bytes.
    """
    if periods is None:
        periods = inactive_periods(trace)
    nbytes = trace.storages.nbytes
    in_range = nbytes >= from_bytes
    if to_bytes is not None:
        in_range &= nbytes <= to_bytes
    chosen = in_range[periods.storage]
    seconds = periods.seconds[chosen]
    longest = np.full(len(nbytes), -1.0)
    np.maximum.at(longest, periods.storage[chosen], seconds)
    long_idle = longest >= long_seconds
    storages, long_idle_storages = int(in_range.sum()), int(long_idle.sum())
    long_periods = int((seconds >= long_seconds).sum())
    return Idleness(
        from_bytes=from_bytes,
        to_bytes=to_bytes,
        long_seconds=long_seconds,
        storages=storages,
        storage_fraction=_share(storages, int((nbytes > 0).sum())),
        total_bytes=int(nbytes[in_range].sum()),
        idle_storages=int((longest >= 0).sum()),
        long_idle_storages=long_idle_storages,
        long_idle_storage_fraction=_share(long_idle_storages, storages),
        long_idle_bytes=int(nbytes[long_idle].sum()),
        periods=len(seconds),
        long_periods=long_periods,
        long_period_fraction=_share(long_periods, len(seconds)),
        median_period_seconds=_median(seconds),
        median_longest_seconds=_median(np.maximum(longest[in_range], 0.0)),
    )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _median(values: np.ndarray) -> float | None:
    return float(np.median(values)) if len(values) else None
