"""What ``teraio probe`` shows: devices, rates by size, slowdowns of kernels, and remarks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from teraio.cli.tables import duration, grid, percent, size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from teraio.contracts.hardware import Hardware, Rates
    from teraio.executor.probing.measurements import MeasuredPath, Measurements


def show_measurements(console: Console, output: Path | None, measured: Measurements) -> None:
    """Print the devices of the hardware file, then the tables behind them."""
    hardware = measured.hardware
    gpus = ", ".join(f"{gpu.name} ({size(gpu.memory_bytes)})" for gpu in hardware.gpu)
    console.print(f"{output or 'not saved (no -o)'}: {gpus}")
    headings = ("device", "read / write", "both at once", "latency")
    console.print(grid("", headings, _devices(hardware)))
    for path in measured.paths:
        console.print(_title(path, names_gpu=len(hardware.gpu) > 1))
        console.print(_by_size(path))
    if measured.slowdowns:
        rows = [
            (kind, *(f"x {x:.3f}" for x in (slowdown.read, slowdown.write, slowdown.both)))
            for kind, slowdown in measured.slowdowns.items()
        ]
        headings = ("kernels while", "it reads", "it writes", "it does both")
        console.print(grid("", headings, rows))
    for line in _remarks(measured):
        console.print(line)


def _devices(hardware: Hardware) -> Iterator[tuple[str, str, str, str]]:
    devices: list[tuple[str, Rates]] = [
        *((f"link {link.name}", link) for link in hardware.link),
        (f"host ({size(hardware.host.memory_bytes)})", hardware.host),
        *((f"ssd {ssd.name} ({size(ssd.capacity_bytes)})", ssd) for ssd in hardware.ssd),
    ]
    for name, rates in devices:
        yield (
            name,
            _rates(rates.read_rate, rates.write_rate),
            _rates(rates.duplex_read_rate, rates.duplex_write_rate),
            duration(rates.latency_seconds),
        )


def _title(path: MeasuredPath, *, names_gpu: bool) -> str:
    worst = path.fit.worst(path.timings)
    where = f"{path.device}, GPU {path.gpu}" if names_gpu else path.device
    return (
        f"{where}, through {path.backend}: latency + bytes / rate is off by "
        f"{percent(path.fit.typical_misfit(path.timings))}, at most "
        f"{percent(abs(path.worst_misfit))} ({worst.kind}, {size(worst.nbytes)})"
    )


def _by_size(path: MeasuredPath) -> Table:
    rates: dict[int, dict[str, float]] = {}
    for timing in path.timings:
        rates.setdefault(timing.nbytes, {})[timing.kind] = timing.rate
    rows = [
        (
            size(nbytes),
            _rates(of_kind["read"], of_kind["write"]),
            _rates(of_kind["duplex_read"], of_kind["duplex_write"]),
        )
        for nbytes, of_kind in rates.items()
    ]
    return grid("", ("transfers of", "read / write", "both at once"), rows)


def _remarks(measured: Measurements) -> Iterator[str]:
    for writes in measured.sustained:
        rates = [rate for _, rate in writes.over_time()]
        yield (
            f"{writes.device} written for {writes.end_seconds[-1]:.0f} s "
            f"({size(writes.total_bytes[-1])}): {size(rates[0])}/s at first, "
            f"{size(writes.rate)}/s in the long run, {size(min(rates))}/s at worst"
        )
    for gpu, node in enumerate(measured.hardware.host.numa_nodes):
        yield f"{measured.hardware.gpu[gpu].name} (GPU {gpu}) is on memory node {node}"
    locked_bytes = measured.limits.locked_bytes
    if locked_bytes is not None:
        yield f"locked memory (ulimit -l): {size(locked_bytes)}, which CUDA's pinning ignores"
    yield from measured.notes


def _rates(read: float, write: float) -> str:
    return f"{size(read)}/s / {size(write)}/s"
