"""Cyclic lifetimes: from storages of consecutive iterations to the rows of one repeating cycle.

Positions count kernels from the start of the template iteration, so one iteration later is K more.
A storage born at b that lives for D kernels becomes ``D // K`` rows that live for a full cycle and
one that lives for the rest. Only the first bears accesses as a rule: later ones are the overhang
that exists beside the storage's own successor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from teraio.errors import InputError
from teraio.profiler.recording import Recording
from teraio.profiler.segments import Segment, StorageRecord
from teraio.profiler.steady import Steady
from teraio.units import format_bytes

MAX_KEPT_BYTES = 2**20
"""What a script may keep for ever of each iteration (losses in a list) and still count as steady.
"""


@dataclass(slots=True, eq=False)
class Row:
    """One row of the storages table; birth and death None for a persistent storage.

    ``is_pinned``: later cycles of this storage are accessed too, so no plan could tell which
    generation a kernel means: it must not move.
    """

    record: StorageRecord
    birth: int | None
    birth_ordinal: int | None
    death: int | None
    is_overhang: bool = False
    is_pinned: bool = False
    name: str = ""
    kind: str = ""

    def __post_init__(self) -> None:
        if not self.is_overhang:
            self.name = self.record.name

    @property
    def is_persistent(self) -> bool:
        """Whether it lives through the whole cycle."""
        return self.birth is None


@dataclass(slots=True)
class Cycle:
    """Rows of the template iteration, and the row of each of its accesses, in order."""

    num_kernels: int
    rows: list[Row] = field(default_factory=list)
    access_rows: list[tuple[int, Row, int]] = field(default_factory=list)
    kept_bytes: int = 0


class CycleBuilder:
    """Turns the steady iterations of a recording into one cycle."""

    def __init__(self, recording: Recording, records: Iterable[StorageRecord]) -> None:
        self._recording = recording
        self._steady: Steady = recording.require_steady()
        self._records = sorted(records, key=lambda record: record.serial)
        self._offsets = self._segment_offsets()
        self._period = self._steady.period
        start = self._steady.start
        self.template = [recording.segment(i) for i in range(start, start + self._period)]
        self._cycle = Cycle(self._offsets[start + self._period])
        self._persistent: dict[int, Row] = {}
        self._cyclic: dict[int, list[Row]] = {}
        self._born = {record.serial for segment in self.template for record in segment.births}
        self._by_birth: dict[tuple[int, int, int], StorageRecord] = {}

    def build(self) -> Cycle:
        """All rows and accesses. Raises InputError if each iteration leaves more memory behind."""
        self._add_persistent()
        self._add_cyclic()
        self._assign_accesses()
        return self._cycle

    def _segment_offsets(self) -> dict[int, int]:
        offsets, position = {}, 0
        segments = self._recording.segments
        for index in range(self._steady.start, len(segments)):
            offsets[index] = position
            position += len(self._recording.segment(index))
        offsets[len(segments)] = position
        return offsets

    # Rows

    def _add_persistent(self) -> None:
        recorded_end = self._offsets[len(self._recording.segments)]
        for record in self._records:
            if record.birth_segment >= self._steady.start:
                continue
            if record.is_alive or self._death(record) >= recorded_end - 1:
                row = Row(record, None, None, None)
                self._persistent[record.serial] = row
                self._cycle.rows.append(row)

    def _death(self, record: StorageRecord) -> int:
        """Position of the kernel after which it died; negative before the template."""
        offset = self._offsets.get(record.death_segment)
        return -1 if offset is None else offset + record.death_kernel

    def _add_cyclic(self) -> None:
        for segment in self.template:
            for record in segment.births:
                place = segment.index - self._steady.start
                self._by_birth[place, record.birth_kernel, record.birth_ordinal] = record
        last_access = self._last_accesses()
        kept: list[tuple[StorageRecord, Segment]] = []
        overhangs: list[Row] = []
        for segment in self.template:
            for record in segment.births:
                birth = self._offsets[segment.index] + record.birth_kernel
                end = max(birth, last_access.get(record.serial, birth))
                if record.is_alive:
                    end = max(end, birth + self._cycle.num_kernels - 1)
                    if not record.is_foreign:
                        kept.append((record, segment))
                else:
                    end = max(end, self._death(record))
                length = end - birth + 1
                rows = self._rows_of(record, birth, length)
                self._cyclic[record.serial] = rows
                self._cycle.rows.append(rows[0])
                overhangs += rows[1:]
        self._cycle.rows += overhangs
        self._number_overhangs(overhangs)
        self._check_kept(kept)

    def _last_accesses(self) -> dict[int, int]:
        """Position of the last access of each storage, by serial.

        The recording may end sooner. What the template's kernels read of earlier iterations tells
        that its own storages will be read as late.
        """
        last: dict[int, int] = {}
        for index in range(self._steady.start, len(self._recording.segments)):
            accesses = self._recording.segment(index).accesses
            assert accesses is not None
            positions = (accesses.kernel + self._offsets[index]).tolist()
            last.update(zip(accesses.serial.tolist(), positions, strict=True))
        for position, _, record, next_record in self._template_accesses():
            if record.serial in self._born or record.serial in self._persistent:
                continue
            if next_record.birth_segment != record.birth_segment + self._period:
                continue  # Not one of a row of storages of which each iteration makes another.
            successor, iterations_ago = self._successor(record, next_record)
            later = position + iterations_ago * self._cycle.num_kernels
            last[successor.serial] = max(last.get(successor.serial, later), later)
        return last

    def _rows_of(self, record: StorageRecord, birth: int, length: int) -> list[Row]:
        num_kernels = self._cycle.num_kernels
        rows = []
        for first in range(0, length, num_kernels):
            lived = min(length - first, num_kernels)
            death = (birth + lived - 1) % num_kernels
            rows.append(Row(record, birth, record.birth_ordinal, death, is_overhang=first > 0))
        return rows

    def _number_overhangs(self, overhangs: Sequence[Row]) -> None:
        highest: dict[int | None, int] = {}
        for row in self._cycle.rows:
            if row.birth is not None and not row.is_overhang:
                ordinal = row.birth_ordinal or 0
                highest[row.birth] = max(highest.get(row.birth, 0), ordinal)
        for row in overhangs:
            highest[row.birth] += 1
            row.birth_ordinal = highest[row.birth]

    def _check_kept(self, kept: Sequence[tuple[StorageRecord, Segment]]) -> None:
        self._cycle.kept_bytes = sum(record.nbytes for record, _ in kept)
        if self._cycle.kept_bytes <= MAX_KEPT_BYTES:
            return
        record, segment = max(kept, key=lambda pair: pair[0].nbytes)
        module = segment.modules[record.birth_kernel]
        place = segment.operators[record.birth_kernel] + (f" in {module}" if module else "")
        raise InputError(
            f"profile: every iteration leaves {format_bytes(self._cycle.kept_bytes)} of memory "
            f"behind, at most from kernel {record.birth_kernel} ({place}): free it each iteration, "
            "or record more iterations if it is freed later"
        )

    # Accesses

    def _template_accesses(self) -> Iterator[tuple[int, int, StorageRecord, StorageRecord]]:
        """(position, flags, storage, what the same access of the next iteration meets)."""
        for segment in self.template:
            accesses = segment.accesses
            following = self._recording.segment(segment.index + self._period).accesses
            assert accesses is not None
            assert following is not None
            positions = (accesses.kernel + self._offsets[segment.index]).tolist()
            records = (accesses.records, following.records)
            yield from zip(positions, accesses.flags.tolist(), *records, strict=True)

    def _assign_accesses(self) -> None:
        met: dict[tuple[int, int], tuple[Row, int]] = {}
        for position, flags, record, next_record in self._template_accesses():
            row = self._row_at(record, next_record, position)
            # A row that stands for two storages may meet a kernel that uses both.
            _, before = met.get((position, id(row)), (row, 0))
            met[position, id(row)] = row, before | flags
        self._cycle.access_rows = [
            (position, row, flags) for (position, _), (row, flags) in met.items()
        ]

    def _row_at(self, record: StorageRecord, next_record: StorageRecord, position: int) -> Row:
        """The row of the storage that a template's kernel accesses.

        One left over from an iteration before is known by its successor in this one.
        """
        if record.serial == next_record.serial and record.serial in self._persistent:
            return self._persistent[record.serial]
        iterations_ago, successor = 0, record
        if record.serial not in self._born:
            successor, iterations_ago = self._successor(record, next_record)
        rows = self._cyclic.get(successor.serial)
        row = self._persistent.get(record.serial)
        if rows is not None and row is not None:
            # Kept for ever, but every iteration makes another: the successor stands for both.
            self._cycle.rows.remove(self._persistent.pop(record.serial))
        elif row is not None:
            return row
        if rows is None:
            row = self._persistent[record.serial] = Row(record, None, None, None)
            self._cycle.rows.append(row)
            return row
        birth = rows[0].birth or 0
        age = position + iterations_ago * self._cycle.num_kernels - birth
        cycle = age // self._cycle.num_kernels
        if cycle > 0:
            for row in rows:
                row.is_pinned = True
        return rows[cycle if cycle < len(rows) else 0]

    def _successor(
        self, record: StorageRecord, next_record: StorageRecord
    ) -> tuple[StorageRecord, int]:
        """What the template creates in the place of an older storage, and the age between them."""
        if next_record.serial in self._born:
            return next_record, 1
        distance = record.birth_segment - self._steady.start
        iterations_ago, place = -(distance // self._period), distance % self._period
        key = (place, record.birth_kernel, record.birth_ordinal)
        return self._by_birth.get(key, record), iterations_ago
