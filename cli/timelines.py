"""Timelines on the command line: written to files, shown as an account of the iteration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from teraio.cli.tables import bar, duration, facts, grid, percent, size

if TYPE_CHECKING:
    from rich.console import Console

    from teraio.contracts.timeline import Timeline


def write_timeline(
    timeline: Timeline,
    file: Path | None,
    plot: Path | None = None,
    kernel_names: Sequence[str] | None = None,
    storage_names: Sequence[str] | None = None,
) -> None:
    """Write the files that were asked for; ``file`` is Perfetto JSON or a timeline bundle."""
    if file is not None and file.suffix == ".json":
        from teraio.contracts.perfetto import write_perfetto

        write_perfetto(timeline, file, kernel_names=kernel_names, storage_names=storage_names)
    elif file is not None:
        timeline.save(file)
    if plot is not None:
        from teraio.contracts.drawing import save_picture

        save_picture(timeline.plot(), plot)


def show_timeline(console: Console, title: str, timeline: Timeline) -> None:
    """The account of an iteration, and what each channel carried."""
    metadata = timeline.metadata
    total = metadata.iteration_seconds
    cycle = "" if metadata.cycle_iterations == 1 else f", mean of {metadata.cycle_iterations}"
    steady = "" if metadata.steady else ", not steady"
    rows = [
        ("iteration", duration(total) + cycle + steady),
        ("ideal iteration", duration(metadata.ideal_seconds)),
        ("fraction of ideal", percent(metadata.ideal_seconds / total if total else None)),
        ("peak on the GPU", f"{size(metadata.peak_gpu_bytes)} of {size(metadata.capacity_bytes)}"),
        ("demand fetches", f"{metadata.demand_fetches:,} ({size(metadata.demand_fetch_bytes)})"),
        ("evictions", f"{metadata.evictions:,} ({size(metadata.eviction_bytes)})"),
    ]
    if metadata.source == "simulated":
        rows.append(("simulating took", duration(metadata.simulating_seconds)))
    console.print(facts(title, rows))
    console.print()
    account = [
        (name.replace("_", " "), duration(seconds), percent(seconds / total), bar(seconds / total))
        for name, seconds in timeline.account.items()
        if total
    ]
    table = grid("Where the iteration goes", ("", "time", "share", ""), account)
    table.columns[-1].justify = "left"
    console.print(table)
    channels = [
        (name, size(metadata.channel_bytes.get(name)), percent(busy), bar(busy))
        for name, busy in metadata.channel_utilisation.items()
    ]
    if channels:
        table = grid("Channels", ("channel", "bytes", "busy", ""), channels)
        table.columns[-1].justify = "left"
        console.print(table)
