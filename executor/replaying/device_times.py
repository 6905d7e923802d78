"""A GPU's iterations on the host's clock: kernels, and why each had to wait."""

from __future__ import annotations

from collections.abc import Sequence

from teraio.executor.device_stalls import stalls_between
from teraio.executor.iteration_log import IterationLog, IterationRecord
from teraio.executor.replaying.device_kernels import PlayedKernel


def settle_device_times(
    log: IterationLog,
    record: IterationRecord,
    played: Sequence[PlayedKernel],
    gap_seconds: Sequence[float],
) -> None:
    """Give a record of the log the times of its iteration, once that is over.

    A pause is a stall only beyond the trace's gap there, which is played as well.
    """
    record.kernel_events = [(one.kernel, one.start, one.end) for one in played]
    resolved = log.resolved(record)
    record.start_seconds, record.end_seconds = resolved.start_seconds, resolved.end_seconds
    record.kernels, record.kernel_events = resolved.kernels, []
    record.traffic.waits = stalls_between(
        record.start_seconds, record.kernels, record.traffic.waits, gap_seconds
    )
