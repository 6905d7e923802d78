"""Column tables: typed NumPy columns in memory, Parquet on disk, pandas in notebooks.

A table is a frozen dataclass whose fields are its columns and whose ``COLUMNS`` state kind, unit
and meaning of each. Integers stay integers: a missing one is :data:`MISSING` in memory and null on
disk (a null would turn a pandas column into floats and lose digits above 2^53).
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt

from teraio.errors import InputError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
TextArray = npt.NDArray[np.object_]

MISSING = -1
"""A null integer in memory. No column of any contract has a meaningful negative value."""

_TEXT_COLUMNS: weakref.WeakValueDictionary[int, TextArray] = weakref.WeakValueDictionary()
"""Text columns of tables, by ``id``: they are read-only, so another table may have them as they are
(a plan has those of its trace's kernels, hundreds of thousands of texts).
"""

_DTYPES: dict[str, type] = {"int": np.int64, "float": np.float64, "bool": np.bool_, "text": object}


@dataclass(frozen=True)
class Column:
    """One column of a table's schema.

    Attributes: ``kind`` int | float | bool | text; ``nullable`` whether MISSING (int) or the empty
    text may appear; ``unit`` "" where the meaning has none.
    """

    name: str
    kind: Literal["int", "float", "bool", "text"]
    meaning: str
    unit: str = ""
    nullable: bool = False


@dataclass(frozen=True, eq=False)
class Table:
    """Base of all column tables. Columns are converted, length-checked and made read-only."""

    COLUMNS: ClassVar[tuple[Column, ...]] = ()

    def __post_init__(self) -> None:
        length = None
        for column in self.COLUMNS:
            array = _as_array(getattr(self, column.name), column, type(self).__name__)
            if length is None:
                length = len(array)
            elif len(array) != length:
                raise InputError(
                    f"{type(self).__name__}.{column.name}: has {len(array)} rows, "
                    f"but {self.COLUMNS[0].name} has {length}"
                )
            array.flags.writeable = False
            if column.kind == "text":
                _TEXT_COLUMNS[id(array)] = array
            object.__setattr__(self, column.name, array)

    def __len__(self) -> int:
        return len(getattr(self, self.COLUMNS[0].name))

    def equals(self, other: Table) -> bool:
        """Whether both hold the same columns with the same values, bit by bit."""
        return type(self) is type(other) and all(
            np.array_equal(getattr(self, c.name), getattr(other, c.name)) for c in self.COLUMNS
        )

    def take(self, rows: npt.NDArray[Any]) -> Self:
        """The rows that an index array or a Boolean mask selects."""
        return type(self)(**{c.name: getattr(self, c.name)[rows] for c in self.COLUMNS})

    @classmethod
    def empty(cls) -> Self:
        """A table without rows."""
        return cls(**{c.name: np.empty(0, _DTYPES[c.kind]) for c in cls.COLUMNS})

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[Any]]) -> Self:
        """A table from rows in the order of ``COLUMNS``; None becomes MISSING or the empty text.

        Rows may leave out the last columns, if those are nullable.
        """
        columns = list(zip(*rows, strict=True)) if rows else [()] * len(cls.COLUMNS)
        null = {"int": MISSING, "text": ""}
        columns += [(None,) * len(rows) for c in cls.COLUMNS[len(columns) :] if c.nullable]
        data = {
            c.name: [null.get(c.kind, v) if v is None else v for v in values]
            for c, values in zip(cls.COLUMNS, columns, strict=True)
        }
        return cls(**data)

    def to_pandas(self) -> pd.DataFrame:
        """A DataFrame with nullable integer columns, so that no integer turns into a float."""
        import pandas as pd

        frame = {}
        for column in self.COLUMNS:
            values = getattr(self, column.name)
            if column.kind == "int" and column.nullable:
                frame[column.name] = pd.array(np.where(values == MISSING, 0, values), dtype="Int64")
                frame[column.name][values == MISSING] = pd.NA
            else:
                frame[column.name] = values
        return pd.DataFrame(frame)

    def to_arrow(self) -> pa.Table:
        """An Arrow table with nulls where the column is nullable."""
        import pyarrow as pa

        types = {"int": pa.int64(), "float": pa.float64(), "bool": pa.bool_(), "text": pa.string()}
        arrays, schema = [], []
        for column in self.COLUMNS:
            values = getattr(self, column.name)
            mask = None
            if column.nullable:
                mask = values == (MISSING if column.kind == "int" else "")
            arrays.append(pa.array(values, type=types[column.kind], mask=mask))
            schema.append(pa.field(column.name, types[column.kind], nullable=column.nullable))
        return pa.table(arrays, schema=pa.schema(schema))

    @classmethod
    def from_arrow(cls, table: pa.Table, file: str) -> Self:
        """The table from an Arrow table. Raises InputError that names file and column."""
        data = {}
        for column in cls.COLUMNS:
            if column.name not in table.column_names:
                raise InputError(f"{file}: column {column.name} is missing")
            data[column.name] = _from_arrow_column(table.column(column.name), column, file)
        unknown = sorted(set(table.column_names) - {c.name for c in cls.COLUMNS})
        if unknown:
            raise InputError(f"{file}: unknown column {unknown[0]}; written by a newer teraio?")
        return cls(**data)

    def update_digest(self, digest: hashlib._Hash) -> None:
        """Feed names and values of all columns to a hash; the same on every machine."""
        for column in self.COLUMNS:
            digest.update(f"{column.name}:{column.kind}:{len(self)};".encode())
            values = getattr(self, column.name)
            if column.kind == "text":
                digest.update(_as_json(values.tolist()).encode())
            else:
                digest.update(np.ascontiguousarray(values).tobytes())


def _as_json(texts: list[str]) -> str:
    """``json.dumps(texts)``, each different text encoded once."""
    encoded = {text: json.dumps(text) for text in set(texts)}
    return f"[{', '.join([encoded[text] for text in texts])}]"


def _as_array(values: Any, column: Column, table: str) -> npt.NDArray[Any]:
    if column.kind == "text":
        known = _TEXT_COLUMNS.get(id(values))
        if known is not None and known is values and not known.flags.writeable:
            return known
        array = np.empty(len(values), dtype=object)
        array[:] = [str(v) for v in values]
        return array
    raw = np.asarray(values)
    if raw.size and column.kind == "int" and raw.dtype.kind not in "iub":
        raise InputError(f"{table}.{column.name}: needs integers, got {raw.dtype}")
    try:
        return np.array(raw, dtype=_DTYPES[column.kind]).reshape(-1)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{table}.{column.name}: not readable as {column.kind}: {error}") from None


def _from_arrow_column(values: pa.ChunkedArray, column: Column, file: str) -> npt.NDArray[Any]:
    import pyarrow as pa

    is_kind = {
        "int": pa.types.is_integer,
        "float": pa.types.is_floating,
        "bool": pa.types.is_boolean,
        "text": pa.types.is_string,
    }[column.kind]
    if not is_kind(values.type):
        raise InputError(f"{file}: column {column.name} must be {column.kind}, is {values.type}")
    if values.null_count and not column.nullable:
        row = values.is_null().index(True).as_py()
        raise InputError(f"{file}: column {column.name} is null in row {row}")
    if column.nullable:
        values = values.fill_null(MISSING if column.kind == "int" else "")
    result: npt.NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return result


def column_names(table: type[Table]) -> list[str]:
    """Names of a table's columns; the dataclass fields, checked to be the same list."""
    names = [column.name for column in table.COLUMNS]
    assert names == [f.name for f in fields(table)], table
    return names
