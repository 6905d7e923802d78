"""A builder of small cases: a trace, a machine and a plan from a few lines, times in seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from teraio.contracts.hardware import Gpu, Hardware, Host, Link, Slowdown, Ssd
from teraio.contracts.plan import (
    Accesses,
    Copies,
    Moves,
    Plan,
    PlanKernels,
    PlanMetadata,
    PlanStorages,
)
from teraio.contracts.timeline import Events, Timeline
from teraio.simulator import simulate
from teraio.traces.trace import Kernels, Storages, Trace, TraceMetadata

PLENTY = 10**15


@dataclass
class Case:
    """Kernels, storages and moves, added one by one; storages are called by their names.

    Every device and link moves 10 bytes/s each way without latency unless said otherwise, the link
    is never a limit, and memory is plenty.
    """

    gpu_bytes: int = PLENTY
    host: dict[str, Any] = field(default_factory=dict)
    ssd: dict[str, Any] = field(default_factory=dict)
    link: dict[str, Any] = field(default_factory=dict)
    slowdown: dict[str, float] = field(default_factory=dict)
    more_ssds: list[dict[str, Any]] = field(default_factory=list)
    arena_bytes: dict[str, int] = field(default_factory=dict)
    _kernels: list[tuple[float, float, int]] = field(default_factory=list)
    _storages: dict[str, tuple[int, int | None, int | None, bool]] = field(default_factory=dict)
    _accesses: list[tuple[int, int, bool, bool]] = field(default_factory=list)
    _moves: list[tuple[Any, ...]] = field(default_factory=list)
    _copies: list[tuple[Any, ...]] = field(default_factory=list)

    def storage(
        self,
        name: str,
        nbytes: int,
        *,
        birth: int | None = None,
        death: int | None = None,
        resizable: bool = True,
    ) -> Case:
        """A storage, persistent unless birth and death are given."""
        self._storages[name] = (nbytes, birth, death, resizable)
        return self

    def kernel(
        self,
        *reads: str,
        writes: Sequence[str] = (),
        seconds: float = 1.0,
        gap: float = 0.0,
        workspace: int = 0,
    ) -> Case:
        """The next kernel: what it reads and writes, one second unless said otherwise."""
        index, names = len(self._kernels), list(self._storages)
        self._kernels.append((seconds, gap, workspace))
        for name in dict.fromkeys((*reads, *writes)):
            row = (index, names.index(name), name in reads, name in writes)
            self._accesses.append(row)
        return self

    def kernels(self, count: int) -> Case:
        """Several kernels of one second that access nothing."""
        for _ in range(count):
            self.kernel()
        return self

    def move(
        self,
        name: str,
        after: int,
        before: int | None,
        *,
        offload: int,
        free: int,
        prefetch: int | None = None,
        device: str = "ssd",
        offset: int = 0,
        writes: bool = True,
    ) -> Case:
        """A move; kernels count within the iteration, as in a plan's file."""
        storage = list(self._storages).index(name)
        tier = "host" if device == "host" else "ssd"
        nbytes = self._storages[name][0]
        self._moves.append(
            (storage, after, before, offload, free, prefetch, tier, device, offset, nbytes, writes)
        )
        return self

    def copy(self, name: str, *, device: str = "ssd", offset: int = 0) -> Case:
        """A clean copy that is there at kernel 0, of a storage that is on the GPU."""
        tier = "host" if device == "host" else "ssd"
        self._copies.append((list(self._storages).index(name), tier, device, offset))
        return self

    @property
    def trace(self) -> Trace:
        """The kernels, storages and accesses so far."""
        rows = []
        for index, (name, (nbytes, birth, death, resizable)) in enumerate(self._storages.items()):
            ordinal = None if birth is None else index
            kind = "parameter" if birth is None else "activation"
            identity = (name, birth, ordinal, death)
            rows.append((index, nbytes, nbytes, kind, *identity, "float32", resizable))
        kernels = [
            (k, f"op{k}", "", "other", None, seconds, gap, workspace, k, 0, "", None, None)
            for k, (seconds, gap, workspace) in enumerate(self._kernels)
        ]
        return Trace(
            kernels=Kernels.from_rows(kernels),
            storages=Storages.from_rows(rows),
            accesses=Accesses.from_rows(self._accesses),
            metadata=TraceMetadata(source="fake"),
        )

    @property
    def hardware(self) -> Hardware:
        """The machine."""
        rates = {"read_rate": 10, "write_rate": 10}
        link: dict[str, Any] = {"name": "pcie", "read_rate": PLENTY, "write_rate": PLENTY}
        ssds = [{"name": "ssd", **self.ssd}, *self.more_ssds]
        defaults = {"capacity_bytes": PLENTY, "alignment_bytes": 1, "gds": True, "bounce_bytes": 0}
        return Hardware(
            name="case",
            gpu=(Gpu(name="gpu", memory_bytes=self.gpu_bytes, link="pcie"),),
            link=(Link(**link | self.link),),
            host=Host(**rates | {"memory_bytes": PLENTY} | self.host),
            ssd=tuple(Ssd(**rates | defaults | ssd) for ssd in ssds),
            slowdown=Slowdown(**self.slowdown),
        )

    @property
    def plan(self) -> Plan:
        """The moves so far, for this case's trace and machine."""
        trace, hardware = self.trace, self.hardware
        kernels, storages = trace.kernels, trace.storages
        missing = np.full(len(storages), -1)
        return Plan(
            moves=Moves.from_rows(self._moves),
            kernels=PlanKernels(
                kernels.kernel,
                kernels.op,
                kernels.signature,
                kernels.phase,
                kernels.module,
                kernels.workspace_bytes,
            ),
            storages=PlanStorages(
                storage=storages.storage,
                name=storages.name,
                kind=storages.kind,
                birth=storages.birth,
                birth_ordinal=storages.birth_ordinal,
                death=storages.death,
                nbytes=storages.nbytes,
                allocated_bytes=storages.allocated_bytes,
                placement=np.full(len(storages), "gpu", dtype=object),
                device=np.full(len(storages), "", dtype=object),
                tier_offset_bytes=missing,
            ),
            accesses=trace.accesses,
            copies=Copies.from_rows(self._copies),
            metadata=PlanMetadata(
                trace_hash=trace.hash,
                hardware=hardware.to_toml(),
                planner="by hand",
                gpu_memory_bytes=self.gpu_bytes,
                host_memory_bytes=hardware.host.memory_bytes,
                ideal_seconds=trace.ideal_seconds,
                predicted_seconds=trace.ideal_seconds,
                lower_bound_seconds=trace.ideal_seconds,
                bound_kind="ideal",
                peak_gpu_bytes=0,
                peak_host_bytes=0,
                planning_seconds=0.0,
                arena_bytes=self.arena_bytes,
            ),
        )

    def edited(self, **columns: Any) -> Plan:
        """The plan with columns of its moves replaced; for plans that are wrong."""
        return replace(self.plan, moves=replace(self.plan.moves, **columns))

    def simulate(self, **options: Any) -> Simulated:
        """The case's timeline; without moves, on demand."""
        plan = self.plan if self._moves else None
        timeline = simulate(self.trace, plan, self.hardware, **options)
        return Simulated(timeline, list(self._storages))


