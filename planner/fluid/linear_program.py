"""A linear program in arrays: minimise cost x subject to lower <= A x <= upper, x in a box."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from teraio.contracts.table import FloatArray, IntArray

Values = float | FloatArray


@dataclass(frozen=True)
class LinearProgram:
    """All variables are at least 0. ``column_upper`` holds for every schedule, infinite for stalls;
    entries of A are (``rows``, ``columns``, ``values``), each place at most once.
    """

    cost: FloatArray
    column_upper: FloatArray
    row_lower: FloatArray
    row_upper: FloatArray
    rows: IntArray
    columns: IntArray
    values: FloatArray


class Entries(NamedTuple):
    """Entries of a matrix."""

    rows: IntArray
    columns: IntArray
    values: FloatArray

    @classmethod
    def minus(cls, rows: IntArray, columns: IntArray) -> Entries:
        """Entries that are -1."""
        return cls(rows, columns, np.full(len(rows), -1.0))


def add_up(entries: list[Entries], num_columns: int) -> Entries:
    """Those of one place added up, without zeros; by row, then by column."""
    rows, columns, values = (np.concatenate([part[i] for part in entries]) for i in range(3))
    place, where = np.unique(rows * num_columns + columns, return_inverse=True)
    total = np.bincount(where.reshape(-1), weights=values, minlength=len(place))
    place, total = place[total != 0], total[total != 0]
    return Entries(place // num_columns, place % num_columns, total)


@dataclass
class ProgramBuilder:
    """Collects variables, rows and entries by arrays."""

    num_columns: int = 0
    num_rows: int = 0
    _columns: list[tuple[FloatArray, FloatArray]] = field(default_factory=list)
    _rows: list[tuple[FloatArray, FloatArray]] = field(default_factory=list)
    _entries: list[Entries] = field(default_factory=list)

    def variables(self, count: int, upper: Values, cost: Values = 0.0) -> IntArray:
        """``count`` new variables; returns their columns."""
        self._columns.append((_full(count, upper), _full(count, cost)))
        self.num_columns += count
        return np.arange(self.num_columns - count, self.num_columns)

    def constraints(self, count: int, lower: Values, upper: Values) -> IntArray:
        """``count`` new rows; returns their indices."""
        self._rows.append((_full(count, lower), _full(count, upper)))
        self.num_rows += count
        return np.arange(self.num_rows - count, self.num_rows)

    def add(self, rows: IntArray, columns: IntArray, values: Values) -> None:
        """Entries of the matrix; those of one place are added up."""
        self._entries.append(Entries(rows, columns, _full(len(rows), values)))

    def build(self) -> LinearProgram:
        """The program so far."""
        return LinearProgram(
            cost=np.concatenate([cost for _, cost in self._columns]),
            column_upper=np.concatenate([upper for upper, _ in self._columns]),
            row_lower=np.concatenate([lower for lower, _ in self._rows]),
            row_upper=np.concatenate([upper for _, upper in self._rows]),
            **add_up(self._entries, self.num_columns)._asdict(),
        )


def _full(count: int, value: Values) -> npt.NDArray[np.float64]:
    return np.broadcast_to(np.asarray(value, dtype=np.float64), (count,)).copy()
