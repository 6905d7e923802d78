"""The picture of a comparison: bars, the ideal line, labels."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

from teraio.planner.plot_comparison import plot_comparison


@pytest.fixture
def table() -> pd.DataFrame:
    """Ideal 4 s; greedy 5 s with 1 s of stall; a planner that found no plan."""
    columns = {
        "planner": ["ideal", "greedy", "hopeless"],
        "iteration_seconds": [4.0, 5.0, np.nan],
        "ideal_seconds": [4.0, 4.0, 4.0],
        "compute_alone_seconds": [4.0, 1.0, np.nan],
        "compute_overlapped_seconds": [0.0, 3.0, np.nan],
        "gap_seconds": [0.0, 0.0, np.nan],
        "stall_read_seconds": [0.0, 0.75, np.nan],
        "stall_memory_seconds": [0.0, 0.25, np.nan],
        "stall_host_seconds": [0.0, 0.0, np.nan],
    }
    return pd.DataFrame(columns)


def _lengths(axes: Axes) -> dict[str, list[float]]:
    return {
        str(bars.get_label()): [float(patch.get_width()) for patch in bars.patches]
        for bars in axes.containers
        if isinstance(bars, BarContainer)
    }


def test_bars_are_the_disjoint_account(table: pd.DataFrame) -> None:
    lengths = _lengths(plot_comparison(table))
    assert lengths == {
        "compute": [4.0, 1.0, 0.0],
        "compute beside transfers": [0.0, 3.0, 0.0],
        "stall: waits for a storage": [0.0, 0.75, 0.0],
        "stall: waits for memory": [0.0, 0.25, 0.0],
    }
    assert np.sum(list(lengths.values()), axis=0).tolist() == [4.0, 5.0, 0.0]


def test_ideal_is_a_line_and_labels_are_fractions_of_it(table: pd.DataFrame) -> None:
    axes = plot_comparison(table)
    (line,) = axes.lines
    assert np.asarray(line.get_xdata()).tolist() == [4.0, 4.0]
    assert [text.get_text().strip() for text in axes.texts] == [
        "100.0 % of ideal",
        "80.0 % of ideal",
        "no plan exists",
    ]
    assert [label.get_text() for label in axes.get_yticklabels()] == table["planner"].tolist()
    assert axes.get_xlabel() == "iteration (s)"


def test_rows_stand_in_the_order_of_the_table(table: pd.DataFrame) -> None:
    positions = plot_comparison(table).get_yticks()
    assert np.all(np.diff(positions) < 0)


def test_given_axes_are_drawn_into(table: pd.DataFrame) -> None:
    axes = Figure().add_subplot()
    assert plot_comparison(table, axes) is axes


def test_a_table_without_any_answer_still_draws(table: pd.DataFrame) -> None:
    axes = plot_comparison(table.iloc[[2]].assign(ideal_seconds=np.nan))
    assert [text.get_text().strip() for text in axes.texts] == ["no plan exists"]
