"""Characteristics of a trace, on one that can be checked by hand."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Accesses
from teraio.contracts.table import MISSING
from teraio.traces.characterise import characteristics, live_bytes_by_kind, round_trip_seconds
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


def test_most_active_kernel_and_shares(trace: Trace) -> None:
    """Kernel 0 uses 11 GB; 8 GB on average, of 16 GB at the peak."""
    found = characteristics(trace, Hardware.preset("h200").with_budgets(gpu_memory=40 * GB))
    assert (found.active_max_bytes, found.active_max_kernel) == (11 * GB, 0)
    assert found.active_max_op == "op0"
    assert found.active_max_fraction_of_gpu == pytest.approx(11 / 40)
    assert found.active_time_mean_fraction_of_gpu == pytest.approx(7.5 / 40)
    assert found.active_mean_fraction_of_peak == 0.5


def test_live_bytes_are_averaged_over_kernels_and_over_time(trace: Trace) -> None:
    """Kernels live with 11, 15, 15 and 16 GB."""
    found = characteristics(trace)
    assert found.live_mean_bytes == 14.25 * GB
    assert found.live_time_mean_bytes == pytest.approx((11 + 2 * 15 + 3 * 15 + 4 * 16) / 10 * GB)


def test_periods_that_outlast_the_way_to_the_ssd_and_back(trace: Trace) -> None:
    """Idle are 10 GB for 2 s and for 4 s, and 5 GB for 3 s. At 6 GB/s each way they need 3.3 s and
    1.7 s.
    """
    machine = Hardware.preset("paper")
    (ssd,) = machine.ssd
    slow = replace(
        machine,
        ssd=(
            replace(
                ssd, duplex_read_rate=0, duplex_write_rate=0, read_rate=6 * GB, write_rate=6 * GB
            ),
        ),
    )
    found = characteristics(trace, slow)
    assert found.movable_period_fraction == pytest.approx(2 / 3)
    assert found.movable_bytes_fraction == pytest.approx(15 / 25)
    assert round_trip_seconds(ssd, np.array([8 * GB])) == pytest.approx(1 + 2 * 20e-6)


@pytest.mark.parametrize("machine", [None, "without SSD"])
def test_without_an_ssd_nobody_knows_what_could_move(trace: Trace, machine: str | None) -> None:
    hardware = replace(Hardware.preset("paper"), ssd=()) if machine else None
    found = characteristics(trace, hardware)
    assert found.movable_period_fraction is None
    assert found.movable_bytes_fraction is None


def test_large_storages_are_those_of_10_mb_to_1_gb(trace: Trace) -> None:
    found = characteristics(trace).large_storages
    assert (found.storages, found.total_bytes, found.periods) == (1, GB, 0)


def test_half_a_million_kernels_take_less_than_two_seconds() -> None:
    """1.6 million accesses, drawn too. Seconds of this process, since others share the machine."""
    trace, machine = long_trace(500_000, 400_000), Hardware.preset("paper")

    def seconds() -> float:
        begin = time.process_time()
        characteristics(trace, machine)
        trace.plot_characteristics(machine)
        return time.process_time() - begin

    assert any(seconds() < 2.0 for _ in range(3))


def long_trace(num_kernels: int, num_storages: int) -> Trace:
    """Storages that are born, read and freed, each over a stretch of a hundred kernels at most."""
    generator = np.random.default_rng(0)
    kernel, storage = np.arange(num_kernels), np.arange(num_storages)
    birth = np.sort(generator.integers(0, num_kernels - 100, num_storages))
    ordinal = storage - np.searchsorted(birth, birth)
    death = birth + generator.integers(2, 100, num_storages)
    nbytes = generator.integers(10**3, 10**9, num_storages)
    middle = birth + generator.integers(0, 100, num_storages) % (death - birth)
    used = np.concatenate([birth, birth + 1, middle, death])
    pairs = np.unique(used * num_storages + np.tile(storage, 4))
    texts = np.full(num_kernels, "", object)
    return Trace(
        kernels=Kernels(
            kernel=kernel,
            op=np.full(num_kernels, "op", object),
            module=texts,
            phase=np.where(kernel // 5000 % 2, "backward", "forward").astype(object),
            micro_batch=np.full(num_kernels, MISSING),
            duration_seconds=generator.uniform(1e-6, 1e-3, num_kernels),
            gap_before_seconds=np.zeros(num_kernels),
            workspace_bytes=np.zeros(num_kernels, np.int64),
            signature=np.zeros(num_kernels, np.int64),
            stream=np.zeros(num_kernels, np.int64),
            group=texts,
            group_sequence=np.full(num_kernels, MISSING),
            peer_rank=np.full(num_kernels, MISSING),
            call=np.full(num_kernels, MISSING),
        ),
        storages=Storages(
            storage=storage,
            nbytes=nbytes,
            allocated_bytes=nbytes,
            kind=np.full(num_storages, "activation", object),
            name=np.full(num_storages, "", object),
            birth=birth,
            birth_ordinal=ordinal,
            death=death,
            dtype=np.full(num_storages, "", object),
            resizable=np.ones(num_storages, bool),
        ),
        accesses=Accesses(
            kernel=pairs // num_storages,
            storage=pairs % num_storages,
            reads=np.ones(len(pairs), bool),
            writes=np.zeros(len(pairs), bool),
        ),
        metadata=TraceMetadata(source="imported"),
    )
