"""Benchmarks keep what they have found, and go on from there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from teraio.contracts.hardware import Hardware

if TYPE_CHECKING:
    from benchmarks.h200_training import run_told
    from benchmarks.partial_results import Findings, kept
else:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
    from h200_training import run_told
    from partial_results import Findings, kept

    sys.path.remove(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import torch


def test_what_was_found_before_an_interruption_is_not_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "found.json"
    findings = Findings(path, {"steps": 3, "sizes": (1, 2)})
    assert findings.find("plain", lambda: [0.1, float("inf")]) == [0.1, float("inf")]
    with pytest.raises(KeyboardInterrupt):
        findings.find("run", interrupted)
    assert "run" not in findings
    again = Findings(path, {"steps": 3, "sizes": (1, 2)})
    assert again.find("plain", interrupted) == [0.1, float("inf")]
    again.add("plain", [0.2])
    assert json.loads(path.read_text())["plain"] == [0.2]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def interrupted() -> list[float]:
    """A measurement that does not end."""
    raise KeyboardInterrupt


def test_what_was_found_of_another_subject_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    Findings(path, {"steps": 3}).add("plain", 1.0)
    other = Findings(path, {"steps": 4})
    assert "plain" not in other
    assert other.get("plain", None) is None
    assert Findings(None, {"steps": 3}).find("plain", lambda: 2.0) == 2.0


def test_what_is_kept_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "hardware.toml"
    made = kept(path, Hardware.load, lambda: Hardware.preset("h200"))
    assert kept(path, Hardware.load, lambda: Hardware.preset("cpu")) == made
    assert kept(None, Hardware.load, lambda: Hardware.preset("cpu")) == Hardware.preset("cpu")


def test_iterations_are_told_of_in_order_one_behind() -> None:
    log: list[str] = []

    def step(number: int) -> torch.Tensor:
        log.append(f"step {number}")
        return torch.tensor(float(number))

    losses, seconds = run_told(step, 3, "cpu", lambda number, _: log.append(f"told {number}"))
    assert log == ["step 0", "step 1", "told 0", "step 2", "told 1", "told 2"]
    assert [float(loss) for loss in losses] == [0, 1, 2]
    assert len(seconds) == 3
    assert min(seconds) >= 0
    assert run_told(step, 0, "cpu", lambda *_: None) == ([], [])
