"""Every notebook runs from top to bottom, and none carries outputs in the repository."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    """An empty list would make the tests below pass."""
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stripped(path: Path) -> None:
    """Outputs belong to a run, not to the repository."""
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            assert not cell.outputs
            assert cell.execution_count is None


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path) -> None:
    """Executed as a user would, in a fresh kernel."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=240, startup_timeout=240, kernel_name="python3")
    client.execute()
