"""Numbers as people see them."""

from __future__ import annotations

import pytest

from teraio.cli.tables import bar, duration, percent, size


@pytest.mark.parametrize(
    ("fraction", "text"),
    [(0.9734, "97.3 %"), (-1e-11, "0.0 %"), (None, "-"), (float("nan"), "-"), (1.0, "100.0 %")],
)
def test_percent(fraction: float | None, text: str) -> None:
    assert percent(fraction) == text


@pytest.mark.parametrize("unknown", [None, float("nan")])
def test_what_is_unknown_is_a_dash(unknown: float | None) -> None:
    assert (size(unknown), duration(unknown)) == ("-", "-")


@pytest.mark.parametrize(
    ("fraction", "text"),
    [(0.0, ""), (1 / 24, "█"), (1.5 / 24, "█▌"), (1.0, "█" * 24), (2.0, "█" * 24)],
)
def test_bar(fraction: float, text: str) -> None:
    assert bar(fraction) == text
