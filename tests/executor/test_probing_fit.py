"""The fit of latency and rates to times by size, on tables whose truth is known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from teraio.executor.probing import transfers
from teraio.executor.probing.effort import QUICK
from teraio.executor.probing.fitting import KINDS, Timing, fit_rates
from teraio.executor.probing.transfers import TransferBench, common_window, seconds_per_transfer
from teraio.executor.stores import Store, Transfer

SIZES = [2**18, 2**20, 2**22, 2**24, 2**26, 256 * 10**6]
RATES = dict(zip(KINDS, (55e9, 54e9, 49e9, 48e9), strict=True))


def table(latency_seconds: float, noise: float = 0.0) -> list[Timing]:
    """Times of all kinds and sizes; errors of ``noise`` with alternating signs."""
    timings = []
    for kind in KINDS:
        for index, nbytes in enumerate(SIZES):
            seconds = latency_seconds + nbytes / RATES[kind]
            timings.append(Timing(kind, nbytes, seconds * (1 + noise * (-1) ** index)))
    return timings


def test_an_exact_table_is_found_again() -> None:
    """15 us and four rates: what an H200's copies are like (1 MiB at 31 GB/s of 55)."""
    timings = table(15e-6)
    fit = fit_rates(timings)
    assert fit.latency_seconds == pytest.approx(15e-6, rel=1e-3)
    assert fit.read_rate == pytest.approx(55e9, rel=1e-3)
    assert fit.duplex_write_rate == pytest.approx(48e9, rel=1e-3)
    assert abs(fit.misfit(fit.worst(timings))) < 1e-3
    assert fit.seconds("read", 2**20) == pytest.approx(2**20 / 30.8e9, rel=0.01)


def test_small_and_large_transfers_count_alike() -> None:
    """Errors are relative: 4 % of noise on each time stays 4 % or so, also of the shortest."""
    timings = table(15e-6, noise=0.04)
    fit = fit_rates(timings)
    assert all(abs(fit.misfit(timing)) < 0.08 for timing in timings)
    assert fit.read_rate == pytest.approx(55e9, rel=0.05)


def test_small_transfers_that_no_latency_describes_do_not_bend_the_rates() -> None:
    """Measured on an H200: 1 MiB in both directions at once at 15 GB/s each, large ones at 49."""
    alone = {2**20: 31e9, 2**22: 47e9, 2**24: 52e9, 2**26: 55.2e9}
    at_once = {2**20: 15e9, 2**22: 38e9, 2**24: 49e9, 2**26: 49e9}
    timings = [
        Timing(kind, nbytes, nbytes / rate)
        for kind in KINDS
        for nbytes, rate in (at_once if kind.startswith("duplex") else alone).items()
    ]
    fit = fit_rates(timings)
    for timing in timings:
        assert abs(fit.misfit(timing)) < (0.03 if timing.nbytes == 2**26 else 0.6)
    assert fit.worst(timings).nbytes == 2**20
    assert fit.typical_misfit(timings) < 0.04


def test_a_transfer_is_never_faster_than_its_bytes() -> None:
    """A cache that makes small transfers faster gives no negative latency."""
    timings = [Timing(kind, n, n / (10e9 if n < 2**21 else 5e9)) for kind in KINDS for n in SIZES]
    fit = fit_rates(timings)
    assert fit.latency_seconds == 0
    assert fit.read_rate == pytest.approx(5e9, rel=0.01)
    assert fit.misfit(fit.worst(timings)) == pytest.approx(1.0, rel=0.01)
    assert fit.typical_misfit(timings) < 0.01


def test_both_directions_at_once_are_not_faster_than_one_alone() -> None:
    """Hardware refuses such rates; noise makes them."""
    rates = dict(zip(KINDS, (5e9, 5e9, 6e9, 4e9), strict=True))
    fit = fit_rates([Timing(kind, n, n / rates[kind]) for kind in KINDS for n in SIZES])
    assert (fit.duplex_read_rate, fit.duplex_write_rate) == (fit.read_rate, 4e9)


def test_one_size_gives_rates_alone() -> None:
    """Latency and rate cannot be told apart then."""
    fit = fit_rates([Timing(kind, 2**20, 1e-3) for kind in KINDS])
    assert fit.latency_seconds == 0
    assert fit.write_rate == pytest.approx(2**20 / 1e-3, rel=1e-3)


