"""Traces: what one training iteration does, kernel by kernel and storage by storage."""

from teraio.traces.lifetimes import (
    InactivePeriods,
    active_bytes,
    critical_pressure,
    inactive_periods,
    live_bytes,
)
from teraio.traces.trace import Calls, Kernels, Storages, Trace, TraceMetadata

__all__ = [
    "Calls",
    "InactivePeriods",
    "Kernels",
    "Storages",
    "Trace",
    "TraceMetadata",
    "active_bytes",
    "critical_pressure",
    "inactive_periods",
    "live_bytes",
]
