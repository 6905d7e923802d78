"""The demonstration at toy size: the same chain, the same promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import teraio
from teraio.cli import main


@pytest.mark.slow
@pytest.mark.usefixtures("allocator_sees_all")
def test_demo_keeps_its_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit-identical, within the budget by the allocator's own events, every file readable."""
    from teraio.cli import demonstration

    sizes = {"vocabulary": 256, "hidden": 64, "intermediate": 176, "heads": 4, "layers": 3}
    monkeypatch.setattr(demonstration, "MODEL_SIZES", sizes)
    monkeypatch.setattr(demonstration, "SEQUENCE", 64)
    monkeypatch.setattr(demonstration, "MEASURED_STEPS", 2)
    folder = tmp_path / "demo"
    result = CliRunner().invoke(main, ["demo", "--json", "-o", str(folder)])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["bit_identical"] is True
    assert data["within_budget"] is True
    assert data["allocator_peak_bytes"] <= data["budget_bytes"]
    assert data["budget_bytes"] <= 0.51 * data["peak_without_offloading_bytes"]
    assert data["predicted_seconds"] > 0.999999 * data["ideal_seconds"]
    assert data["drift"] == data["demand_fetches"] == 0
    assert data["moves"] > 0
    trace = teraio.Trace.load(data["files"]["trace"])
    plan = teraio.Plan.load(data["files"]["plan"])
    verdict = teraio.verify(trace, plan)
    assert verdict.valid
    assert verdict.fits
    assert teraio.Timeline.load(data["files"]["measured"]).metadata.source == "measured"
    for name in ("memory_picture", "predicted_picture", "measured_picture"):
        assert Path(data["files"][name]).stat().st_size > 10_000


def test_demo_refuses_a_file_as_folder(tmp_path: Path) -> None:
    """``--output`` must be a folder."""
    (tmp_path / "taken").write_text("mine")
    result = CliRunner().invoke(main, ["demo", "-o", str(tmp_path / "taken")])
    assert result.exit_code == 2
    assert (tmp_path / "taken").read_text() == "mine"