@dataclass
class Simulated:
    """A timeline, read with the case's names."""

    timeline: Timeline
    names: list[str]

    @property
    def seconds(self) -> float:
        """Mean time of an iteration."""
        return self.timeline.iteration_seconds

    @property
    def transfers(self) -> list[tuple[str, str, str, float, float]]:
        """(storage, channel, cause, start, end) of all transfers, by start, then by storage."""
        e = self._events("transfer")
        names = [self.names[storage] for storage in e.storage]
        rows = zip(names, e.channel, e.cause, e.start_seconds, e.end_seconds, strict=True)
        return sorted(rows, key=lambda row: (row[3], self.names.index(row[0])))

    @property
    def stalls(self) -> list[tuple[int, str, str, float, float]]:
        """(kernel, cause, storage waited for, start, end) of all stalls, in order."""
        e = self._events("stall")
        names = [self.names[storage] for storage in e.storage]
        return list(zip(e.kernel, e.cause, names, e.start_seconds, e.end_seconds, strict=True))

    @property
    def kernel_starts(self) -> list[float]:
        """Start of each kernel, in order."""
        starts: list[float] = self._events("kernel").start_seconds.tolist()
        return starts

    @property
    def held_bytes(self) -> list[int]:
        """GPU bytes at the start of each kernel, in order."""
        held: list[int] = self._events("memory").bytes.tolist()
        return held

    def _events(self, what: str) -> Events:
        events = self.timeline.events
        return events.take(events.what == what)

    @property
    def account(self) -> dict[str, float]:
        """Seconds per iteration by what they went to, without those that are zero."""
        return {name: s for name, s in self.timeline.account.items() if s}


@pytest.fixture(scope="session")
def case() -> Callable[..., Case]:
    """The builder."""
    return Case
