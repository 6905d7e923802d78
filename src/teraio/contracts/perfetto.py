"""Timelines as Chrome trace JSON, which ui.perfetto.dev and chrome://tracing open.

One process per rank, one thread per lane (compute, stalls, each channel), one counter for GPU
memory. Times are microseconds, the unit of the format.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from teraio.contracts.output import replacing_file
from teraio.contracts.table import MISSING
from teraio.contracts.timeline import Timeline

_MICROSECONDS = 1e6
_COMPUTE, _STALLS, _FIRST_CHANNEL = 0, 1, 2


def write_perfetto(
    timeline: Timeline,
    path: str | Path,
    *,
    kernel_names: Sequence[str] | None = None,
    storage_names: Sequence[str] | None = None,
) -> None:
    """Write the file, atomically. Names, by index, replace ``kernel 12`` and ``storage 5``.

    Raises InputError if something that is not teraio's stands at ``path``.
    """
    head = {"generator": "teraio", "source": timeline.metadata.source}
    with replacing_file(Path(path)) as temporary, temporary.open("w") as file:
        file.write(f'{{"otherData": {json.dumps(head)}, "displayTimeUnit": "ms", "traceEvents": [')
        separator = "\n"
        for event in trace_events(timeline, kernel_names, storage_names):
            file.write(separator + json.dumps(event, allow_nan=False))
            separator = ",\n"
        file.write("\n]}\n")


def trace_events(
    timeline: Timeline,
    kernel_names: Sequence[str] | None = None,
    storage_names: Sequence[str] | None = None,
) -> Iterator[dict[str, Any]]:
    """The events of the format, one after another: names of lanes first, then what happened."""
    events = timeline.events
    lanes = {name: _FIRST_CHANNEL + i for i, name in enumerate(sorted(set(events.channel) - {""}))}
    yield from _lane_names(sorted(set(events.rank.tolist())), lanes)
    names = [column.name for column in events.COLUMNS]
    columns = (getattr(events, name).tolist() for name in names)
    for values in zip(*columns, strict=True):
        row = dict(zip(names, values, strict=True))
        kernel = _name(kernel_names, row["kernel"], "kernel")
        storage = _name(storage_names, row["storage"], "storage")
        if row["what"] == "memory":
            yield _counter(row)
        elif row["what"] == "kernel":
            yield _span(row, _COMPUTE, kernel, "kernel", {})
        elif row["what"] == "stall":
            details = {"before": kernel, "storage": storage}
            yield _span(row, _STALLS, f"stall: {row['cause']}", "stall", details)
        else:
            details = {"storage": storage, "bytes": row["bytes"]}
            lane = lanes.get(row["channel"], _STALLS)
            yield _span(row, lane, f"{row['cause']} {storage}", "transfer", details)


def _span(
    row: dict[str, Any], lane: int, name: str, category: str, details: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": row["rank"],
        "tid": lane,
        "ts": row["start_seconds"] * _MICROSECONDS,
        "dur": (row["end_seconds"] - row["start_seconds"]) * _MICROSECONDS,
        "name": name,
        "cat": category,
        "args": {"iteration": row["iteration"], "kernel": row["kernel"], **details},
    }


def _counter(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "C",
        "pid": row["rank"],
        "ts": row["start_seconds"] * _MICROSECONDS,
        "name": "GPU memory",
        "args": {"bytes": row["bytes"]},
    }


def _lane_names(ranks: list[int], lanes: dict[str, int]) -> Iterator[dict[str, Any]]:
    names = {"compute": _COMPUTE, "stalls": _STALLS, **lanes}
    for rank in ranks:
        process = {"ph": "M", "pid": rank, "name": "process_name"}
        yield {**process, "args": {"name": f"rank {rank}"}}
        for name, lane in names.items():
            thread = {"ph": "M", "pid": rank, "tid": lane}
            yield {**thread, "name": "thread_name", "args": {"name": name}}
            yield {**thread, "name": "thread_sort_index", "args": {"sort_index": lane}}


def _name(names: Sequence[str] | None, index: int, noun: str) -> str:
    if index == MISSING:
        return noun
    return (names[index] if names is not None else "") or f"{noun} {index}"
