"""How long storages lie idle, counted on a trace that can be checked by hand."""

from __future__ import annotations

import pytest

from teraio.contracts.plan import Accesses
from teraio.traces.idleness import idleness
from teraio.traces.trace import Kernels, Storages, Trace, TraceMetadata

MB = 10**6
IDLE_KERNELS = {"weight": (0, 4), "short": (1, 3), "small": (1, 7), "busy": (5, 6), "tail": (6,)}
"""Kernels that access each storage; kernels last 4 ms each, there are ten of them."""


@pytest.fixture
def trace() -> Trace:
    """A 20 MB weight idle for 12 and 20 ms, 500 MB idle for 4 ms, 5 MB idle for 20 ms, 10 MB that
    are never idle, and 1000 MB that lie about for 12 ms after their only use.
    """
    kernels = [
        (k, "op", "", "other", None, 4e-3, 0.0, 0, 0, 0, "", None, None, None) for k in range(10)
    ]
    storages = [
        (0, 20 * MB, 20 * MB, "parameter", "weight", None, None, None, "", True),
        (1, 500 * MB, 500 * MB, "activation", "", 1, 0, 3, "", True),
        (2, 5 * MB, 5 * MB, "activation", "", 1, 1, 7, "", True),
        (3, 10 * MB, 10 * MB, "temporary", "", 5, 0, 6, "", True),
        (4, 1000 * MB, 1000 * MB, "temporary", "", 6, 0, 9, "", True),
    ]
    accesses = [
        (kernel, storage, True, False)
        for storage, kernels_of in enumerate(IDLE_KERNELS.values())
        for kernel in kernels_of
    ]
    return Trace(
        kernels=Kernels.from_rows(kernels),
        storages=Storages.from_rows(storages),
        accesses=Accesses.from_rows(sorted(accesses)),
        metadata=TraceMetadata(source="imported"),
    )


def test_storages_of_10_mb_to_1_gb_ends_included(trace: Trace) -> None:
    found = idleness(trace)
    assert (found.storages, found.storage_fraction) == (4, 4 / 5)
    assert found.total_bytes == 1530 * MB
    assert found.idle_storages == 3


def test_a_storage_counts_once_however_often_it_lies_idle(trace: Trace) -> None:
    """The weight and the tail, of four; the weight has two periods, both long."""
    found = idleness(trace)
    assert (found.long_idle_storages, found.long_idle_storage_fraction) == (2, 0.5)
    assert found.long_idle_bytes == 1020 * MB
    assert (found.periods, found.long_periods, found.long_period_fraction) == (4, 3, 0.75)


def test_medians_of_periods_and_of_the_longest_of_each_storage(trace: Trace) -> None:
    """Periods of 4, 12, 12 and 20 ms; longest of each storage 0, 4, 12 and 20 ms."""
    found = idleness(trace)
    assert found.median_period_seconds == pytest.approx(12e-3)
    assert found.median_longest_seconds == pytest.approx(8e-3)


def test_bounds_are_the_callers(trace: Trace) -> None:
    found = idleness(trace, 100 * MB, None, long_seconds=3e-3)
    assert (found.storages, found.long_idle_storages) == (2, 2)
    assert found.to_bytes is None
    assert idleness(trace, to_bytes=999 * MB).storages == 3


def test_shares_of_nothing_are_unknown(trace: Trace) -> None:
    found = idleness(trace, 2000 * MB, None)
    assert (found.storages, found.periods, found.storage_fraction) == (0, 0, 0.0)
    assert found.long_idle_storage_fraction is None
    assert found.long_period_fraction is None
    assert found.median_period_seconds is None
    assert found.median_longest_seconds is None
