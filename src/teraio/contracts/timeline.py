"""Timeline: what happened when, in a simulated or a measured run (DESIGN: Timeline)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teraio.contracts.bundle import load_bundle, save_bundle
from teraio.contracts.table import Column, FloatArray, IntArray, Table, TextArray
from teraio.units import format_seconds

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


@dataclass(frozen=True, eq=False)
class Events(Table):
    """Kernels, transfers, stalls and memory samples; times from the start of iteration 0."""

    iteration: IntArray
    rank: IntArray
    what: TextArray
    kernel: IntArray
    storage: IntArray
    channel: TextArray
    start_seconds: FloatArray
    end_seconds: FloatArray
    bytes: IntArray
    cause: TextArray

    COLUMNS = (
        Column("iteration", "int", "iteration of the reported cycle, from 0"),
        Column("rank", "int", "process that it happened in"),
        Column("what", "text", "kernel | transfer | stall | memory"),
        Column("kernel", "int", "kernel that ran, waited, or for which bytes moved", nullable=True),
        Column("storage", "int", "storage moved, or waited for", nullable=True),
        Column("channel", "text", "'host read', 'ssd0 write', ...", nullable=True),
        Column("start_seconds", "float", "when it began", "s"),
        Column("end_seconds", "float", "when it ended", "s"),
        Column("bytes", "int", "bytes moved; GPU bytes held (memory)", "bytes"),
        Column(
            "cause",
            "text",
            "stall: read | memory | host; transfer: offload | prefetch | demand_fetch | eviction",
            nullable=True,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class TimelineMetadata:
    """Summary of the reported cycle: means per iteration, in seconds and bytes.

    The account is disjoint: iteration = compute_alone + compute_overlapped + stall_read +
    stall_memory + stall_host + gap.
    """

    source: str
    iteration_seconds: float
    ideal_seconds: float
    cycle_iterations: int
    steady: bool
    compute_alone_seconds: float
    compute_overlapped_seconds: float
    stall_read_seconds: float
    stall_memory_seconds: float
    stall_host_seconds: float
    gap_seconds: float
    peak_gpu_bytes: int
    peak_host_bytes: int = 0
    capacity_bytes: int = 0
    channel_utilisation: Mapping[str, float] = field(default_factory=dict)
    channel_bytes: Mapping[str, int] = field(default_factory=dict)
    demand_fetches: int = 0
    demand_fetch_bytes: int = 0
    evictions: int = 0
    eviction_bytes: int = 0
    cold_start_seconds: float = 0.0
    simulating_seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class Timeline:
    """One steady cycle: its events and its disjoint account."""

    events: Events
    metadata: TimelineMetadata

    def __repr__(self) -> str:
        m = self.metadata
        return (
            f"<Timeline, {m.source}: iteration {format_seconds(m.iteration_seconds)}, "
            f"ideal {format_seconds(m.ideal_seconds)}, {len(self.events)} events>"
        )

    @property
    def iteration_seconds(self) -> float:
        """Mean time of an iteration in the cycle."""
        return self.metadata.iteration_seconds

    @property
    def stall_seconds(self) -> dict[str, float]:
        """Seconds per iteration in which the next kernel waits, by cause."""
        m = self.metadata
        return {
            "read": m.stall_read_seconds,
            "memory": m.stall_memory_seconds,
            "host": m.stall_host_seconds,
        }

    @property
    def account(self) -> dict[str, float]:
        """The disjoint account of an iteration, in seconds; the values sum to the iteration."""
        m = self.metadata
        return {
            "compute_alone": m.compute_alone_seconds,
            "compute_overlapped": m.compute_overlapped_seconds,
            "stall_read": m.stall_read_seconds,
            "stall_memory": m.stall_memory_seconds,
            "stall_host": m.stall_host_seconds,
            "gap": m.gap_seconds,
        }

    @property
    def stalls(self) -> pd.DataFrame:
        """Stalls only: kernel that waited, storage and cause, start, end and length in seconds."""
        frame = self.events.take(self.events.what == "stall").to_pandas()
        frame["seconds"] = frame.end_seconds - frame.start_seconds
        columns = ["iteration", "kernel", "storage", "cause", "start_seconds", "end_seconds"]
        return frame[[*columns, "seconds"]]

    def to_pandas(self) -> pd.DataFrame:
        """All events as a DataFrame."""
        return self.events.to_pandas()

    def save(self, path: str | Path) -> None:
        """Write ``NAME.timeline/``, atomically."""
        save_bundle(Path(path), "timeline", {"events": self.events}, self.metadata)

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        """Read a timeline. Raises InputError."""
        tables, metadata, _ = load_bundle(
            Path(path), "timeline", {"events": Events}, TimelineMetadata
        )
        return cls(events=tables["events"], metadata=metadata)

    def save_perfetto(self, path: str | Path) -> None:
        """Write Chrome trace JSON, which ui.perfetto.dev and chrome://tracing open."""
        from teraio.contracts.perfetto import write_perfetto

        write_perfetto(self, Path(path))

    def plot(self, axes: Axes | None = None) -> Axes:
        """Draw kernels, transfers, stalls and the memory curve; returns the matplotlib axes."""
        from teraio.contracts.plot_timeline import plot_timeline

        return plot_timeline(self, axes)


def channel_name(device: str, *, is_write: bool) -> str:
    """Name of one direction of a device, as it stands in events: ``host read``, ``ssd0 write``."""
    return f"{device} {'write' if is_write else 'read'}"


def summary(timeline: Timeline) -> dict[str, Any]:
    """The keys that ``teraio simulate --json`` promises."""
    m = timeline.metadata
    return {
        "iteration_seconds": m.iteration_seconds,
        "cycle_iterations": m.cycle_iterations,
        "steady": m.steady,
        "ideal_seconds": m.ideal_seconds,
        "stall_seconds": timeline.stall_seconds,
        "compute_overlapped_seconds": m.compute_overlapped_seconds,
        "compute_alone_seconds": m.compute_alone_seconds,
        "gap_seconds": m.gap_seconds,
        "channel_utilisation": dict(m.channel_utilisation),
        "peak_gpu_bytes": m.peak_gpu_bytes,
        "demand_fetches": m.demand_fetches,
        "evictions": m.evictions,
        "simulating_seconds": m.simulating_seconds,
    }
