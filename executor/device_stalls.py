"""Why a GPU's kernels had to wait: the pauses between them, and the transfers that explain those.

On a GPU the host's waits take no time: the compute stream waits. What it waited is the time between
two kernels, and what for follows from the ends of the transfers that the host had put before the
second one (DESIGN: Timeline).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from teraio.executor.holding import Wait

_SHORTEST_SECONDS = 10e-6
"""A pause below this is the launch of the next kernel."""


def stalls_between(
    start_seconds: float,
    kernels: Sequence[tuple[int, float, float]],
    waits: Iterable[Wait],
    gap_seconds: Sequence[float] | None = None,
) -> list[Wait]:
    """Pauses before kernels as far as transfers explain them: for memory first, then for reads.

    ``kernels`` (index, start, end) in order, from ``start_seconds`` of the iteration, on the clock
    of the transfers; ``waits`` by the host; ``gap_seconds`` by kernel: what is a gap anyway.
    """
    ends: dict[tuple[int, str], tuple[float, int]] = {}
    for wait in waits:
        end = math.nan if wait.transfer is None else wait.transfer.end_seconds
        key = wait.kernel, wait.cause
        if end > ends.get(key, (-math.inf, -1))[0]:
            ends[key] = end, wait.row
    stalls: list[Wait] = []
    previous_end = start_seconds
    for kernel, begun, ended in kernels:
        at = previous_end + (gap_seconds[kernel] if gap_seconds is not None else 0.0)
        for cause in ("memory", "read"):
            end, row = ends.get((kernel, cause), (at, -1))
            until = min(end, begun)
            if until - at > _SHORTEST_SECONDS:
                stalls.append(Wait(kernel, row, cause, at, until))
                at = until
        previous_end = ended
    return stalls
