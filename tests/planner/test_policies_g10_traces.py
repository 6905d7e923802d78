"""G10's traces: ours beside what was published, and its policies in our simulator."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from teraio.planner import plan
from teraio.traces.trace import Trace

ROOT = Path(__file__).resolve().parents[2]
OVERALL = ("overall_batchsize", "128", "3.2")


def published(folder: Path, trace: str, policy: str) -> float:
    """Fraction of ideal at the artifact's default machine."""
    rows = csv.DictReader((folder / "g10" / "expected_results.csv").read_text().splitlines())
    (fraction,) = {
        row["frac_ideal"]
        for row in rows
        if f"{row['model']}-{row['batch']}" == trace
        and row["policy"] == policy
        and (row["source"], row["host_mem_gib"], row["ssd_gbps"]) == OVERALL
    }
    return float(fraction)


@pytest.fixture
def g10_trace(shared_data: Path, import_g10: Callable[[Path], Trace]) -> Callable[[str], Trace]:
    """One of the artifact's traces by name."""
    return lambda name: import_g10(shared_data / "g10" / "derived" / f"{name}.json.gz")


@pytest.mark.parametrize("name", ["BERT_Base-256", "Inceptionv3-1024", "ResNet152-768"])
def test_g10_is_as_fast_here_as_its_authors_say(
    name: str, shared_data: Path, g10_trace: Callable[[str], Trace]
) -> None:
    """Within a point, where memory is not so short that pages and storages make a difference."""
    made = plan(g10_trace(name), "g10", planner="g10")
    assert made.fraction_of_ideal == pytest.approx(
        published(shared_data, name, "prefetch_lru"), abs=0.01
    )


@pytest.mark.parametrize(
    ("name", "above"),
    [("BERT_Base-256", 0.10), ("Inceptionv3-1280", 0.18), ("ResNet152-1280", 0.02)],
)
def test_flashneuron_is_no_slower_here(
    name: str, above: float, shared_data: Path, g10_trace: Callable[[str], Trace]
) -> None:
    """Its allocator never fragments here, and its backward pass waits for no offload."""
    made = plan(g10_trace(name), "g10", planner="flashneuron")
    theirs = published(shared_data, name, "FlashNeuron")
    assert theirs <= made.fraction_of_ideal <= theirs + above


def test_policies_stand_in_the_published_order(g10_trace: Callable[[str], Trace]) -> None:
    """On demand is slowest, then FlashNeuron, then G10, then the greedy planner."""
    trace = g10_trace("ResNet152-1280")
    order = ("on-demand", "flashneuron", "g10", "greedy")
    fractions = [plan(trace, "g10", planner=name).fraction_of_ideal for name in order]
    assert fractions == sorted(fractions)


def test_the_benchmark_shows_ours_at_least_as_fast_as_g10(shared_data: Path) -> None:
    """One row per published run, with the difference and the gap to the bound."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "benchmarks" / "g10_traces.py"), "--json"]
    command += ["--folder", str(shared_data / "g10"), "--planner", "greedy", "--only", "BERT"]
    output = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=240
    )
    rows = json.loads(output.stdout)["rows"]
    assert [row["trace"] for row in rows] == ["BERT_Base-128", "BERT_Base-256"]
    for row in rows:
        assert row["difference"] >= -1e-6
        assert row["difference"] == row["fraction_of_ideal"] - row["published"]
        assert row["gap"] >= 0
