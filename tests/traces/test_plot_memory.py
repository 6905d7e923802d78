"""The picture of memory: what is drawn, not how it looks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch

from teraio.contracts.drawing import save_picture
from teraio.contracts.plan import Accesses
from teraio.errors import InputError
from teraio.traces import columns
from teraio.traces.trace import Kernels, Storages, Trace, TraceMetadata

GB = 10**9


def _trace(num_kernels: int) -> Trace:
    """A weight, and an activation alive from kernel 1 to the one before the last."""
    phases = ["forward" if k < num_kernels // 2 else "backward" for k in range(num_kernels)]
    kernels = [
        (k, "op", "", phases[k], 0, 1e-3, 0.0, 0, 0, 0, "", None, None) for k in range(num_kernels)
    ]
    storages = [
        (0, 2 * GB, 2 * GB, "parameter", "weight", None, None, None, "", True),
        (1, 3 * GB, 3 * GB, "activation", "", 1, 0, num_kernels - 2, "", True),
    ]
    accesses = [(0, 0, True, False), (1, 1, False, True), (num_kernels - 2, 1, True, False)]
    return Trace(
        kernels=Kernels.from_rows(kernels),
        storages=Storages.from_rows(storages),
        accesses=Accesses.from_rows(accesses),
        metadata=TraceMetadata(source="imported", model="a model"),
    )


def _areas(axes: Axes) -> dict[str, StepPatch]:
    return {str(p.get_label()): p for p in axes.patches if isinstance(p, StepPatch)}


def test_areas_are_stacked_in_gigabytes() -> None:
    axes = _trace(6).plot()
    areas = _areas(axes)
    assert list(areas) == ["parameter", "activation", "in use by the kernel"]
    top, _, bottom = areas["activation"].get_data()
    assert np.array_equal(bottom, [2] * 6)
    assert np.array_equal(top, [2, 5, 5, 5, 5, 2])
    active, edges, _ = areas["in use by the kernel"].get_data()
    assert np.array_equal(active, [2, 3, 0, 0, 3, 0])
    assert np.allclose(edges, np.arange(7))  # milliseconds


def test_axes_carry_units_and_a_legend_outside_the_data() -> None:
    axes = _trace(6).plot(4 * GB)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("ideal time (ms)", "GPU memory (GB)")
    legend = axes.get_legend()
    assert legend is not None
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts == ["capacity 4 GB", "in use by the kernel", "activation", "parameter"]
    assert axes.get_title(loc="left") == "a model"


def test_capacity_is_a_line_and_only_if_given() -> None:
    assert not _trace(6).plot().lines
    (line,) = _trace(6).plot(4 * GB).lines
    assert np.array_equal(line.get_ydata(), [4, 4])


def test_given_axes_are_drawn_into() -> None:
    axes = Figure().add_subplot()
    assert _trace(6).plot(axes=axes) is axes


def test_phases_are_named() -> None:
    assert [text.get_text() for text in _trace(6).plot().texts] == ["forward", "backward"]


def test_many_kernels_are_drawn_as_few_steps_that_keep_the_peak() -> None:
    trace = _trace(5 * columns.MAX_COLUMNS)
    top, edges, _ = _areas(trace.plot())["activation"].get_data()
    assert len(top) <= columns.MAX_COLUMNS
    assert top.max() == 5
    assert edges[-1] == pytest.approx(trace.ideal_seconds)


def test_all_times_zero_still_draws() -> None:
    trace = _trace(6)
    columns = {c.name: getattr(trace.kernels, c.name) for c in Kernels.COLUMNS}
    kernels = Kernels(**{**columns, "duration_seconds": np.zeros(6)})
    Trace(kernels, trace.storages, trace.accesses, trace.metadata).plot()


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_saved_pictures_are_not_empty_and_may_be_replaced(tmp_path: Path, suffix: str) -> None:
    """Each carries our mark, so that a second run may replace it."""
    path = tmp_path / f"memory{suffix}"
    for _ in range(2):
        save_picture(_trace(6).plot(), path)
    assert path.stat().st_size > 2000


def test_a_picture_of_somebody_else_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "memory.png"
    path.write_bytes(b"\x89PNG holiday")
    with pytest.raises(InputError, match="was not written by teraio"):
        save_picture(_trace(6).plot(), path)
