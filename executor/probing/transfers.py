"""Times of transfers through a store, by size: in a row, one direction alone and both at once.

Note: what is timed
  The executor issues transfers one after the other from the training thread, and the store serves
  them while kernels run. The time between two ends in a full queue is the channel's; how long the
  thread needs to issue is not. So all transfers of a round are issued before the first is served:
  on a GPU they wait for kernels that run meanwhile, and kernels go on beside them; elsewhere what
  was served during the issue does not count.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from teraio.executor.probing.effort import MIB, Effort
from teraio.executor.probing.fitting import Timing
from teraio.executor.stores import Store, Transfer
from teraio.executor.stores.base import round_up

BLOCK_BYTES = 4096
_FEWEST, _MOST = 4, 128
_LEAST_SHARE = 0.25
_MAX_GATE_SECONDS = 1.0
_MOST_KERNEL_SECONDS = 1.0
"""A path whose copies wait for the kernels would else need ever more of them."""

_RANDOM_BYTES = 32 * MIB


class Background(Protocol):
    """Kernels that run beside transfers."""

    def enqueue(self, seconds: float) -> None:
        """Put kernels of about so many seconds into the current stream, and return."""
        ...

    def finish(self) -> None:
        """Wait for them."""
        ...


@dataclass(frozen=True)
class _Load:
    """A round's transfers: so many in each direction, which take about ``seconds``."""

    nbytes: int
    directions: Sequence[bool]
    counts: Sequence[int]
    seconds: float

    @property
    def kinds(self) -> list[str]:
        prefix = "duplex_" if len(self.directions) > 1 else ""
        return [prefix + ("write" if is_write else "read") for is_write in self.directions]


