"""``teraio show``: the characteristics of a trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teraio.cli.command import Reporter, command
from teraio.cli.options import optional_hardware_option, plot_option, trace_argument
from teraio.cli.result import Result
from teraio.cli.tables import bar, duration, facts, grid, percent, size

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console
    from rich.table import Table

    from teraio.traces.characterise import Characteristics


@command("show", example="teraio show bert.trace --hardware g10 --plot memory.png")
@trace_argument
@optional_hardware_option
@plot_option
def show(reporter: Reporter, trace: Path, hardware: str | None, plot: Path | None) -> Result:
    """What a trace holds: memory, sizes of storages, and how long they lie idle.

    Active bytes are those that a kernel accesses. Live bytes are those that exist. The picture
    shows memory over the iteration, the share that is in use, and idle time against size.
    """
    from teraio.contracts.hardware import as_hardware
    from teraio.traces.characterise import characteristics
    from teraio.traces.trace import Trace

    loaded = Trace.load(trace)
    machine = as_hardware(hardware) if hardware is not None else None
    found = characteristics(loaded, machine)
    if plot is not None:
        from teraio.contracts.drawing import save_picture

        save_picture(loaded.plot_characteristics(machine).axes[0], plot)
    data: dict[str, Any] = {**found.to_dict(), "plot": plot}
    return Result(data, lambda console: _show(console, str(trace), found))


def _show(console: Console, title: str, found: Characteristics) -> None:
    most = f"{_of_gpu(found.active_max_bytes, found.active_max_fraction_of_gpu)} at kernel "
    rows = [
        ("kernels", f"{found.kernels:,}"),
        ("storages", f"{found.storages:,}"),
        ("accesses", f"{found.accesses:,}"),
        ("inactive periods", f"{found.inactive_periods:,}"),
        ("ideal iteration", duration(found.ideal_seconds)),
        ("peak live", f"{size(found.peak_live_bytes)} at kernel {found.peak_kernel}"),
        ("peak allocated", size(found.peak_allocated_bytes)),
        ("live, mean over time", size(found.live_time_mean_bytes)),
        ("active, mean over kernels", _active_mean(found)),
        (
            "active, mean over time",
            _of_gpu(found.active_time_mean_bytes, found.active_time_mean_fraction_of_gpu),
        ),
        ("active, at most", f"{most}{found.active_max_kernel} ({found.active_max_op})"),
        *_idle_rows(found),
    ]
    console.print(facts(title, rows))
    console.print()
    console.print(_kinds(found))
    console.print(_histogram("Storages by size", found.storage_sizes, "bytes", "storages"))
    title = "Inactive periods by length (bytes: sum of the storages that lie idle)"
    console.print(_histogram(title, found.inactive_lengths, "seconds", "periods"))


def _active_mean(found: Characteristics) -> str:
    shares = f"{percent(found.active_mean_fraction_of_peak)} of peak live"
    if found.active_mean_fraction_of_gpu is not None:
        shares += f", {percent(found.active_mean_fraction_of_gpu)} of the GPU"
    return f"{size(found.active_mean_bytes)} ({shares})"


def _of_gpu(num_bytes: float, fraction: float | None) -> str:
    share = f" ({percent(fraction)} of the GPU)" if fraction is not None else ""
    return size(num_bytes) + share


def _idle_rows(found: Characteristics) -> Iterator[tuple[str, str]]:
    large = found.large_storages
    share = percent(large.storage_fraction)
    yield "storages of 10 MB to 1 GB", f"{large.storages:,} ({share} of all)"
    if large.storages:
        of_storages = percent(large.long_idle_storage_fraction)
        text = f"{of_storages} of them"
        if large.periods:
            of_periods = percent(large.long_period_fraction)
            median = duration(large.median_period_seconds)
            text += f", {of_periods} of their periods (median {median})"
        yield "  idle 10 ms or more at once", text
    if found.movable_period_fraction is not None:
        share = percent(found.movable_period_fraction)
        of_bytes = percent(found.movable_bytes_fraction)
        text = f"{share} of periods, {of_bytes} of their bytes"
        yield "long enough for the SSD and back", text


def _kinds(found: Characteristics) -> Table:
    peak_bytes = max(1, found.peak_live_bytes)
    rows = [
        (kind.replace("_", " "), size(num_bytes), percent(num_bytes / peak_bytes), bar_text)
        for kind, num_bytes in found.kind_bytes_at_peak.items()
        if (bar_text := bar(num_bytes / peak_bytes)) or num_bytes
    ]
    return _with_bars(grid("Live bytes at the peak", ("kind", "bytes", "share", ""), rows))


def _histogram(title: str, frame: pd.DataFrame, unit: str, counted: str) -> Table:
    format_edge = size if unit == "bytes" else duration
    most = max(1, int(frame[counted].max())) if len(frame) else 1
    rows = []
    for record in frame.to_dict("records"):
        lower, upper = record[f"from_{unit}"], record[f"to_{unit}"]
        label = "0" if upper == 0 else f"{format_edge(lower)} to {format_edge(upper)}"
        count = record[counted]
        rows.append((label, f"{count:,}", size(record["total_bytes"]), bar(count / most)))
    return _with_bars(grid(title, (unit, counted, "bytes", ""), rows))


def _with_bars(table: Table) -> Table:
    table.columns[-1].justify = "left"
    return table
