"""What a disk does right now, asked again and again while a training on it pauses.

Disks that others use too, virtual ones among them, were a fifth faster or slower within a minute:
one measurement before a run says little of a step in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import harmonic_mean
from types import TracebackType

import torch

from teraio.contracts.hardware import Hardware, Ssd
from teraio.executor.probing.links import rates_at_once
from teraio.executor.probing.transfers import TransferBench
from teraio.executor.stores import FileStore

_QUIET_SECONDS = 0.5


class DiskWatch:
    """A file of its own beside those of the run; ``half_bytes`` of it are for each direction.

    Transfers of the device's ``preferred_io_bytes`` between it and main memory, ``num_transfers``
    for each of reading, writing and both at once.
    """

    def __init__(
        self, ssd: Ssd, directory: Path, *, half_bytes: int = 2**30, num_transfers: int = 120
    ) -> None:
        self._nbytes, self._num_transfers = ssd.preferred_io_bytes, num_transfers
        ssd = replace(ssd, capacity_bytes=2 * half_bytes)
        with ExitStack() as undo:
            self._store = FileStore.of_ssd(ssd, directory, 2 * half_bytes)
            undo.callback(self._store.close)
            self._bench = TransferBench(
                self._store, "cpu", store_bytes=half_bytes, buffer_bytes=4 * self._nbytes
            )
            undo.pop_all()

    def __enter__(self) -> DiskWatch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._store.close()

    def rates(self, moved: Callable[[], object]) -> dict[str, float]:
        """Bytes per second now: read, write, duplex_read, duplex_write.

        First waits for what has been issued to the disk: until ``moved`` says the same twice.
        """
        before, now = None, moved()
        while before != now:
            time.sleep(_QUIET_SECONDS)
            before, now = now, moved()
        # What runs under a plan does not see this.
        with torch._C._DisableTorchDispatch():
            [rates] = rates_at_once([self._bench], self._nbytes, self._num_transfers)
        for kind in ("read", "write"):
            rates[f"duplex_{kind}"] = min(rates[f"duplex_{kind}"], rates[kind])
        return rates


def with_disk(hardware: Hardware, found: Sequence[dict[str, float]]) -> Hardware:
    """The hardware whose only SSD is as fast as it was on average; latencies are in the rates."""
    [ssd] = hardware.ssd
    mean = {kind: harmonic_mean([rates[kind] for rates in found]) for kind in found[0]}
    ssd = replace(
        ssd,
        latency_seconds=0.0,
        read_rate=mean["read"],
        write_rate=mean["write"],
        duplex_read_rate=mean["duplex_read"],
        duplex_write_rate=mean["duplex_write"],
    )
    return replace(hardware, ssd=(ssd,))