class TransferBench:
    """One store, with ``store_bytes`` of it and ``buffer_bytes`` on the device per direction.

    ``device`` is where the buffers lie; ``background`` makes kernels run beside the transfers of a
    GPU; with ``waits_in_stream`` transfers begin only after the kernels that were there before. The
    store's lower half is read, its upper half written; with ``writes_only`` all of it is
    ``store_bytes`` to be written, and nothing is written before.
    """

    def __init__(
        self,
        store: Store,
        device: str,
        *,
        store_bytes: int,
        buffer_bytes: int,
        background: Background | None = None,
        waits_in_stream: bool = False,
        writes_only: bool = False,
    ) -> None:
        self.store = store
        self.device = device
        self._store_bytes = store_bytes
        self._background = background
        self._gate_seconds = 0.02 if waits_in_stream else 0.0
        # Random: drives that compress or deduplicate have nothing to gain.
        self._buffers = {
            is_write: _random_bytes(buffer_bytes, device) for is_write in (False, True)
        }
        self._first_written = 0 if writes_only else store_bytes
        if not writes_only:
            self._write_everything()

    def issue(self, is_write: bool, nbytes: int, index: int) -> Transfer:
        """Start transfer ``index`` of a row: slots and buffers are used in turn."""
        stride = round_up(nbytes, BLOCK_BYTES)
        buffers = self._buffers[is_write]
        begin = index % (len(buffers) // stride) * stride
        offset = index % (self._store_bytes // stride) * stride + is_write * self._first_written
        start = self.store.write if is_write else self.store.read
        return start(buffers[begin : begin + nbytes], offset, nbytes)

    def timings(self, effort: Effort, sizes: Sequence[int]) -> list[Timing]:
        """All kinds at all sizes; medians of several rounds.

        Each round goes through all of them, so that a machine that changes its pace for a while
        changes it for all alike.
        """
        loads = [
            self._adjusted(nbytes, directions, effort.round_seconds)
            for nbytes in sizes
            for directions in ((False,), (True,), (False, True))
        ]
        rounds: list[list[list[float]]] = [[] for _ in loads]
        for _ in range(effort.rounds):
            for load, of_load in zip(loads, rounds, strict=True):
                of_load.append(self._round(load))
        return [
            Timing(kind, load.nbytes, statistics.median(seconds))
            for load, of_load in zip(loads, rounds, strict=True)
            for kind, seconds in zip(load.kinds, zip(*of_load, strict=True), strict=True)
        ]

    def issue_rows(
        self, nbytes: int, directions: Sequence[bool], counts: Sequence[int]
    ) -> list[list[Transfer]]:
        """Start so many transfers in each direction, in turn; one list per direction."""
        issued: list[list[Transfer]] = [[] for _ in directions]
        for index in range(max(counts)):
            for row, is_write, count in zip(issued, directions, counts, strict=True):
                if index < count:
                    row.append(self.issue(is_write, nbytes, index))
        return issued

    def _adjusted(self, nbytes: int, directions: Sequence[bool], round_seconds: float) -> _Load:
        """Rows that take about ``round_seconds``."""
        load = _Load(nbytes, directions, [_FEWEST] * len(directions), 0.0)
        # The first round also warms up, so what it says of the pace is checked once.
        for _ in range(2):
            counts, row_seconds = _counts(self._round(load), round_seconds)
            load = _Load(nbytes, directions, counts, row_seconds)
        return load

    def _round(self, load: _Load) -> list[float]:
        """Seconds per transfer, of each direction."""
        while True:
            self._run_kernels(self._gate_seconds)
            issued = self.issue_rows(load.nbytes, load.directions, load.counts)
            issued_at = time.perf_counter()
            self._run_kernels(min(1.5 * load.seconds, _MOST_KERNEL_SECONDS))
            seconds = seconds_per_transfer(issued, issued_at)
            if self._background is not None:
                self._background.finish()
            is_clean = min(row[0].start_seconds for row in issued) >= issued_at
            if is_clean or not 0 < self._gate_seconds < _MAX_GATE_SECONDS:
                return seconds
            self._gate_seconds *= 2

    def _run_kernels(self, seconds: float) -> None:
        if self._background is not None and seconds > 0:
            self._background.enqueue(seconds)

    def _write_everything(self) -> None:
        # Slots of training are written again and again: first touch is not what is measured.
        buffer = self._buffers[True]
        for begin in range(0, 2 * self._store_bytes, len(buffer)):
            nbytes = min(len(buffer), 2 * self._store_bytes - begin)
            self.store.write(buffer, begin, nbytes).wait()


def _random_bytes(nbytes: int, device: str) -> torch.Tensor:
    """Random bytes, uint8 (nbytes,), the same again after each ``_RANDOM_BYTES``."""
    # A generator of its own: a training that follows draws the numbers that it would have drawn.
    generator = torch.Generator(device).manual_seed(0)
    size = (min(nbytes, _RANDOM_BYTES),)
    some = torch.randint(256, size, generator=generator, dtype=torch.uint8, device=device)
    return some.repeat(-(-nbytes // len(some)))[:nbytes].contiguous()


def _counts(seconds: Sequence[float], round_seconds: float) -> tuple[list[int], float]:
    """How many transfers make rows that last equally long, by the seconds of one; and how long."""
    row_seconds = max(_FEWEST * max(seconds), min(round_seconds, _MOST * min(seconds)))
    return [min(math.ceil(row_seconds / each), _MOST) for each in seconds], row_seconds


def seconds_per_transfer(
    issued: Sequence[Sequence[Transfer]], issued_at: float = -math.inf
) -> list[float]:
    """Waits for rows of equal transfers, and divides the time in which all rows were served.

    What began before ``issued_at`` counts only where half of a row did.
    """
    for row in issued:
        for transfer in row:
            transfer.wait()
    begin, end = common_window(issued)
    late = min(row[len(row) // 2].start_seconds for row in issued)
    if begin < issued_at < late:
        begin = issued_at
    return [_seconds_each(row, begin, end) for row in issued]


def _seconds_each(row: Sequence[Transfer], begin: float, end: float) -> float:
    count = transfers_within(row, begin, end)
    if count < _LEAST_SHARE * len(row):
        # The rows hardly met: the whole of this one says more.
        begin, end, count = row[0].start_seconds, row[-1].end_seconds, len(row)
    return max(end - begin, 1e-9) / count


def common_window(issued: Sequence[Sequence[Transfer]]) -> tuple[float, float]:
    """From when all rows had begun until the first had ended; empty if they never met."""
    begin = max(row[0].start_seconds for row in issued)
    end = min(row[-1].end_seconds for row in issued)
    return begin, max(end, begin)


def transfers_within(row: Sequence[Transfer], begin: float, end: float) -> float:
    """How many transfers a window holds; one across its border counts in proportion."""
    count = 0.0
    for transfer in row:
        inside = min(end, transfer.end_seconds) - max(begin, transfer.start_seconds)
        if inside > 0:
            count += inside / (transfer.end_seconds - transfer.start_seconds)
    return count
