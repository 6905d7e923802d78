"""Sustained writes, on a drive whose cache fills up and whose fresh blocks are slow."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest

from teraio.executor.probing.sustained import SustainedWrites, sustain_writes
from teraio.executor.stores import Transfer

MB = 10**6


@dataclass
class Drive:
    """10 MB at a time, one after the other: written at 1 GB/s while the cache has room, at 200 MB/s
    from then on and never above ``fresh_rate`` where nothing was written before; read at 500 MB/s.
    """

    cache_bytes: float = 5000 * MB
    fresh_rate: float = 1e9
    now: float = 100.0
    issued: list[tuple[bool, int]] = field(default_factory=list)
    written: set[int] = field(default_factory=set)
    waited: int = 0

    def issue(self, is_write: bool, place: int) -> Transfer:
        """A transfer whose times are known at once."""
        assert is_write or place in self.written, "what was never written says nothing of a disk"
        start = self.now
        self.now += 10 * MB / self._rate(is_write, place)
        self.issued.append((is_write, place))
        if is_write:
            self.written.add(place)

        def wait() -> None:
            self.waited += 1

        transfer = SimpleNamespace(
            start_seconds=start, end_seconds=self.now, nbytes=10 * MB, wait=wait
        )
        return cast(Transfer, transfer)

    def _rate(self, is_write: bool, place: int) -> float:
        if not is_write:
            return 500e6
        written_bytes = 10 * MB * sum(is_write for is_write, _ in self.issued)
        rate = 1e9 if written_bytes < self.cache_bytes else 200e6
        return rate if place in self.written else min(rate, self.fresh_rate)


def sustained(drive: Drive, num_places: int = 300, seconds: float = 30.0) -> SustainedWrites:
    """What is found on the drive."""
    return sustain_writes("ssd0", drive.issue, num_places, seconds, lambda message: None)


def test_the_rate_is_that_past_the_cache() -> None:
    """5 s at 1 GB/s, then a fifth of it."""
    drive, said = Drive(), list[str]()
    writes = sustain_writes("ssd0", drive.issue, 300, 30.0, said.append)
    assert writes.rate == pytest.approx(200e6, rel=0.01)
    assert drive.waited == len(drive.issued), "nothing is under way when it returns"
    assert drive.now - 100.0 == pytest.approx(30.0, abs=3.0)
    assert 20 <= len(said) <= 33
    assert said[0].startswith("sustained writes to ssd0: 1 of 30 s, 1.00 GB/s")
    assert said[-1].endswith(", 200 MB/s"), "the rate of the last second, not since the beginning"


def test_the_rate_is_that_of_blocks_written_before() -> None:
    """A plan writes the same slots in each iteration: a file system's first touch is no rate."""
    writes = sustained(Drive(cache_bytes=math.inf, fresh_rate=300e6))
    assert writes.rate == pytest.approx(1e9)


@pytest.mark.parametrize("num_places", [300, 10**6])
def test_bursts_are_read_back_and_only_written_blocks_are(num_places: int) -> None:
    """First writes alone for two thirds of the time; also where the file is never full."""
    drive = Drive(cache_bytes=math.inf, fresh_rate=300e6)
    writes = sustained(drive, num_places)
    filling = drive.issued[: writes.steady_from]
    assert all(is_write for is_write, _ in filling)
    written = {place for _, place in filling}
    assert written == set(range(min(num_places, writes.steady_from)))
    bursts = drive.issued[writes.steady_from :]
    assert {place for _, place in bursts} <= written
    assert [place for is_write, place in bursts if is_write] == [
        place for is_write, place in bursts if not is_write
    ]
    assert bursts[:33] == [(True, place) for _, place in bursts[:32]] + [(False, bursts[0][1])]
    assert writes.rate == pytest.approx(1e9)
    assert writes.read_rate == pytest.approx(500e6)


def test_the_clock_of_writing_stands_still_while_is_read() -> None:
    """20 s of writing at 1 GB/s, then of 10 s one third: what was written adds up."""
    writes = sustained(Drive(cache_bytes=math.inf))
    assert writes.end_seconds[-1] == pytest.approx(20 + 10 / 3, abs=0.6)
    assert writes.total_bytes[-1] == pytest.approx(1e9 * writes.end_seconds[-1])


def test_the_rate_over_time_shows_the_fall() -> None:
    """Sixty equal parts; what was written adds up."""
    writes = sustained(Drive())
    points = writes.over_time(60)
    assert len(points) == 60
    assert points[0][0] == pytest.approx(writes.end_seconds[-1] / 120, abs=0.01)
    assert points[0][1] == pytest.approx(1e9, rel=0.02)
    assert points[-1][1] == pytest.approx(200e6, rel=0.02)
    width = writes.end_seconds[-1] / 60
    assert sum(rate for _, rate in points) * width == pytest.approx(writes.total_bytes[-1])


def test_one_long_transfer_is_enough() -> None:
    """A drive so slow that the time is over with its first transfer."""
    writes = sustained(Drive(cache_bytes=0), seconds=0.01)
    assert writes.rate == pytest.approx(200e6)
    assert writes.read_rate == pytest.approx(500e6)
    assert len(writes.over_time()) >= 1
