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
_STALL_COLOR = "terrible"


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
    columns = (getattr(events, column.name).tolist() for column in events.COLUMNS)
    for row in zip(*columns, strict=True):
        iteration, rank, what, kernel, storage, channel, start, end, num_bytes, cause = row
        if what == "memory":
            counter = {"name": "GPU memory", "ph": "C", "pid": rank, "ts": start * _MICROSECONDS}
            yield {**counter, "args": {"bytes": num_bytes}}
            continue
        kernel_name = _name(kernel_names, kernel, "kernel")
        storage_name = _name(storage_names, storage, "storage")
        event = {
            "ph": "X",
            "pid": rank,
            "ts": start * _MICROSECONDS,
            "dur": (end - start) * _MICROSECONDS,
            "args": {"iteration": iteration, "kernel": kernel},
        }
        if what == "kernel":
            event |= {"tid": _COMPUTE, "name": kernel_name, "cat": "kernel"}
        elif what == "stall":
            event |= {"tid": _STALLS, "name": f"stall: {cause}", "cat": "stall"}
            event |= {"cname": _STALL_COLOR}
            event["args"] |= {"storage": storage_name}
        else:
            event |= {"tid": lanes.get(channel, _COMPUTE), "name": f"{cause} {storage_name}"}
            event |= {"cat": cause or what}
            event["args"] |= {"storage": storage_name, "bytes": num_bytes}
        yield event


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
