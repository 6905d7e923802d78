"""A trace small enough to check by hand, and the command line as a function."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from teraio.cli import main
from teraio.contracts.plan import Accesses
from teraio.traces.trace import Kernels, Storages, Trace, TraceMetadata

MB = 10**6
KERNEL_SECONDS = 0.01


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables as wide as in a pipe, whatever earlier tests of the process left behind."""
    monkeypatch.delenv("COLUMNS", raising=False)


def _small_trace() -> Trace:
    """Three layers of 40 MB activations over a 20 MB weight: 140 MB live at the turn, kernels 2, 3.

    Kernels 0..2 go forward and make activations 1..3, kernels 3..5 go backward and free 3, 2, 1,
    kernel 6 updates the weight.
    """
    phases = ["forward"] * 3 + ["backward"] * 3 + ["optimizer"]
    kernels = [
        (k, f"op{k}", "", phase, 0, KERNEL_SECONDS, 0.0, 0, k, 0, "", None, None)
        for k, phase in enumerate(phases)
    ]
    storages: list[tuple[object, ...]] = [
        (0, 20 * MB, 20 * MB, "parameter", "weight", None, None, None, "", True)
    ]
    storages += [
        (i, 40 * MB, 40 * MB, "activation", "", i - 1, 0, 6 - i, "", True) for i in (1, 2, 3)
    ]
    accesses = [(0, 0, True, False), (0, 1, False, True)]
    accesses += [(1, 1, True, False), (1, 2, False, True), (2, 2, True, False), (2, 3, False, True)]
    accesses += [(3, 3, True, False), (4, 2, True, False), (5, 1, True, False), (6, 0, True, True)]
    return Trace(
        kernels=Kernels.from_rows(kernels),
        storages=Storages.from_rows(storages),
        accesses=Accesses.from_rows(accesses),
        metadata=TraceMetadata(source="imported", model="three layers"),
    )


@pytest.fixture
def small_trace() -> Trace:
    return _small_trace()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_trace: Trace) -> Path:
    """A working directory that holds ``small.trace``."""
    small_trace.save(tmp_path / "small.trace")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def teraio() -> Callable[..., Result]:
    """Run ``teraio`` with the given words."""

    def run(*words: str) -> Result:
        return CliRunner().invoke(main, list(words), prog_name="teraio")

    return run


@pytest.fixture
def teraio_json(teraio: Callable[..., Result]) -> Callable[..., Any]:
    """Run ``teraio ... --json`` and return its object; fails unless stdout is one JSON object."""

    def run(*words: str, exit_code: int = 0) -> Any:
        result = teraio(*words, "--json")
        assert result.exit_code == exit_code, result.output
        data = json.loads(result.stdout)
        assert isinstance(data, dict)
        return data

    return run
