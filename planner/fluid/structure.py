"""What rows of the fluid program are about, for whoever takes it apart."""

from __future__ import annotations

from typing import NamedTuple

from teraio.contracts.table import IntArray


class RowBlock(NamedTuple):
    """Rows of one kind, and the slot or the gap that each of them is about."""

    rows: IntArray
    about: IntArray


class Span(NamedTuple):
    """Variables, and the slots (first, last], unrolled, at whose start their bytes are counted."""

    columns: IntArray
    first: IntArray
    last: IntArray


class Anchor(NamedTuple):
    """A row (4): ``levels`` and ``balances`` are columns, and rows (1) to (3), per slot; the row
    says that the levels add up to what spans the first slot's start.
    """

    row: IntArray
    levels: list[IntArray]
    balances: list[IntArray]
    spans: list[Span]
