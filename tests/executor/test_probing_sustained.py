"""Sustained writes, on a drive whose cache fills up."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest

from teraio.executor.probing.sustained import sustain_writes
from teraio.executor.stores import Transfer

MB = 10**6


@dataclass
class CachingDrive:
    """Writes 10 MB at a time: 1 GB/s until 5 GB are written, 200 MB/s from then on."""

    now: float = 100.0
    written: int = 0
    issued: list[int] = field(default_factory=list)
    waited: int = 0

    def write(self, index: int) -> Transfer:
        """A transfer whose times are known at once."""
        self.issued.append(index)
        start = self.now
        self.now += 10 * MB / (1e9 if self.written < 5000 * MB else 200e6)
        self.written += 10 * MB

        def wait() -> None:
            self.waited += 1

        transfer = SimpleNamespace(
            start_seconds=start, end_seconds=self.now, nbytes=10 * MB, wait=wait
        )
        return cast(Transfer, transfer)


def test_the_rate_is_that_past_the_cache() -> None:
    """5 s at 1 GB/s, then 25 s at a fifth of it: the last third counts."""
    drive, said = CachingDrive(), list[str]()
    writes = sustain_writes("ssd0", drive.write, 30.0, said.append)
    assert writes.rate == pytest.approx(200e6, rel=0.01)
    assert writes.end_seconds[-1] == pytest.approx(30.0, abs=0.1)
    assert writes.total_bytes[-1] == pytest.approx(5000 * MB + 25 * 200 * MB, rel=0.01)
    assert drive.issued == list(range(len(drive.issued)))
    assert drive.waited >= len(drive.issued), "nothing is under way when it returns"
    assert 25 <= len(said) <= 31
    assert said[0].startswith("sustained writes to ssd0: 1 of 30 s, 1.00 GB/s")


def test_the_rate_over_time_shows_the_fall() -> None:
    """Sixty parts of half a second; what was written adds up."""
    writes = sustain_writes("ssd0", CachingDrive().write, 30.0, lambda message: None)
    points = writes.over_time(60)
    assert len(points) == 60
    assert points[0][0] == pytest.approx(0.25, abs=0.01)
    assert points[0][1] == pytest.approx(1e9, rel=0.02)
    assert points[-1][1] == pytest.approx(200e6, rel=0.02)
    width = writes.end_seconds[-1] / 60
    assert sum(rate for _, rate in points) * width == pytest.approx(writes.total_bytes[-1])


def test_one_long_transfer_is_enough() -> None:
    """A drive so slow that the time is over with its first transfer."""
    writes = sustain_writes("ssd0", CachingDrive(written=5000 * MB).write, 0.01, lambda _: None)
    assert writes.rate == pytest.approx(200e6)
    assert len(writes.over_time()) == 1
