"""What the commands that make a trace say about it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teraio.cli.result import Result
from teraio.cli.tables import duration, facts, size

if TYPE_CHECKING:
    from rich.console import Console

    from teraio.traces.trace import Trace


def trace_result(trace: Trace, path: Path, extra: Mapping[str, Any] | None = None) -> Result:
    """The result of a command that wrote ``trace`` to ``path``."""
    data = {**trace_data(trace, path), **(extra or {})}

    def show(console: Console) -> None:
        rows = [
            ("kernels", f"{data['kernels']:,}"),
            ("storages", f"{data['storages']:,}"),
            ("accesses", f"{data['accesses']:,}"),
            ("ideal iteration", duration(trace.ideal_seconds)),
            ("peak live", size(trace.peak_live_bytes)),
            ("peak allocated", size(trace.peak_allocated_bytes)),
            *(("note", note) for note in (*data.get("warnings", ()), *data.get("notes", ()))),
        ]
        console.print(facts(str(path), rows))

    return Result(data, show)


def trace_data(trace: Trace, path: Path) -> dict[str, Any]:
    """What every command that wrote a trace tells machines about it."""
    return {
        "kernels": trace.num_kernels,
        "storages": len(trace.storages),
        "accesses": len(trace.accesses),
        "ideal_seconds": trace.ideal_seconds,
        "peak_live_bytes": trace.peak_live_bytes,
        "peak_allocated_bytes": trace.peak_allocated_bytes,
        "file": str(path),
    }
