"""Trace: kernels, storages and accesses of one steady training iteration (DESIGN: Trace).

An iteration is a cycle of K kernels. Lifetimes are cyclic: a storage whose death comes before its
birth is freed in the next iteration. A storage that outlives its own next birth (``loss = f(x)``
frees the old loss after the new one exists) is two rows: one that lives for a full cycle, and one
without accesses for the overhang.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from teraio.contracts.bundle import content_hash, load_bundle, save_bundle
from teraio.contracts.plan import Accesses
from teraio.contracts.table import BoolArray, Column, FloatArray, IntArray, Table, TextArray
from teraio.errors import InputError
from teraio.traces.checks import check_trace
from teraio.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from teraio.contracts.hardware import Hardware, Ssd

PHASES = ("forward", "backward", "optimizer", "other")
KINDS = (
    "parameter",
    "gradient",
    "optimizer_state",
    "activation",
    "input",
    "buffer",
    "temporary",
)
SOURCES = ("measured", "fake", "imported")
UNTRACKED = "untracked"
"""Name of the buffer that stands for memory of the allocator's that no tensor has: workspaces that
cuBLAS keeps for itself. The last row of a trace, so that dropping it renumbers nothing."""


@dataclass(frozen=True, eq=False)
class Kernels(Table):
    """One dispatched operator call per row, in dispatch order."""

    kernel: IntArray
    op: TextArray
    module: TextArray
    phase: TextArray
    micro_batch: IntArray
    duration_seconds: FloatArray
    gap_before_seconds: FloatArray
    workspace_bytes: IntArray
    signature: IntArray
    stream: IntArray
    group: TextArray
    group_sequence: IntArray
    peer_rank: IntArray
    call: IntArray

    COLUMNS = (
        Column("kernel", "int", "index, 0..K-1"),
        Column("op", "text", "operator with overload, e.g. aten.mm.default"),
        Column("module", "text", "fully qualified module that called it", nullable=True),
        Column("phase", "text", "forward | backward | optimizer | other"),
        Column("micro_batch", "int", "micro-batch, from 0; null outside any", nullable=True),
        Column("duration_seconds", "float", "time it runs", "s"),
        Column("gap_before_seconds", "float", "idle time before it starts", "s"),
        Column("workspace_bytes", "int", "scratch held while it runs, as allocated", "bytes"),
        Column("signature", "int", "hash of operator, shapes and dtypes, 63 bits"),
        Column("stream", "int", "stream it runs on; 0 is the compute stream"),
        Column("group", "text", "process group of a collective", nullable=True),
        Column("group_sequence", "int", "rank-independent number of the collective", nullable=True),
        Column("peer_rank", "int", "other side of a send or recv", nullable=True),
        Column("call", "int", "row of the calls table; null if not recorded", nullable=True),
    )


@dataclass(frozen=True, eq=False)
class Storages(Table):
    """One untyped storage per row: the unit that occupies memory and moves."""

    storage: IntArray
    nbytes: IntArray
    allocated_bytes: IntArray
    kind: TextArray
    name: TextArray
    birth: IntArray
    birth_ordinal: IntArray
    death: IntArray
    dtype: TextArray
    resizable: BoolArray

    COLUMNS = (
        Column("storage", "int", "index, 0..S-1"),
        Column("nbytes", "int", "what PyTorch asked for", "bytes"),
        Column("allocated_bytes", "int", "as the allocator rounds it", "bytes"),
        Column("kind", "text", "parameter | gradient | optimizer_state | activation | ..."),
        Column("name", "text", "fully qualified name; unique if persistent", nullable=True),
        Column("birth", "int", "kernel that creates it; null if persistent", nullable=True),
        Column("birth_ordinal", "int", "rank among the storages born there", nullable=True),
        Column("death", "int", "kernel after which it is freed; null if persistent", nullable=True),
        Column("dtype", "text", "element type of the tensor that created it", nullable=True),
        Column("resizable", "bool", "false: its memory cannot be given back, so it never moves"),
    )


@dataclass(frozen=True, eq=False)
class Calls(Table):
    """The distinct operator calls behind the kernels: all that is needed to make one again.

    Kernels of one call do the same work. A model has few (about a hundred), so that each can be
    timed once. ``arguments`` is JSON; its form is told in :mod:`teraio.profiler.costs.calls`.
    """

    call: IntArray
    op: TextArray
    arguments: TextArray
    flops: IntArray
    read_bytes: IntArray
    written_bytes: IntArray

    COLUMNS = (
        Column("call", "int", "index, 0..C-1"),
        Column("op", "text", "operator with overload"),
        Column("arguments", "text", "JSON of shapes, strides, dtypes and scalars"),
        Column("flops", "int", "floating-point operations of matrix products; else 0"),
        Column("read_bytes", "int", "bytes read, each storage once", "bytes"),
        Column("written_bytes", "int", "bytes written, each storage once", "bytes"),
    )


@dataclass(frozen=True, kw_only=True)
class TraceMetadata:
    """Where a trace comes from. ``optimizer_steps`` counts ``Optimizer.step`` calls per iteration;
    list operators were split into buckets of ``bucket_bytes`` (0: sized automatically).
    ``dispatch_seconds`` is what executing a plan adds to every kernel where kernels run on the
    host's own clock (a CPU that plays the GPU): measured as what watching added.
    ``traced_micro_batches`` is how many were recorded of an unrolled trace (0: all).

    ``precision``: fp32, tf32 or bf16, in which kernels that were not measured were priced.

    ``known_differences`` lists how a trace that was not measured departs from a real run.

    ``tokens`` is what all ranks together train on in an iteration, None where nobody said so.
    """

    source: str
    device: str = "cpu"
    torch_version: str = ""
    allocator_rounding_bytes: int = 1
    rank: int = 0
    world_size: int = 1
    micro_batches: int = 1
    traced_micro_batches: int = 0
    optimizer_steps: int = 1
    bucket_bytes: int = 0
    dispatch_seconds: float = 0.0
    model: str = ""
    optimizer: str = ""
    optimizer_implementation: str = ""
    attention_kernel: str = ""
    precision: str = ""
    known_differences: list[str] = field(default_factory=list)
    tokens: int | None = None


@dataclass(frozen=True, eq=False)
class Trace:
    """One steady iteration. Construction checks every invariant; each has its own error."""

    kernels: Kernels
    storages: Storages
    accesses: Accesses
    metadata: TraceMetadata
    calls: Calls = field(default_factory=Calls.empty)

    def __post_init__(self) -> None:
        check_trace(self)

    def __repr__(self) -> str:
        return (
            f"<Trace of {self.metadata.model or 'an iteration'}: {self.num_kernels} kernels, "
            f"{len(self.storages)} storages, ideal {format_seconds(self.ideal_seconds)}, "
            f"peak {format_bytes(self.peak_allocated_bytes)}>"
        )

    @property
    def num_kernels(self) -> int:
        """K, the length of the cycle."""
        return len(self.kernels)

    @property
    def is_persistent(self) -> BoolArray:
        """Which storages live through the whole cycle, bool (S,)."""
        result: BoolArray = self.storages.birth < 0
        return result

    @cached_property
    def ideal_seconds(self) -> float:
        """Iteration time with unlimited memory: sum of gaps and durations."""
        kernels = self.kernels
        return float(np.sum(kernels.duration_seconds) + np.sum(kernels.gap_before_seconds))

    @cached_property
    def peak_live_bytes(self) -> int:
        """Most bytes (nbytes) alive at once."""
        from teraio.traces.lifetimes import live_bytes

        return int(live_bytes(self).max(initial=0))

    @cached_property
    def peak_allocated_bytes(self) -> int:
        """Most allocated bytes at once, workspace included: what an unlimited GPU would show."""
        from teraio.traces.lifetimes import live_bytes

        allocated = live_bytes(self, allocated=True) + self.kernels.workspace_bytes
        return int(allocated.max(initial=0))

    @cached_property
    def hash(self) -> str:
        """SHA-256 over all four tables and the metadata; plans refer to their trace by it."""
        return content_hash(self._tables(), self.metadata)

    def _tables(self) -> dict[str, Table]:
        return {name: getattr(self, name) for name in _TABLES}

    def save(self, path: str | Path) -> None:
        """Write ``NAME.trace/``, atomically."""
        save_bundle(Path(path), "trace", self._tables(), self.metadata)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a trace; checksums, hash and invariants are verified. Raises InputError."""
        tables, metadata, content = load_bundle(Path(path), "trace", _TABLES, TraceMetadata)
        try:
            trace = cls(**tables, metadata=metadata)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        vars(trace)["hash"] = content  # As the cached property would, which takes its time.
        return trace

    def to_pandas(self) -> Any:
        """The storages as a DataFrame; ``kernels`` and ``accesses`` have their own."""
        return self.storages.to_pandas()

    def plot(self, capacity_bytes: int | None = None, axes: Axes | None = None) -> Axes:
        """Draw live and active memory per kernel, with a capacity line; returns the axes."""
        from teraio.traces.plot_memory import plot_memory

        return plot_memory(self, capacity_bytes, axes)

    def plot_activity(self, capacity_bytes: int | None = None, axes: Axes | None = None) -> Axes:
        """Draw what each kernel uses as a share of the GPU's memory; returns the axes."""
        from teraio.traces.plot_activity import plot_activity

        return plot_activity(self, capacity_bytes, axes)

    def plot_idleness(self, ssd: Ssd | None = None, axes: Axes | None = None) -> Axes:
        """Draw how long storages lie idle against their size; returns the axes."""
        from teraio.traces.plot_idleness import plot_idleness

        return plot_idleness(self, ssd, axes)

    def plot_characteristics(self, hardware: Hardware | None = None) -> Figure:
        """Draw all three in one figure: memory, activity and idleness."""
        from teraio.traces.plot_characteristics import plot_characteristics

        return plot_characteristics(self, hardware)


_TABLES: dict[str, type[Table]] = {
    "kernels": Kernels,
    "storages": Storages,
    "accesses": Accesses,
    "calls": Calls,
}


def as_trace(trace: Trace | str | Path) -> Trace:
    """The value itself, or the trace saved at a path."""
    return trace if isinstance(trace, Trace) else Trace.load(trace)
