"""Timelines as Chrome trace JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from teraio.contracts.perfetto import write_perfetto
from teraio.contracts.timeline import Events, Timeline, TimelineMetadata
from teraio.errors import InputError


@pytest.fixture
def timeline() -> Timeline:
    rows = [
        (0, 0, "kernel", 0, None, "", 0.0, 4.0, 0, ""),
        (0, 0, "stall", 1, 0, "ssd0 read", 4.0, 6.0, 0, "read"),
        (0, 0, "transfer", 1, 0, "ssd0 read", 3.0, 6.0, 512, "prefetch"),
        (0, 0, "memory", 0, None, "", 0.0, 4.0, 1024, ""),
    ]
    seconds: dict[str, Any] = dict.fromkeys(
        [
            "iteration_seconds",
            "ideal_seconds",
            "compute_alone_seconds",
            "compute_overlapped_seconds",
            "stall_read_seconds",
            "stall_memory_seconds",
            "stall_host_seconds",
            "gap_seconds",
        ],
        1.0,
    )
    metadata = TimelineMetadata(
        source="measured", cycle_iterations=1, steady=True, peak_gpu_bytes=1024, **seconds
    )
    return Timeline(events=Events.from_rows(rows), metadata=metadata)


def _read(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def _lane(events: list[dict[str, Any]], name: str) -> int:
    names = [e for e in events if e["name"] == "thread_name"]
    return next(int(e["tid"]) for e in names if e["args"]["name"] == name)


def test_events_are_microseconds_on_named_lanes(timeline: Timeline, tmp_path: Path) -> None:
    timeline.save_perfetto(tmp_path / "t.json")
    events = _read(tmp_path / "t.json")
    kernel, stall, transfer = (e for e in events if e["ph"] == "X")
    assert (kernel["name"], kernel["ts"], kernel["dur"]) == ("kernel 0", 0.0, 4e6)
    assert (stall["name"], stall["tid"]) == ("stall: read", _lane(events, "stalls"))
    assert (transfer["name"], transfer["ts"]) == ("prefetch storage 0", 3e6)
    assert transfer["tid"] == _lane(events, "ssd0 read")
    assert transfer["args"]["bytes"] == 512


def test_memory_is_a_counter(timeline: Timeline, tmp_path: Path) -> None:
    timeline.save_perfetto(tmp_path / "t.json")
    (counter,) = (e for e in _read(tmp_path / "t.json") if e["ph"] == "C")
    assert (counter["name"], counter["args"]) == ("GPU memory", {"bytes": 1024})


def test_names_of_the_trace_are_used_where_there_are_any(
    timeline: Timeline, tmp_path: Path
) -> None:
    names = {"kernel_names": ["aten.mm", ""], "storage_names": ["layer.weight"]}
    write_perfetto(timeline, tmp_path / "t.json", **names)
    events = [e["name"] for e in _read(tmp_path / "t.json") if e["ph"] == "X"]
    assert events == ["aten.mm", "stall: read", "prefetch layer.weight"]


def test_our_own_file_is_replaced_and_others_are_refused(
    timeline: Timeline, tmp_path: Path
) -> None:
    for _ in range(2):
        timeline.save_perfetto(tmp_path / "t.json")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(InputError, match="was not written by teraio"):
        timeline.save_perfetto(tmp_path / "other.json")
