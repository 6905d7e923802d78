"""The measured blocks of docs/paper.md: tables between ``<!-- measured: NAME -->`` and an end."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "paper.md"
IMAGES = ROOT / "docs" / "images"

_BLOCK = re.compile(r"(<!-- measured: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def renew(blocks: Mapping[str, str], document: Path = DOCUMENT) -> None:
    """Replace the measured blocks of a document by name; those without a new text stay."""
    text = _BLOCK.sub(
        lambda found: found[1] + blocks.get(found[2], found[3]) + found[4], document.read_text()
    )
    document.write_text(text)


def blocks_of(document: Path = DOCUMENT) -> dict[str, str]:
    """The measured blocks of a document by name."""
    return {found[2]: found[3] for found in _BLOCK.finditer(document.read_text())}


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def percent(fraction: float | None, digits: int = 0) -> str:
    """``45 %``, or a dash where unknown."""
    return "-" if fraction is None else f"{100 * fraction:.{digits}f} %"


def three_digits(fraction: float | None) -> str:
    """``0.862 %`` or ``1170 %``: three digits that matter, or a dash where unknown."""
    if fraction is None:
        return "-"
    value = 100 * fraction
    return f"{value:.0f} %" if value >= 100 else f"{value:.3g} %"


def span(fractions: Iterable[float | None]) -> str:
    """``22 to 50 %``: the least and the most of those known."""
    known = [100 * fraction for fraction in fractions if fraction is not None]
    return f"{min(known):.0f} to {max(known):.0f} %" if known else "-"


def operator(op: str) -> str:
    """An operator's name as code, without what all names share."""
    return f"`{op.removeprefix('aten.').removesuffix('.default')}`"
