"""The fluid linear program: a relaxation of every valid plan that fits (DESIGN: Semantics).

Minimise the stall sum_s x_s, where slot s takes T_s = d_s + x_s. Bytes are a fluid. A gap g (an
inactive period, alike ones added up) of V_g bytes may be written from slot a_g = ``release`` on,
and must be back by the end of slot b_g = ``due``. On each tier t it sends

    delta_g bytes written for it, kappa_g bytes dropped because a clean copy of them is there,

and q_g <= V_g bytes of copy are kept through the residency before it. Levels at the start of slot s
and flows within it (indices cyclic; flows and levels >= 0; A awaits its write, O is out, P is
back, K is kept copies):

    (1) A_{s+1} = A_s + sum_{a_g = s} delta_g - w_s
    (2) O_{s+1} = O_s + w_s + sum_{a_g = s} kappa_g - r_s - sum_{b_g = s, tails} (delta_g + kappa_g)
    (3) P_{s+1} = P_s + r_s - sum_{b_g = s, others} (delta_g + kappa_g)
    (4) A_0 + O_0 + P_0 = sum of (delta_g + kappa_g) over gaps that span the cut   [per tier]
    (5) sum over tiers of (delta_g + kappa_g) <= V_g
    (6) kappa_g <= q_g <= q_p + delta_p, where p is the gap before g in its version; there is no
        q_g if the version begins with a write before g (F2)
    (7) sum over tiers of O_s >= N_k for the kernel k that starts with slot s, of O_{s+1} >= N_k for
        one that ends with it, and of O_{s+1} + r_s = O_s + w_s + sum kappa >= N_k for others in s
        (tails that die with s count in O_{s+1});
        N_k are the bytes that must be away (:func:`classes.needed_bytes`)
    (8) per device, and over all devices of the link, per face of the hull of its rates (F7):
        (seconds per byte read) r_s + (seconds per byte written) w_s <= T_s;
        host memory: sum of weight x (r_s + w_s) <= rate x T_s
    (9) K_{s+1} = K_s + sum_{b_p = s} q_g - sum_{a_g = s} q_g, anchored like (4), and
        O_s + P_s + K_s <= capacity of the tier
   (10) per SSD whose writes are limited: sum of w_s <= bytes per second x sum of T_s

Why each is implied by a plan: a write is issued after the last access and has ended before kernel
free_by starts, so its bytes flow between a_g and that kernel; a read begins after the kernel before
prefetch_start has ended. Hence what is away while kernel k runs was wholly out at its start and
still is at its end, which is (7). A slot on a tier is taken until the next access, so P counts in
(9). A steady cycle of several iterations satisfies the constraints on average (F6). Left out, which
only lowers the bound: latency, whole tensors, order of queues, slowdown of kernels, alignment,
bounce buffers. One GPU is bounded as if it had shared devices to itself (F8).

Units: ``byte_unit`` bytes and ``second_unit`` seconds per unit of a variable; numbers near 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from teraio.contracts.hardware import Hardware, Link
from teraio.contracts.table import BoolArray, FloatArray, IntArray
from teraio.planner.fluid.channels import Shared, Tier, hull_of, is_no_limit, shared_rates, tiers_of
from teraio.planner.fluid.classes import GapClasses
from teraio.planner.fluid.linear_program import LinearProgram, ProgramBuilder, Values
from teraio.planner.fluid.sequences import cyclic_totals
from teraio.planner.fluid.slots import Slots
from teraio.planner.fluid.structure import Anchor, RowBlock, Span


@dataclass(frozen=True)
class RateRow:
    """Rows (8) of one face: per slot one row; ``face`` numbers the faces of ``shared``."""

    shared: Shared
    face: int
    rows: IntArray


@dataclass(frozen=True)
class TierColumns:
    """Columns of one tier's variables: per slot A, O, P, K, w, r; per gap delta, kappa, q.

    kappa and q exist for the gaps in ``FluidProgram.serves`` only; ``kept`` (K) is empty where
    capacity cannot bind.
    """

    awaiting: IntArray
    out: IntArray
    back: IntArray
    kept: IntArray
    written: IntArray
    read: IntArray
    delta: IntArray
    kappa: IntArray
    copy: IntArray


@dataclass(frozen=True)
class FluidProgram:
    """The program, and where its parts are. ``serves``: gaps that a copy may serve.

    ``slot_blocks`` and ``gap_blocks`` are all rows that are about a slot or a gap, but those of
    ``copy_blocks``: per tier, what limits q in (6); and those of ``anchors``.
    """

    program: LinearProgram
    stalls: IntArray
    tiers: list[Tier]
    tier_columns: list[TierColumns]
    memory_rows: IntArray
    shared: list[Shared]
    rate_rows: list[RateRow]
    host_memory_rows: IntArray
    host_memory_rate: float
    capacity_rows: dict[str, IntArray]
    serves: IntArray
    slot_blocks: list[RowBlock]
    gap_blocks: list[RowBlock]
    copy_blocks: list[RowBlock]
    anchors: list[Anchor]
    byte_unit: float
    second_unit: float


def formulate(
    hardware: Hardware,
    rank: int,
    slots: Slots,
    gaps: GapClasses,
    needed_bytes: IntArray,
    peak_live_bytes: int,
    *,
    writer_class: Callable[..., ProgramWriter] | None = None,
    ssd_write_budget: Mapping[str, float] | None = None,
) -> FluidProgram:
    """The fluid program of a trace cut into ``slots``; ``needed_bytes`` int64 (K,).

    ``peak_live_bytes`` tells which tiers can never be full. ``writer_class`` may change single
    constraints (planning does; the bound's are the default). ``ssd_write_budget`` has the bytes
    that may be written per second of iteration, by name of SSD; those not named are not limited.
    """
    byte_unit = max(1.0, float(needed_bytes.max()) / 100)
    tiers = tiers_of(hardware, rank)
    fastest = max([tier.part.read_rate for tier in tiers], default=1.0)
    second_unit = byte_unit / fastest
    writer = (writer_class or ProgramWriter)(hardware, slots, gaps, byte_unit, second_unit)
    columns = [writer.add_tier(tier, tier.capacity_bytes < peak_live_bytes) for tier in tiers]
    writer.limit_sizes(columns)
    memory_rows = writer.require_memory(columns, needed_bytes)
    by_name = {tier.name: tier_columns for tier, tier_columns in zip(tiers, columns, strict=True)}
    shared_by_all = shared_rates(hardware, rank, tiers)
    rate_rows = [
        row
        for shared in shared_by_all
        for row in writer.limit_rates(shared, [by_name[name] for name in shared.devices])
    ]
    host_memory_rows = writer.limit_host_memory(tiers, columns)
    for name, bytes_per_second in (ssd_write_budget or {}).items():
        if name in by_name:
            writer.limit_writes(by_name[name], bytes_per_second)
    return FluidProgram(
        program=writer.builder.build(),
        stalls=writer.stalls,
        tiers=tiers,
        tier_columns=columns,
        memory_rows=memory_rows,
        shared=shared_by_all,
        rate_rows=rate_rows,
        host_memory_rows=host_memory_rows,
        host_memory_rate=hardware.host.memory_rate or 0.0,
        capacity_rows=writer.capacity_rows,
        serves=writer.serves,
        slot_blocks=writer.slot_blocks,
        gap_blocks=writer.gap_blocks,
        copy_blocks=writer.copy_blocks,
        anchors=writer.anchors,
        byte_unit=byte_unit,
        second_unit=second_unit,
    )


class ProgramWriter:
    """Writes the numbered constraints into a builder; ``volume`` and rates in program units."""

    def __init__(
        self,
        hardware: Hardware,
        slots: Slots,
        gaps: GapClasses,
        byte_unit: float,
        second_unit: float,
    ) -> None:
        self.hardware, self.slots, self.gaps = hardware, slots, gaps
        self.byte_unit, self.second_unit = byte_unit, second_unit
        self.volume = gaps.num_bytes / byte_unit
        self.seconds = slots.seconds / second_unit
        self.builder = ProgramBuilder()
        self.capacity_rows: dict[str, IntArray] = {}
        self.slot_blocks: list[RowBlock] = []
        self.gap_blocks: list[RowBlock] = []
        self.copy_blocks: list[RowBlock] = []
        self.anchors: list[Anchor] = []
        count = len(slots)
        self.release, self.due = gaps.release % count, gaps.due % count
        self.serves = np.flatnonzero(gaps.previous >= 0)
        # Stalls have no natural limit: the certificate sets one (bound.py).
        self.stalls = self.builder.variables(count, np.where(slots.may_stretch, np.inf, 0.0), 1.0)

    def add_tier(self, tier: Tier, may_be_full: bool) -> TierColumns:
        """Variables of a tier, and (1) to (4), (6), (9)."""
        builder, count = self.builder, len(self.slots)
        gaps = self.gaps
        spanning = cyclic_totals(gaps.release, gaps.due, self.volume, count)
        touching = cyclic_totals(gaps.release - 1, gaps.due, self.volume, count)
        copies = self.volume[self.serves]
        columns = TierColumns(
            awaiting=builder.variables(count, spanning),
            out=builder.variables(count, spanning),
            back=builder.variables(count, spanning),
            kept=builder.variables(count if may_be_full else 0, float(copies.sum())),
            written=builder.variables(count, touching),
            read=builder.variables(count, touching),
            delta=builder.variables(len(gaps), self.volume),
            kappa=builder.variables(len(self.serves), copies),
            copy=builder.variables(len(self.serves), copies),
        )
        self._balance(columns)
        self._serve_from_copies(columns)
        if may_be_full:
            self._limit_capacity(tier, columns)
        return columns

    def _per_slot(self, slots: IntArray, lower: Values, upper: Values) -> IntArray:
        """A new row for each of some slots."""
        rows = self.builder.constraints(len(slots), lower, upper)
        self.slot_blocks.append(RowBlock(rows, slots))
        return rows

    def _balance(self, c: TierColumns) -> None:
        """(1) to (4)."""
        builder, count = self.builder, len(self.slots)
        slot, after = np.arange(count), np.roll(np.arange(count), -1)
        kappa_release = self.release[self.serves]
        waits, leaves, returns = (self._per_slot(slot, 0.0, 0.0) for _ in range(3))
        for rows, level in ((waits, c.awaiting), (leaves, c.out), (returns, c.back)):
            builder.add(rows, level[after], 1.0)
            builder.add(rows, level[slot], -1.0)
        builder.add(waits, c.written, 1.0)
        builder.add(waits[self.release], c.delta, -1.0)
        builder.add(leaves, c.written, -1.0)
        builder.add(leaves, c.read, 1.0)
        builder.add(leaves[kappa_release], c.kappa, -1.0)
        builder.add(returns, c.read, -1.0)
        is_tail = self.gaps.is_tail
        ends = np.where(is_tail, leaves[self.due], returns[self.due])
        builder.add(ends, c.delta, 1.0)
        builder.add(ends[self.serves], c.kappa, 1.0)
        gaps, serves = self.gaps, self.serves
        spans = [
            Span(c.delta, gaps.release, gaps.due),
            Span(c.kappa, gaps.release[serves], gaps.due[serves]),
        ]
        self._anchor([c.awaiting, c.out, c.back], [waits, leaves, returns], spans)

    def _anchor(self, levels: list[IntArray], balances: list[IntArray], spans: list[Span]) -> None:
        """(4): without it, cyclic levels float."""
        row = self.builder.constraints(1, 0.0, 0.0)
        for level in levels:
            self.builder.add(row, level[:1], 1.0)
        count = len(self.slots)
        for span in spans:
            crossings = (span.last // count - span.first // count).astype(float)
            self.builder.add(np.repeat(row, len(span.columns)), span.columns, -crossings)
        self.anchors.append(Anchor(row, levels, balances, spans))

    def _serve_from_copies(self, c: TierColumns) -> None:
        """(6)."""
        builder, count = self.builder, len(self.serves)
        dropped = builder.constraints(count, -np.inf, 0.0)
        builder.add(dropped, c.kappa, 1.0)
        builder.add(dropped, c.copy, -1.0)
        kept = builder.constraints(count, -np.inf, 0.0)
        self.gap_blocks.append(RowBlock(dropped, self.serves))
        self.copy_blocks.append(RowBlock(kept, self.serves))
        previous = self.gaps.previous[self.serves]
        builder.add(kept, c.copy, 1.0)
        builder.add(kept, c.delta[previous], -1.0)
        place = np.full(len(self.gaps), -1)
        place[self.serves] = np.arange(count)
        has_copy = place[previous] >= 0
        builder.add(kept[has_copy], c.copy[place[previous[has_copy]]], -1.0)

    def _limit_capacity(self, tier: Tier, c: TierColumns) -> None:
        """(9)."""
        builder, count = self.builder, len(self.slots)
        begin, end = self.gaps.previous_due[self.serves], self.gaps.release[self.serves]
        levels = self._per_slot(np.arange(count), 0.0, 0.0)
        builder.add(levels, np.roll(c.kept, -1), 1.0)
        builder.add(levels, c.kept, -1.0)
        builder.add(levels[begin % count], c.copy, -1.0)
        builder.add(levels[end % count], c.copy, 1.0)
        self._anchor([c.kept], [levels], [Span(c.copy, begin, end)])
        rows = self._per_slot(np.arange(count), -np.inf, tier.capacity_bytes / self.byte_unit)
        for level in (c.out, c.back, c.kept):
            builder.add(rows, level, 1.0)
        self.capacity_rows[tier.name] = rows

    def limit_sizes(self, columns: list[TierColumns]) -> None:
        """(5)."""
        rows = self.builder.constraints(len(self.gaps), -np.inf, self.volume)
        self.gap_blocks.append(RowBlock(rows, np.arange(len(self.gaps))))
        for c in columns:
            self.builder.add(rows, c.delta, 1.0)
            self.builder.add(rows[self.serves], c.kappa, 1.0)

    def require_memory(self, columns: list[TierColumns], needed_bytes: IntArray) -> IntArray:
        """(7), for slots in which something must be away; returns the rows."""
        needed = needed_bytes / self.byte_unit
        of_piece = self.slots.of_piece
        slot = of_piece[0::2]
        starts, ends = slot != np.roll(of_piece[1::2], 1), slot != of_piece[1::2]
        starts[0] = True
        first, last, rest = (self._highest(needed, slot, who) for who in (starts, ends, ~starts))
        at_start, at_end, within = (np.flatnonzero(high > 0) for high in (first, last, rest))
        builder = self.builder
        rows_at_start = self._per_slot(at_start, first[at_start], np.inf)
        rows_at_end = self._per_slot(at_end, last[at_end], np.inf)
        rows_within = self._per_slot(within, rest[within], np.inf)
        for c in columns:
            builder.add(rows_at_start, c.out[at_start], 1.0)
            self._add_out_at_end(rows_at_end, at_end, c)
            self._add_out_at_end(rows_within, within, c)
            builder.add(rows_within, c.read[within], 1.0)
        return np.concatenate((rows_at_start, rows_at_end, rows_within))

    def _add_out_at_end(self, rows: IntArray, slots: IntArray, c: TierColumns) -> None:
        """O_{s+1} and the tails that die with slot s, which are out until its end."""
        self.builder.add(rows, np.roll(c.out, -1)[slots], 1.0)
        row_of_slot = np.full(len(self.slots), -1)
        row_of_slot[slots] = rows
        row = row_of_slot[self.due]
        dying = np.flatnonzero(self.gaps.is_tail & (row >= 0))
        self.builder.add(row[dying], c.delta[dying], 1.0)
        dying = np.flatnonzero(self.gaps.is_tail[self.serves] & (row[self.serves] >= 0))
        self.builder.add(row[self.serves][dying], c.kappa[dying], 1.0)

    def _highest(self, needed: FloatArray, slot: IntArray, who: BoolArray) -> FloatArray:
        result = np.full(len(self.slots), -np.inf)
        np.maximum.at(result, slot[who], needed[who])
        return result

    def limit_rates(self, shared: Shared, columns: list[TierColumns]) -> list[RateRow]:
        """(8) of a device or link; each row is divided by its largest seconds per byte."""
        if isinstance(shared.rates, Link) and is_no_limit(shared, self.hardware):
            return []
        result = []
        for face, (read, write) in enumerate(hull_of(shared.rates)):
            scale = max(read, write)
            rate = self.second_unit / (scale * self.byte_unit)
            rows = self._limit_flow(rate)
            for c in columns:
                self.builder.add(rows, c.read, read / scale)
                self.builder.add(rows, c.written, write / scale)
            result.append(RateRow(shared, face, rows))
        return result

    def limit_host_memory(self, tiers: list[Tier], columns: list[TierColumns]) -> IntArray:
        """(8) of host memory; no rows if its rate is unknown."""
        if self.hardware.host.memory_rate is None:
            return np.zeros(0, dtype=np.int64)
        rows = self._limit_flow(self.hardware.host.memory_rate * self.second_unit / self.byte_unit)
        for tier, c in zip(tiers, columns, strict=True):
            self.builder.add(rows, c.read, tier.memory_weight)
            self.builder.add(rows, c.written, tier.memory_weight)
        return rows

    def limit_writes(self, c: TierColumns, bytes_per_second: float) -> None:
        """(10)."""
        rate = bytes_per_second * self.second_unit / self.byte_unit
        row = self.builder.constraints(1, -np.inf, rate * float(self.seconds.sum()))
        self.builder.add(np.repeat(row, len(c.written)), c.written, 1.0)
        self.builder.add(np.repeat(row, len(self.stalls)), self.stalls, -rate)

    def _limit_flow(self, rate: float) -> IntArray:
        """Rows (flow) - rate x stall <= rate x d, per slot; the flow is added by the caller."""
        rows = self._per_slot(np.arange(len(self.slots)), -np.inf, rate * self.seconds)
        self.builder.add(rows, self.stalls, -rate)
        return rows
