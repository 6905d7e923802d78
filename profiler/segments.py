"""Segments: what ran between two cuts, as the recorder saw it, before anyone asks what it means.

A cut follows every ``Optimizer.step``. Several segments may make one iteration; :mod:`steady` finds
out how many.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from teraio.contracts.table import FloatArray, IntArray
from teraio.profiler.clocks import SegmentTimes
from teraio.profiler.storages import StorageState

ALIVE = -1
"""``death_segment`` of a storage that has not died."""


class StorageRecord:
    """What is known of one generation of one storage; outlives the storage itself.

    ``death_kernel`` is the kernel of ``death_segment`` after which the memory was freed; -1 means
    before its kernel 0, that is after the last kernel of the segment before.
    """

    __slots__ = (
        "birth_kernel",
        "birth_ordinal",
        "birth_phase",
        "birth_segment",
        "death_kernel",
        "death_segment",
        "dtype",
        "is_foreign",
        "kind",
        "name",
        "nbytes",
        "reference",
        "resizable",
        "serial",
    )

    def __init__(self, state: StorageState) -> None:
        self.reference: weakref.ref[Any] = state.reference
        self.serial = state.serial
        self.nbytes = state.nbytes
        self.dtype = state.dtype
        self.is_foreign = state.is_foreign
        self.birth_segment = state.birth_iteration
        self.birth_kernel = state.birth_kernel
        self.birth_ordinal = state.birth_ordinal
        self.birth_phase = "other"
        self.death_segment = ALIVE
        self.death_kernel = -1
        self.name = ""
        self.kind = ""
        storage = state.reference()
        self.resizable = storage is None or storage.resizable()

    @property
    def is_alive(self) -> bool:
        """Whether the storage has not died since it was recorded."""
        return self.death_segment == ALIVE


@dataclass(frozen=True, slots=True)
class Collective:
    """Group of a communication kernel; the other side's rank in it if it is a send or a receive."""

    group: str
    is_peer_to_peer: bool
    peer_rank: int | None


@dataclass(frozen=True, slots=True, eq=False)
class SegmentAccesses:
    """All accesses of a segment in order; births of the storages as int64 arrays (accesses,)."""

    kernel: IntArray
    flags: IntArray
    records: list[StorageRecord]
    serial: IntArray
    birth_segment: IntArray
    birth_kernel: IntArray
    birth_ordinal: IntArray


@dataclass(slots=True, eq=False)
class Segment:
    """Kernels between two cuts: lists by kernel, filled while they run; ``calls`` if described."""

    index: int
    operators: list[str] = field(default_factory=list)
    signatures: list[int] = field(default_factory=list)
    touched: list[dict[StorageState, int]] = field(default_factory=list)
    births: list[StorageRecord] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    micro_batches: list[int] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    collectives: dict[int, Collective] = field(default_factory=dict)
    optimizer: int = 0
    watched_seconds: float = 0.0
    times: SegmentTimes | None = None
    accesses: SegmentAccesses | None = None

    def __len__(self) -> int:
        return len(self.operators)

    def close(self, times: SegmentTimes, optimizer: int) -> None:
        """The segment is complete: keep its times, turn its accesses into arrays."""
        self.times = times
        self.optimizer = optimizer
        counts = [len(touched) for touched in self.touched]
        records = [state.attachment for touched in self.touched for state in touched]
        self.accesses = SegmentAccesses(
            kernel=np.repeat(np.arange(len(counts)), counts),
            flags=_array(flags for touched in self.touched for flags in touched.values()),
            records=records,
            serial=_array(record.serial for record in records),
            birth_segment=_array(record.birth_segment for record in records),
            birth_kernel=_array(record.birth_kernel for record in records),
            birth_ordinal=_array(record.birth_ordinal for record in records),
        )
        self.touched = []

    def durations_and_gaps_seconds(self) -> tuple[FloatArray, FloatArray]:
        """Duration of each kernel and idle time before it, float64 (kernels,) each."""
        assert self.times is not None
        return self.times.durations_and_gaps_seconds(self.operators)


def _array(values: Any) -> IntArray:
    return np.fromiter(values, dtype=np.int64)
