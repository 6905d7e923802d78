"""A linear program in arrays: minimise cost x subject to lower <= A x <= upper, x in a box."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from teraio.contracts.table import FloatArray, IntArray

Values = float | FloatArray


@dataclass(frozen=True)
class LinearProgram:
    """All variables are at least 0. ``column_upper`` is finite and holds for every schedule;
    entries of A are (``rows``, ``columns``, ``values``), each place at most once.
    """

    cost: FloatArray
    column_upper: FloatArray
    row_lower: FloatArray
    row_upper: FloatArray
    rows: IntArray
    columns: IntArray
    values: FloatArray


@dataclass
class ProgramBuilder:
    """Collects variables, rows and entries by arrays."""

    num_columns: int = 0
    num_rows: int = 0
    _columns: list[tuple[FloatArray, FloatArray]] = field(default_factory=list)
    _rows: list[tuple[FloatArray, FloatArray]] = field(default_factory=list)
    _entries: list[tuple[IntArray, IntArray, FloatArray]] = field(default_factory=list)

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
        self._entries.append((rows, columns, _full(len(rows), values)))

    def build(self) -> LinearProgram:
        """The program so far."""
        rows, columns, values = (
            np.concatenate([entry[part] for entry in self._entries]) for part in range(3)
        )
        place, where = np.unique(rows * self.num_columns + columns, return_inverse=True)
        total = np.bincount(where.reshape(-1), weights=values, minlength=len(place))
        place, total = place[total != 0], total[total != 0]
        return LinearProgram(
            cost=np.concatenate([cost for _, cost in self._columns]),
            column_upper=np.concatenate([upper for upper, _ in self._columns]),
            row_lower=np.concatenate([lower for lower, _ in self._rows]),
            row_upper=np.concatenate([upper for _, upper in self._rows]),
            rows=place // self.num_columns,
            columns=place % self.num_columns,
            values=total,
        )


def _full(count: int, value: Values) -> npt.NDArray[np.float64]:
    return np.broadcast_to(np.asarray(value, dtype=np.float64), (count,)).copy()
