"""Tables for people: facts as name and value, and rows under headings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from teraio.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_BAR_WIDTH = 24
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def facts(title: str, rows: Iterable[tuple[str, str | Text]]) -> Table:
    """Two columns without rules: what, and how much."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    for name, value in rows:
        table.add_row(name, value)
    return table


def grid(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Rows under headings: the first column to the left, numbers to the right."""
    from rich import box
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    return table


def bar(fraction: float) -> str:
    """A bar of block characters, full width for 1.0."""
    eighths = round(min(max(fraction, 0.0), 1.0) * _BAR_WIDTH * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def percent(fraction: float | None) -> str:
    """``97.3 %``, or a dash where unknown."""
    if fraction is None or fraction != fraction:
        return "-"
    return f"{round(100 * fraction, 1) + 0.0:.1f} %"  # + 0.0: never "-0.0 %"


def size(num_bytes: float | None) -> str:
    """``1.50 GB``, or a dash where unknown."""
    return "-" if num_bytes is None or num_bytes != num_bytes else format_bytes(num_bytes)


def dollars(amount: float | None) -> str:
    """``$0.0123``: three significant digits, or a dash where unknown."""
    return "-" if amount is None or amount != amount else f"${_three_digits(amount)}"


def years(count: float | None) -> str:
    """``4.20 years``, ``for ever`` if infinite, or a dash where unknown."""
    if count is None or count != count:
        return "-"
    if math.isinf(count):
        return "for ever"
    return (
        f"{_three_digits(count)} years" if count >= 1 else f"{_three_digits(count * 365.25)} days"
    )


def _three_digits(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def duration(seconds: float | None) -> str:
    """``27.3 ms``, or a dash where unknown."""
    return "-" if seconds is None or seconds != seconds else format_seconds(seconds)
