"""Writes that go on until the drive's cache is full: the rate that training will see for hours."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from teraio.executor.stores import Transfer
from teraio.units import format_rate

_IN_FLIGHT = 4
_STEADY_SHARE = 1 / 3
"""The rate is that of the last third: what a drive has come to after a minute, it keeps."""

_REPORT_SECONDS = 1.0


@dataclass(frozen=True)
class SustainedWrites:
    """Ends of transfers (s after the first began) and bytes written by then, both (transfers,)."""

    device: str
    end_seconds: tuple[float, ...]
    total_bytes: tuple[int, ...]

    @property
    def rate(self) -> float:
        """Bytes per second over the last third of the time."""
        begin = (1 - _STEADY_SHARE) * self.end_seconds[-1]
        before = max((i for i, s in enumerate(self.end_seconds) if s <= begin), default=-1)
        bytes_before = self.total_bytes[before] if before >= 0 else 0
        seconds_before = self.end_seconds[before] if before >= 0 else 0.0
        return (self.total_bytes[-1] - bytes_before) / (self.end_seconds[-1] - seconds_before)

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
    device: str,
    write: Callable[[int], Transfer],
    seconds: float,
    say: Callable[[str], None],
) -> SustainedWrites:
    """Write for ``seconds``; ``write(i)`` starts transfer i, whose place wraps round.

    A few transfers are always under way. ``say`` hears of the progress once a second.
    """
    under_way: deque[Transfer] = deque()
    ends: list[float] = []
    totals: list[int] = []
    begin, index, said = 0.0, 0, 0.0
    while not ends or ends[-1] < seconds:
        while len(under_way) < _IN_FLIGHT:
            under_way.append(write(index))
            index += 1
        transfer = under_way.popleft()
        transfer.wait()
        begin = begin if ends else transfer.start_seconds
        ends.append(transfer.end_seconds - begin)
        totals.append((totals[-1] if totals else 0) + transfer.nbytes)
        if ends[-1] >= said + _REPORT_SECONDS:
            said = ends[-1]
            rate = format_rate(totals[-1] / said)
            say(f"sustained writes to {device}: {said:.0f} of {seconds:.0f} s, {rate}")
    for transfer in under_way:
        transfer.wait()
    return SustainedWrites(device, tuple(ends), tuple(totals))


def _interpolated(at: float, ends: Sequence[float], totals: Sequence[int]) -> float:
    import numpy as np

    return float(np.interp(at, (0.0, *ends), (0, *totals)))
