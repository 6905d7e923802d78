"""A GPU's iteration on the clock of ``time.perf_counter``: kernels, and why each had to wait.

On a GPU the host's waits take no time: the compute stream waits. What it waited is the time between
two kernels beyond the trace's gap, and what for follows from the ends of the transfers that the
host had put before the kernel (DESIGN: Timeline).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from teraio.executor.holding import TransferRecord, Wait
from teraio.executor.iteration_log import IterationRecord
from teraio.executor.replaying.device_kernels import PlayedKernel
from teraio.executor.stores.streams import CudaClock

_SHORTEST_SECONDS = 10e-6
"""A pause below this is the launch of the next kernel."""


def settle_device_times(
    record: IterationRecord,
    earlier: Sequence[TransferRecord],
    played: Sequence[PlayedKernel],
    gap_seconds: Sequence[float],
    clock: CudaClock,
) -> None:
    """Give an iteration that has ended its times; ``earlier``: transfers of the one before it."""
    if record.start_event is None or record.end_event is None:
        return
    record.end_event.synchronize()
    record.start_seconds = clock.seconds(record.start_event)
    record.end_seconds = clock.seconds(record.end_event)
    record.kernels = [
        (one.kernel, clock.seconds(one.start), clock.seconds(one.end)) for one in played
    ]
    transfers = [*earlier, *record.traffic.transfers]
    waits = record.traffic.waits
    record.traffic.waits = stalls_between(
        record.start_seconds, record.kernels, gap_seconds, awaited(waits, transfers, len(earlier))
    )


def awaited(
    waits: Iterable[Wait], transfers: Sequence[TransferRecord], num_earlier: int
) -> dict[int, list[tuple[Wait, float]]]:
    """By kernel, the waits before it and when the transfer of each ended, seconds.

    ``transfers`` in the order of issue; the first ``num_earlier`` are of the iteration before.
    """
    ends: dict[tuple[int, bool], list[tuple[int, float]]] = {}
    for index, one in enumerate(transfers):
        issued_before = -1 if index < num_earlier else one.kernel
        of_row = ends.setdefault((one.row, one.transfer.is_write), [])
        of_row.append((issued_before, one.transfer.end_seconds))
    found: dict[int, list[tuple[Wait, float]]] = {}
    for wait in waits:
        candidates = ends.get((wait.row, wait.cause == "memory"), [])
        issued = [end for kernel, end in candidates if kernel <= wait.kernel]
        if issued:
            found.setdefault(wait.kernel, []).append((wait, issued[-1]))
    return found


def stalls_between(
    start_seconds: float,
    kernels: Sequence[tuple[int, float, float]],
    gap_seconds: Sequence[float],
    awaited_before: dict[int, list[tuple[Wait, float]]],
) -> list[Wait]:
    """The pauses before kernels that transfers explain: for memory first, then for reads."""
    stalls: list[Wait] = []
    previous_end = start_seconds
    for kernel, begun, ended in kernels:
        at = previous_end + gap_seconds[kernel]
        for cause in ("memory", "read"):
            ends = [(end, w.row) for w, end in awaited_before.get(kernel, ()) if w.cause == cause]
            end, row = max(ends, default=(at, -1))
            until = min(end, begun)
            if until - at > _SHORTEST_SECONDS:
                stalls.append(Wait(kernel, row, cause, at, until))
                at = until
        previous_end = ended
    return stalls
