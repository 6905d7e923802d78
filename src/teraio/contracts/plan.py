"""Plan: what moves when. Self-contained: the executor needs nothing else (DESIGN: Plan).

Kernel indices are those of one iteration, 0..K-1, and are unrolled from a move's ``after_kernel``:
see :meth:`Moves.unrolled`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from teraio.contracts.bundle import content_hash, load_bundle, save_bundle
from teraio.contracts.hardware import Hardware
from teraio.contracts.table import MISSING, BoolArray, Column, IntArray, Table, TextArray
from teraio.units import format_bytes, format_seconds

TIERS = ("gpu", "host", "ssd")


class UnrolledMoves(NamedTuple):
    """Kernel indices of moves on one unbroken axis that starts at ``after_kernel``, int64 (moves,).

    ``prefetch_start`` and ``before_kernel`` of tail moves are MISSING.
    """

    after_kernel: IntArray
    offload_start: IntArray
    free_by: IntArray
    prefetch_start: IntArray
    before_kernel: IntArray


@dataclass(frozen=True, eq=False)
class Moves(Table):
    """One row per inactive period that leaves the GPU. Row order breaks ties in the queues."""

    storage: IntArray
    after_kernel: IntArray
    before_kernel: IntArray
    offload_start: IntArray
    free_by: IntArray
    prefetch_start: IntArray
    tier: TextArray
    device: TextArray
    tier_offset_bytes: IntArray
    nbytes: IntArray
    writes: BoolArray

    COLUMNS = (
        Column("storage", "int", "storage that moves; a row of the plan's storages"),
        Column("after_kernel", "int", "last access before the inactive period"),
        Column("before_kernel", "int", "first access after it; null: never read", nullable=True),
        Column("offload_start", "int", "the offload is issued after this kernel"),
        Column("free_by", "int", "kernel before which the GPU memory is given back"),
        Column(
            "prefetch_start",
            "int",
            "kernel before which GPU memory is taken and the read issued; null for a tail",
            nullable=True,
        ),
        Column("tier", "text", "host | ssd"),
        Column("device", "text", "'host', or the name of an SSD in the plan's hardware"),
        Column("tier_offset_bytes", "int", "where the slot begins on the device", "bytes"),
        Column("nbytes", "int", "bytes transferred each way", "bytes"),
        Column("writes", "bool", "false where a clean copy already lies in the slot"),
    )

    def unrolled(self, num_kernels: int) -> UnrolledMoves:
        """Indices unrolled from a = after_kernel: offload_start into [a, a+K-1], the rest into
        [a+1, a+K], with K = ``num_kernels`` (DESIGN: Unrolling).
        """
        after = self.after_kernel
        first = after + 1

        def wrap(values: IntArray) -> IntArray:
            result: IntArray = first + (values - first) % num_kernels
            return result

        def wrap_nullable(values: IntArray) -> IntArray:
            return np.where(values == MISSING, MISSING, wrap(values))

        return UnrolledMoves(
            after_kernel=after,
            offload_start=after + (self.offload_start - after) % num_kernels,
            free_by=wrap(self.free_by),
            prefetch_start=wrap_nullable(self.prefetch_start),
            before_kernel=wrap_nullable(self.before_kernel),
        )


@dataclass(frozen=True, eq=False)
class PlanKernels(Table):
    """What the executor checks and budgets per kernel, in order."""

    kernel: IntArray
    op: TextArray
    signature: IntArray
    phase: TextArray
    module: TextArray
    workspace_bytes: IntArray

    COLUMNS = (
        Column("kernel", "int", "index, 0..K-1"),
        Column("op", "text", "operator with overload, e.g. aten.mm.default"),
        Column("signature", "int", "hash of operator, shapes and dtypes; detects drift"),
        Column("phase", "text", "forward | backward | optimizer | other"),
        Column("module", "text", "fully qualified module; may be empty", nullable=True),
        Column("workspace_bytes", "int", "scratch inside the operator", "bytes"),
    )


@dataclass(frozen=True, eq=False)
class PlanStorages(Table):
    """The identity that finds each storage again at run time, and where it is at kernel 0."""

    storage: IntArray
    name: TextArray
    kind: TextArray
    birth: IntArray
    birth_ordinal: IntArray
    death: IntArray
    nbytes: IntArray
    allocated_bytes: IntArray
    placement: TextArray
    device: TextArray
    tier_offset_bytes: IntArray

    COLUMNS = (
        Column("storage", "int", "index, 0..S-1, the trace's"),
        Column("name", "text", "fully qualified name; identity if persistent", nullable=True),
        Column("kind", "text", "parameter | gradient | optimizer_state | activation | ..."),
        Column("birth", "int", "kernel that creates it; null if persistent", nullable=True),
        Column("birth_ordinal", "int", "rank among the storages born there", nullable=True),
        Column("death", "int", "kernel after which it is freed", nullable=True),
        Column("nbytes", "int", "what PyTorch asked for", "bytes"),
        Column("allocated_bytes", "int", "as the allocator rounds it", "bytes"),
        Column(
            "placement",
            "text",
            "gpu | host | ssd while kernel 0 runs; null: not alive",
            nullable=True,
        ),
        Column("device", "text", "device of the copy, if not on the GPU", nullable=True),
        Column("tier_offset_bytes", "int", "slot of the copy", "bytes", nullable=True),
    )


@dataclass(frozen=True, eq=False)
class Accesses(Table):
    """Which kernel touches which storage; both flags false: a view needs it resident."""

    kernel: IntArray
    storage: IntArray
    reads: BoolArray
    writes: BoolArray

    COLUMNS = (
        Column("kernel", "int", "kernel that accesses; rows are ordered by it"),
        Column("storage", "int", "storage accessed"),
        Column("reads", "bool", "whether the kernel reads it"),
        Column("writes", "bool", "whether the kernel writes it"),
    )


@dataclass(frozen=True, eq=False)
class Copies(Table):
    """Clean copies that are valid while kernel 0 runs, of storages that are also on the GPU."""

    storage: IntArray
    tier: TextArray
    device: TextArray
    tier_offset_bytes: IntArray

    COLUMNS = (
        Column("storage", "int", "storage that has the copy"),
        Column("tier", "text", "host | ssd"),
        Column("device", "text", "device of the copy"),
        Column("tier_offset_bytes", "int", "slot of the copy", "bytes"),
    )


@dataclass(frozen=True, kw_only=True)
class PlanMetadata:
    """How a plan came to be and what it promises. Bytes and seconds; None where unknown.

    ``gap_seconds`` are the trace's own, per iteration: what a run idles beyond them and its waits
    for storages and memory is the executor's (stall_host). ``bound_seconds`` is what proving the
    lower bound took; ``value_of_gb`` and ``value_of_gb_per_second`` are the seconds that a little
    more of a tier or a channel would take off it (empty: no bound was asked for).

    ``transform`` names what was done to the trace before planning (None: nothing), with its
    ``transform_options``; the tables are about the result, while ``trace_hash`` and
    ``ideal_seconds`` are those of the trace as recorded.

    ``tokens`` is what all ranks together train on in an iteration (None: unknown).
    """

    trace_hash: str
    hardware: str
    planner: str
    gpu_memory_bytes: int
    host_memory_bytes: int
    ideal_seconds: float
    predicted_seconds: float
    lower_bound_seconds: float
    bound_kind: str
    peak_gpu_bytes: int
    peak_host_bytes: int
    planning_seconds: float
    bound_seconds: float = 0.0
    value_of_gb: Mapping[str, float] = field(default_factory=dict)
    value_of_gb_per_second: Mapping[str, float] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    transform: str | None = None
    transform_options: Mapping[str, Any] = field(default_factory=dict)
    arena_bytes: Mapping[str, int] = field(default_factory=dict)
    ssd_bytes_written: Mapping[str, int] = field(default_factory=dict)
    rank: int = 0
    world_size: int = 1
    device: str = "cpu"
    micro_batches: int = 1
    optimizer_steps: int = 1
    bucket_bytes: int = 0
    gap_seconds: float = 0.0
    allocator_rounding_bytes: int = 1
    tokens: int | None = None


@dataclass(frozen=True, eq=False)
class Plan:
    """Moves with everything needed to execute them and to know what they were made for."""

    moves: Moves
    kernels: PlanKernels
    storages: PlanStorages
    accesses: Accesses
    copies: Copies
    metadata: PlanMetadata

    def __repr__(self) -> str:
        return (
            f"<Plan by {self.metadata.planner}: {len(self.moves)} moves, "
            f"predicted {format_seconds(self.predicted_seconds)}, "
            f"{self.fraction_of_ideal:.1%} of ideal, "
            f"peak {format_bytes(self.metadata.peak_gpu_bytes)}>"
        )

    @property
    def hardware(self) -> Hardware:
        """The machine that the plan was made for, budgets included."""
        return Hardware.from_toml(self.metadata.hardware, "hardware of the plan")

    @property
    def predicted_seconds(self) -> float:
        """Mean iteration time in the steady cycle, as simulated."""
        return self.metadata.predicted_seconds

    @property
    def ideal_seconds(self) -> float:
        """Iteration time with unlimited GPU memory."""
        return self.metadata.ideal_seconds

    @property
    def lower_bound_seconds(self) -> float:
        """No plan on this hardware is faster; ``metadata.bound_kind`` says how it is known."""
        return self.metadata.lower_bound_seconds

    @property
    def gap(self) -> float:
        """(predicted - bound) / bound: how far from the best possible plan, at most."""
        bound = self.metadata.lower_bound_seconds
        # A plan that is ideal may lie below by the simulator's rounding to picoseconds.
        return max(0.0, self.metadata.predicted_seconds / bound - 1) if bound > 0 else 0.0

    @property
    def fraction_of_ideal(self) -> float:
        """ideal / predicted: the speed kept, 1.0 being unlimited memory."""
        predicted = self.metadata.predicted_seconds
        return self.metadata.ideal_seconds / predicted if predicted > 0 else 1.0

    def content_hash(self) -> str:
        """SHA-256 over all tables and metadata."""
        return content_hash(self._tables(), self.metadata)

    def _tables(self) -> dict[str, Table]:
        return {name: getattr(self, name) for name in _TABLES}

    def save(self, path: str | Path) -> None:
        """Write ``NAME.plan/``, atomically."""
        save_bundle(Path(path), "plan", self._tables(), self.metadata)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan; checksums and hash are verified. Raises InputError.

        Structure is judged by the verifier (``teraio.verify``), not here.
        """
        tables, metadata, _ = load_bundle(Path(path), "plan", _TABLES, PlanMetadata)
        return cls(**tables, metadata=metadata)

    def to_pandas(self) -> Any:
        """The moves as a DataFrame, with the storages' names beside."""
        frame = self.moves.to_pandas()
        frame.insert(1, "name", self.storages.name[self.moves.storage])
        return frame


_TABLES: dict[str, type[Table]] = {
    "moves": Moves,
    "kernels": PlanKernels,
    "storages": PlanStorages,
    "accesses": Accesses,
    "copies": Copies,
}
