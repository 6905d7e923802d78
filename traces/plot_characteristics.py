"""One picture of a trace: its memory over the iteration, how little is in use, how long idle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from teraio.contracts import drawing
from teraio.contracts.hardware import Hardware
from teraio.traces.plot_activity import plot_activity
from teraio.traces.plot_idleness import plot_idleness
from teraio.traces.plot_memory import plot_memory
from teraio.traces.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_characteristics(trace: Trace, hardware: Hardware | None = None) -> Figure:
    """Memory above; below it the active share (left) and the idle time by size (right).

    ``hardware`` adds the capacity of the rank's GPU and the speed of its first SSD.
    """
    rank = trace.metadata.rank
    capacity_bytes = hardware.gpu_of_rank(rank).memory_bytes if hardware is not None else None
    ssds = hardware.ssds_of_rank(rank) if hardware is not None else ()
    figure = drawing.new_figure(11.0, 8.2)
    above, below = figure.subfigures(2, 1, squeeze=False)[:, 0]
    left, right = below.subplots(1, 2)
    plot_memory(trace, capacity_bytes, above.add_subplot())
    plot_activity(trace, capacity_bytes, left)
    plot_idleness(trace, ssds[0] if ssds else None, right)
    return figure
