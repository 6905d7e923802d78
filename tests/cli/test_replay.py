"""``teraio replay`` on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from teraio.contracts.timeline import Timeline

SMALL = ("--scale", "0.05", "--iterations", "1")


@pytest.fixture
def planned(folder: Path, teraio_json: Callable[..., Any]) -> Path:
    """A folder with ``small.trace`` and ``small.plan``, which moves 60 MB each way."""
    options = ("--hardware", "cpu", "--gpu-memory", "90MB", "--host-memory", "500MB")
    teraio_json("plan", "small.trace", *options, "--planner", "greedy", "-o", "small.plan")
    return folder


def test_keys_are_those_of_simulate_and_the_replays_own(
    planned: Path, teraio_json: Callable[..., Any]
) -> None:
    """Both halves: measured under the keys of ``simulate``, predicted beside."""
    simulated = teraio_json("simulate", "small.trace", "small.plan")
    replayed = teraio_json("replay", "small.trace", "small.plan", *SMALL)
    assert simulated.keys() <= replayed.keys()
    assert replayed["predicted_seconds"] == pytest.approx(
        0.05 * simulated["iteration_seconds"], rel=0.2
    )
    assert replayed["ideal_seconds"] == pytest.approx(0.05 * simulated["ideal_seconds"])
    assert replayed["iteration_seconds"] >= 0.9 * replayed["ideal_seconds"]
    assert replayed["moves_found"] == replayed["moves_planned"] == 2
    assert replayed["transfers_checked"] > 0
    assert replayed["scale"] == 0.05
    (file,) = replayed["ssd_files"]
    assert file["write_bytes"] == 0


def test_people_see_both_and_that_it_was_scaled(
    planned: Path, teraio: Callable[..., Result]
) -> None:
    result = teraio("replay", "small.trace", "small.plan", *SMALL)
    assert result.exit_code == 0, result.output
    for text in ("Beside the simulator", "stall, memory", "2 of 2", "times 0.05", "all right"):
        assert text in result.stdout


def test_without_a_plan_storages_are_paged(folder: Path, teraio_json: Callable[..., Any]) -> None:
    options = ("--hardware", "cpu", "--gpu-memory", "90MB", "--host-memory", "500MB", *SMALL)
    data = teraio_json("replay", "small.trace", *options, "--verify", "full")
    assert data["evictions"] > 0
    assert data["moves_planned"] == 0


def test_timeline_and_picture_are_written(planned: Path, teraio_json: Callable[..., Any]) -> None:
    files = ("--timeline", "replay.timeline", "--plot", "replay.png")
    data = teraio_json("replay", "small.trace", "small.plan", *SMALL, *files)
    assert (data["timeline"], data["plot"]) == ("replay.timeline", "replay.png")
    timeline = Timeline.load(planned / "replay.timeline")
    assert timeline.metadata.source == "measured"
    assert int((timeline.events.what == "kernel").sum()) == 7
    assert (planned / "replay.png").stat().st_size > 1000
    teraio_json("replay", "small.trace", "small.plan", *SMALL, "--timeline", "replay.json")
    names = {
        event["name"] for event in json.loads((planned / "replay.json").read_text())["traceEvents"]
    }
    assert "op3" in names


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("small.trace",), "--hardware is needed"),
        (("small.trace", "small.plan", "--device", "tpu"), "--device"),
        (("small.trace", "small.plan", "--scale", "0"), "--scale"),
        (("small.trace", "small.plan", "--scale", "1.5"), "--scale"),
        (("small.trace", "small.plan", "--iterations", "0"), "--iterations"),
        (("small.trace", "small.plan", "--host-memory", "1MB"), "host_memory"),
        (("small.trace", "absent.plan"), "absent.plan"),
    ],
)
def test_bad_usage_is_named(
    planned: Path, teraio: Callable[..., Result], words: tuple[str, ...], message: str
) -> None:
    result = teraio("replay", *words)
    assert result.exit_code == 2
    assert message in result.stderr