def row(*spans: tuple[float, float]) -> list[Transfer]:
    """Finished transfers with these times."""
    return [
        cast(
            Transfer,
            SimpleNamespace(start_seconds=start, end_seconds=end, nbytes=100, wait=lambda: None),
        )
        for start, end in spans
    ]


def test_time_between_transfers_belongs_to_the_channel() -> None:
    """Four transfers of 0.9 s in 4 s of a full queue take 1 s each, less the last pause."""
    pauses = row((0.0, 0.9), (1.0, 1.9), (2.0, 2.9), (3.0, 3.9))
    assert seconds_per_transfer([pauses], issued_at=-1.0) == [pytest.approx(3.9 / 4)]


def test_only_time_in_which_both_directions_run_counts() -> None:
    """Reads are done at 4 s; by then writes, half as fast, have done one and a half since 1 s."""
    reads = row((0.0, 1.0), (1.0, 2.0), (2.0, 3.0), (3.0, 4.0))
    writes = row((1.0, 3.0), (3.0, 5.0), (5.0, 7.0), (7.0, 9.0))
    assert common_window([reads, writes]) == (1.0, 4.0)
    assert seconds_per_transfer([reads, writes], issued_at=0.0) == pytest.approx([1.0, 2.0])


def test_what_was_served_during_the_issue_does_not_count() -> None:
    """The first transfer waited for the next one's issue, the others were served in a row."""
    slow_start = row((0.0, 1.0), (3.0, 4.0), (4.0, 5.0), (5.0, 6.0))
    assert seconds_per_transfer([slow_start], issued_at=3.0) == [pytest.approx(1.0)]
    # Unless most of the row was served by then: what is left would be too little.
    assert seconds_per_transfer([slow_start], issued_at=5.5) == [pytest.approx(1.5)]


def test_rows_that_never_met_are_taken_whole() -> None:
    """On a busy machine one direction may be through before the other begins."""
    reads, writes = row((0.0, 1.0), (1.0, 2.0)), row((5.0, 8.0), (8.0, 11.0))
    assert seconds_per_transfer([reads, writes], issued_at=0.0) == pytest.approx([1.0, 3.0])


class StreamOrderedStore:
    """Transfers of 10 us plus bytes at 10 GB/s that begin after the kernels queued before them.

    It is its own kernels too: ``enqueue`` keeps the compute stream busy. ``now``: the clock.
    """

    def __init__(self) -> None:
        self.now = 100.0
        self.gates: list[float] = []
        self._busy_until = 0.0
        self._free_at = {False: 0.0, True: 0.0}

    def enqueue(self, seconds: float) -> None:
        """The compute stream is busy from now on, or from when it would have been free."""
        self.gates.append(seconds)
        self._busy_until = max(self._busy_until, self.now) + seconds

    def finish(self) -> None:
        """The kernels have ended."""
        self._busy_until = 0.0

    def write(self, source: torch.Tensor, offset_bytes: int, nbytes: int) -> Transfer:
        """A transfer; to issue it takes 0.4 ms, which is more than it takes itself."""
        return self._transfer(True, nbytes)

    def read(self, destination: torch.Tensor, offset_bytes: int, nbytes: int) -> Transfer:
        """As ``write``."""
        return self._transfer(False, nbytes)

    def _transfer(self, is_write: bool, nbytes: int) -> Transfer:
        self.now += 0.4e-3
        start = max(self._free_at[is_write], self._busy_until, self.now)
        end = self._free_at[is_write] = start + 10e-6 + nbytes / 10e9
        return row((start, end))[0]


def test_time_to_issue_is_no_time_of_the_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels hold the transfers back until all are issued, as long as that takes here."""
    store = StreamOrderedStore()
    clock = SimpleNamespace(perf_counter=lambda: store.now)
    monkeypatch.setattr(transfers, "time", clock)
    bench = TransferBench(
        cast(Store, store),
        "cpu",
        store_bytes=2**20,
        buffer_bytes=2**20,
        background=store,
        waits_in_stream=True,
    )
    timings = bench.timings(QUICK, [2**16, 2**20])
    assert max(store.gates) >= 0.1, "128 transfers take 50 ms to issue, of both directions twice"
    for timing in timings:
        assert timing.seconds == pytest.approx(10e-6 + timing.nbytes / 10e9, rel=0.01)
    fit = fit_rates(timings)
    assert fit.latency_seconds == pytest.approx(10e-6, rel=0.1)
    assert fit.duplex_read_rate == pytest.approx(10e9, rel=0.02)
