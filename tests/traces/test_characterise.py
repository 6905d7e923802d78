"""Characteristics of a trace, on one that can be checked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Accesses
from teraio.traces.characterise import characteristics, live_bytes_by_kind
from teraio.traces.lifetimes import live_bytes
from teraio.traces.trace import Kernels, Storages, Trace, TraceMetadata

GB = 10**9


@pytest.fixture
def trace() -> Trace:
    """Kernels of 1, 2, 3 and 4 s. A 10 GB weight; a 5 GB activation that lives through kernels
    1..3, read at its ends; 1 GB that is born at kernel 3 and dies at kernel 0 of the next round.
    """
    kernels = [
        (k, f"op{k}", "", "other", None, k + 1.0, 0.0, GB if k == 2 else 0, k, 0, "", None, None)
        for k in range(4)
    ]
    storages = [
        (0, 10 * GB, 10 * GB, "parameter", "weight", None, None, None, "", True),
        (1, 5 * GB, 6 * GB, "activation", "", 1, 0, 3, "", True),
        (2, 1 * GB, 1 * GB, "temporary", "", 3, 0, 0, "", True),
    ]
    accesses = [(0, 0, True, False), (0, 2, True, False), (1, 1, False, True)]
    accesses += [(2, 0, True, True), (3, 1, True, False), (3, 2, False, True)]
    return Trace(
        kernels=Kernels.from_rows(kernels),
        storages=Storages.from_rows(storages),
        accesses=Accesses.from_rows(accesses),
        metadata=TraceMetadata(source="imported"),
    )


def test_counts_and_peaks(trace: Trace) -> None:
    found = characteristics(trace)
    assert (found.kernels, found.storages, found.accesses) == (4, 3, 6)
    assert found.ideal_seconds == 10.0
    assert (found.peak_live_bytes, found.peak_kernel) == (16 * GB, 3)
    assert found.peak_allocated_bytes == 17 * GB  # kernels 2 (workspace) and 3


def test_active_bytes_are_averaged_over_kernels_and_over_time(trace: Trace) -> None:
    """Kernels access 11, 5, 10 and 6 GB."""
    found = characteristics(trace, Hardware.preset("h200").with_budgets(gpu_memory=40 * GB))
    assert found.active_mean_bytes == 8 * GB
    assert found.active_time_mean_bytes == pytest.approx((11 + 2 * 5 + 3 * 10 + 4 * 6) / 10 * GB)
    assert found.active_mean_fraction_of_gpu == pytest.approx(0.2)


def test_fraction_of_the_gpu_is_unknown_without_hardware(trace: Trace) -> None:
    assert characteristics(trace).active_mean_fraction_of_gpu is None


def test_live_bytes_at_the_peak_by_kind(trace: Trace) -> None:
    expected = {"parameter": 10 * GB, "activation": 5 * GB, "temporary": 1 * GB}
    assert characteristics(trace).kind_bytes_at_peak == expected


@pytest.mark.parametrize("allocated", [False, True])
def test_kinds_sum_to_the_live_bytes(trace: Trace, allocated: bool) -> None:
    kinds = live_bytes_by_kind(trace, allocated=allocated)
    total = np.sum(list(kinds.values()), axis=0)
    assert np.array_equal(total, live_bytes(trace, allocated=allocated))


def test_histogram_of_storages_counts_each_in_its_decade(trace: Trace) -> None:
    rows = characteristics(trace).storage_sizes.values.tolist()
    assert rows == [[1e9, 1e10, 2, 6 * GB], [1e10, 1e11, 1, 10 * GB]]


def test_histogram_of_inactive_periods(trace: Trace) -> None:
    """The weight idles for kernel 1 (2 s) and for kernel 3 (4 s), the activation for kernel 2."""
    found = characteristics(trace)
    assert found.inactive_periods == 3
    assert found.inactive_lengths.values.tolist() == [[1.0, 10.0, 3, 25 * GB]]


def test_zero_bytes_have_a_bin_of_their_own(trace: Trace) -> None:
    nbytes = trace.storages.nbytes.copy()
    nbytes[2] = 0
    columns = {c.name: getattr(trace.storages, c.name) for c in Storages.COLUMNS}
    emptied = Trace(
        trace.kernels, Storages(**{**columns, "nbytes": nbytes}), trace.accesses, trace.metadata
    )
    first = characteristics(emptied).storage_sizes.values.tolist()[0]
    assert first == [0.0, 0.0, 1, 0]
