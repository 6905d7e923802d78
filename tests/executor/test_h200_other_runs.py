"""The page of the benchmarks' runs that are no rows of a table: errors, bits, machines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.h200_other_runs import page
else:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
    from h200_other_runs import page

    sys.path.remove(str(Path(__file__).resolve().parents[2] / "benchmarks"))

PEAKS = {"max_memory_allocated": 39_500_000_000, "max_memory_reserved": 41_000_000_000}


def never_fitting(**figures: Any) -> dict[str, Any]:
    """What never_fits.py writes."""
    found = {
        "model": "llama3-8b",
        "tokens": [1, 2048],
        "made_on": "a GPU, torch 2.11",
        "state_bytes": 128_000_000_000,
        "gpu_memory": "40GB",
        "host_memory_bytes": 85_000_000_000,
        "ssd_bytes_written": {"ssd0": 10_000_000_000},
        "predicted_seconds": 9.5,
        "prediction_error": -0.05,
        "run": {"all_step_seconds": [31.0, 10.0], **PEAKS},
    }
    return found | figures


def rank(number: int, *, identical: bool) -> dict[str, Any]:
    """What two_gpus.py writes for a rank."""
    found = {
        "rank": number,
        "world_size": 2,
        "device": "a GPU",
        "python": "3.12",
        "teraio": "0.1.0",
        "torch": "2.11",
        "plain_seconds": 0.4,
        "executed_seconds": 0.5,
        "fraction_of_plain": 0.8,
        "predicted_seconds": 0.48,
        "prediction_error": -0.04 * number,
        "budget_bytes": 10**10,
        "bit_identical": identical,
        "executed": {"moves_found": 7, "moves_planned": 9, **PEAKS},
    }
    return {"subject": {}, "ddp": found}


def test_sections_are_those_of_the_files() -> None:
    text = page(
        [rank(0, identical=True), never_fitting(same_losses=True), rank(1, identical=False)]
    )
    lines = text.splitlines()
    titles = [line for line in lines if line.startswith("## ")]
    assert titles == ["## Models that never fit", "## Several ranks"]
    assert (
        "| llama3-8b, 1 x 2048 tokens | 128 GB | 40GB | 85.0 GB | 10.0 GB | 39.5 GB | 41.0 GB | "
        "31.0 s, 10.0 s | 9.50 s | -5.0 % | the same |"
    ) in lines
    assert "Error of the prediction: median 2.0 %, worst 4.0 %." in lines
    assert [line.split("|")[-2].strip() for line in lines if line.startswith("| ddp")] == [
        "identical",
        "DIFFERENT",
    ]
    assert "- 2 x a GPU, Python 3.12, teraio 0.1.0, torch 2.11" in lines
    assert lines.count("- a GPU, torch 2.11") == 1


def test_what_did_not_end_is_left_out_and_what_was_not_compared_is_said() -> None:
    unfinished = never_fitting()
    del unfinished["run"]
    text = page([unfinished, never_fitting(), never_fitting(same_losses=False)])
    assert text.count("| llama3-8b") == 2
    assert "| not run |" in text
    assert "| DIFFERENT |" in text
