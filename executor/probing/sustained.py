"""Writes that go on until the drive's cache is full: the rates that training will see for hours.

Note: written as training writes
  A plan writes a burst to the slots of its file, reads them back, and writes them again in the next
  iteration. So what counts is measured that way: once the cache has been filled by writing without
  a pause, bursts go to blocks that have been written before, and each is read back before the next.
  Writing as long to ever fresh blocks says how fast the file system takes blocks into use, which on
  the virtual disks tried is a third to two thirds of the rate at which they are written again.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from teraio.executor.stores import Transfer
from teraio.units import format_rate

_IN_FLIGHT = 4
_FILLING_SHARE = 2 / 3
"""Of the time, to fill the cache: what a drive has come to by then, it keeps."""

_BURST_TRANSFERS = 32
_REPORT_SECONDS = 1.0

Issue = Callable[[bool, int], Transfer]
"""Starts a write (true) or a read of a place, and returns it."""


@dataclass(frozen=True)
class SustainedWrites:
    """Ends of transfers (s after the first began) and bytes written by then, both (transfers,).

    The clock stands still while nothing is written. Transfers from ``steady_from`` on are those
    whose rate lasts; between them ``read_bytes`` were read back, in ``read_seconds``.
    """

    device: str
    end_seconds: tuple[float, ...]
    total_bytes: tuple[int, ...]
    steady_from: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0

    @property
    def transfer_bytes(self) -> int:
        """Of each transfer."""
        return self.total_bytes[0]

    @property
    def rate(self) -> float:
        """Bytes per second, of the transfers whose rate lasts."""
        bytes_before, seconds_before = 0, 0.0
        if self.steady_from > 0:
            bytes_before = self.total_bytes[self.steady_from - 1]
            seconds_before = self.end_seconds[self.steady_from - 1]
        return (self.total_bytes[-1] - bytes_before) / (self.end_seconds[-1] - seconds_before)

    @property
    def read_rate(self) -> float | None:
        """Bytes per second of reading back what had been written; None if nothing was."""
        return self.read_bytes / self.read_seconds if self.read_bytes else None

    def over_time(self, bins: int = 60) -> list[tuple[float, float]]:
        """Middle of each part of the time (s) and the mean rate in it (bytes/s).

        A transfer counts evenly over the time since the end of the one before.
        """
        total_seconds = self.end_seconds[-1]
        width = total_seconds / max(1, min(bins, len(self.end_seconds)))
        edges = [width * i for i in range(round(total_seconds / width) + 1)]
        written = [_interpolated(edge, self.end_seconds, self.total_bytes) for edge in edges]
        return [
            ((edges[i] + edges[i + 1]) / 2, (written[i + 1] - written[i]) / width)
            for i in range(len(edges) - 1)
        ]


def sustain_writes(
    device: str, issue: Issue, num_places: int, seconds: float, say: Callable[[str], None]
) -> SustainedWrites:
    """Write and read back for ``seconds`` in all, round and round in ``num_places`` places.

    A few transfers are always under way. ``say`` hears of the progress once a second.
    """
    run = _Run(device, issue, seconds, say)
    run.write(index % num_places for index in run.indices_for(_FILLING_SHARE * seconds))
    steady_from = len(run.end_seconds)
    # On a slow disk not all places have been written yet, and only those count that have.
    places = itertools.cycle(range(min(steady_from, num_places)))
    while run.elapsed_seconds < seconds or len(run.end_seconds) == steady_from:
        burst = list(itertools.islice(places, min(_BURST_TRANSFERS, steady_from)))
        run.write(burst)
        run.read(burst)
    return SustainedWrites(
        device,
        tuple(run.end_seconds),
        tuple(run.total_bytes),
        steady_from,
        run.read_bytes,
        run.read_seconds,
    )


class _Run:
    """Transfers so far: what :class:`SustainedWrites` has, and ``elapsed_seconds`` of any kind."""

    def __init__(
        self, device: str, issue: Issue, seconds: float, say: Callable[[str], None]
    ) -> None:
        self.end_seconds: list[float] = []
        self.total_bytes: list[int] = []
        self.read_bytes = 0
        self.read_seconds = 0.0
        self.elapsed_seconds = 0.0
        self._device, self._issue, self._seconds, self._say = device, issue, seconds, say
        self._begin: float | None = None
        self._told = (0.0, 0.0, 0)

    def indices_for(self, seconds: float) -> Iterator[int]:
        """0, 1, ... until so much time has elapsed since the first transfer began."""
        return itertools.takewhile(lambda _: self.elapsed_seconds < seconds, itertools.count())

    def write(self, places: Iterable[int]) -> None:
        """Write them in a row, on the clock."""
        before_seconds = self.end_seconds[-1] if self.end_seconds else 0.0
        begin: float | None = None
        for transfer in self._row(True, places):
            begin = transfer.start_seconds if begin is None else begin
            self.end_seconds.append(before_seconds + transfer.end_seconds - begin)
            self.total_bytes.append(
                transfer.nbytes + (self.total_bytes[-1] if self.total_bytes else 0)
            )
            self._tell()

    def read(self, places: Iterable[int]) -> None:
        """Read them in a row, while the clock of writing stands still."""
        row = list(self._row(False, places))
        self.read_bytes += sum(transfer.nbytes for transfer in row)
        self.read_seconds += row[-1].end_seconds - row[0].start_seconds

    def _row(self, is_write: bool, places: Iterable[int]) -> Iterator[Transfer]:
        """Transfers of these places, each when it has ended."""
        remaining = iter(places)
        under_way: deque[Transfer] = deque()
        while True:
            for place in itertools.islice(remaining, _IN_FLIGHT - len(under_way)):
                under_way.append(self._issue(is_write, place))
            if not under_way:
                return
            transfer = under_way.popleft()
            transfer.wait()
            self._begin = transfer.start_seconds if self._begin is None else self._begin
            self.elapsed_seconds = transfer.end_seconds - self._begin
            yield transfer

    def _tell(self) -> None:
        """The rate since it was last told, which shows a fall when it comes."""
        elapsed, written_until, written_bytes = self._told
        if self.elapsed_seconds < elapsed + _REPORT_SECONDS:
            return
        self._told = self.elapsed_seconds, self.end_seconds[-1], self.total_bytes[-1]
        rate = (self.total_bytes[-1] - written_bytes) / (self.end_seconds[-1] - written_until)
        self._say(
            f"sustained writes to {self._device}: {self.elapsed_seconds:.0f} of "
            f"{self._seconds:.0f} s, {format_rate(rate)}"
        )


def _interpolated(at: float, ends: Sequence[float], totals: Sequence[int]) -> float:
    import numpy as np

    return float(np.interp(at, (0.0, *ends), (0, *totals)))
