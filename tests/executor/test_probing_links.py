"""Several GPUs at once: links are found from whose rates fall together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest

from teraio.executor.probing import hosts
from teraio.executor.probing.fitting import KINDS
from teraio.executor.probing.hosts import host_bench
from teraio.executor.probing.links import Rates, find_links, rates_at_once
from teraio.executor.probing.places import GpuPlace
from teraio.executor.probing.transfers import TransferBench

MIB = 2**20


class FakeMachine:
    """GPUs of 50 GB/s each; a link's and the host's capacity are shared evenly among the active."""

    def __init__(self, link_of_gpu: Sequence[int], link: float, host: float) -> None:
        self.link_of_gpu, self.link, self.host = link_of_gpu, link, host
        self.calls: list[tuple[int, ...]] = []

    def rates_of(self, gpus: Sequence[int]) -> list[Rates]:
        """Rates of each of ``gpus`` while all of them transfer."""
        self.calls.append(tuple(gpus))
        rates: list[Rates] = []
        for gpu in gpus:
            members = sum(self.link_of_gpu[other] == self.link_of_gpu[gpu] for other in gpus)
            rate = min(50e9, self.link / members, self.host / len(gpus))
            rates.append(dict.fromkeys(KINDS, rate))
        return rates

    def alone(self) -> list[Rates]:
        """Rates of each GPU alone."""
        return [self.rates_of([gpu])[0] for gpu in range(len(self.link_of_gpu))]


def test_links_of_their_own() -> None:
    """Nobody slows down, so no pair is measured."""
    machine = FakeMachine([0, 1, 2, 3], link=50e9, host=1e12)
    together = find_links(machine.alone(), machine.rates_of)
    assert [link.gpus for link in together.links] == [(0,), (1,), (2,), (3,)]
    assert together.links[0].rates["read"] == 50e9
    assert together.memory_rate is None
    assert machine.calls[-1] == (0, 1, 2, 3)


def test_pairs_behind_switches() -> None:
    """Two GPUs share 50 GB/s; the link carries what both got together."""
    machine = FakeMachine([0, 0, 1, 1], link=50e9, host=1e12)
    together = find_links(machine.alone(), machine.rates_of)
    assert [link.gpus for link in together.links] == [(0, 1), (2, 3)]
    assert together.links[1].rates["write"] == pytest.approx(50e9)
    assert together.memory_rate is None


def test_three_on_one_link_and_one_alone() -> None:
    """Who shares with a member shares with all of them."""
    machine = FakeMachine([0, 1, 0, 0], link=50e9, host=1e12)
    together = find_links(machine.alone(), machine.rates_of)
    assert [link.gpus for link in together.links] == [(0, 2, 3), (1,)]


def test_host_memory_binds() -> None:
    """All four are slow together and no two of them are: 120 GB/s are the host's."""
    machine = FakeMachine([0, 1, 2, 3], link=50e9, host=120e9)
    together = find_links(machine.alone(), machine.rates_of)
    assert len(together.links) == 4
    assert together.links[3].rates["read"] == 50e9
    # Both directions of all four, each at 30 GB/s.
    assert together.memory_rate == pytest.approx(240e9)


def test_places_are_measured_alone_and_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two CPUs in the place of GPUs: real transfers, and each has one link."""
    monkeypatch.setattr(hosts, "_TOGETHER_BYTES", MIB)
    monkeypatch.setattr(hosts, "_TOGETHER_HALF_BYTES", 8 * MIB)
    together = hosts.measure_together([GpuPlace(0, "cpu"), GpuPlace(1, "cpu")])
    assert together is not None
    assert sorted(gpu for link in together.links for gpu in link.gpus) == [0, 1]
    assert all(rate > 0 for rates in together.rates for rate in rates.values())
    assert hosts.measure_together([GpuPlace(0, "cpu")]) is None


@pytest.fixture
def benches() -> Iterator[list[TransferBench]]:
    """Two host stores on the CPU, each in the place of one GPU's."""
    with ExitStack() as opened:
        yield [opened.enter_context(host_bench(GpuPlace(i, "cpu"), 8 * MIB)) for i in range(2)]


def test_rates_at_once_are_measured(benches: list[TransferBench]) -> None:
    """Real transfers from two threads: every kind, for each store."""
    rates = rates_at_once(benches, 2 * MIB, 8)
    assert len(rates) == 2
    for of_store in rates:
        assert set(of_store) == set(KINDS)
        assert all(1e7 < rate < 1e12 for rate in of_store.values())


def test_an_error_in_one_thread_reaches_the_caller(benches: list[TransferBench]) -> None:
    """The other thread ends too."""
    benches[1].store.close()
    with pytest.raises(OSError, match="the store is closed"):
        rates_at_once(benches, 2 * MIB, 8)
