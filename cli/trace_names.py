"""What timelines call the kernels and storages of a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from teraio.traces.trace import Trace


def kernel_names(trace: Trace) -> list[str]:
    """Operators, by kernel."""
    return [str(op) for op in trace.kernels.op]


def storage_names(trace: Trace) -> list[str]:
    """Names, or kind and row where there is none, by storage."""
    names = zip(trace.storages.name, trace.storages.kind, strict=True)
    return [name or f"{kind} {index}" for index, (name, kind) in enumerate(names)]
