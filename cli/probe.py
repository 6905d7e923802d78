"""``teraio probe``: measure this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from teraio.cli.command import Reporter, command
from teraio.cli.options import output_option
from teraio.cli.result import Result
from teraio.cli.tables import duration, grid, size

if TYPE_CHECKING:
    from rich.console import Console

    from teraio.contracts.hardware import Hardware, Rates


@command("probe", example="teraio probe -o hardware.toml --directory /mnt/nvme")
@output_option("The hardware file to write, e.g. hardware.toml.", required=False)
@click.option("--device", default="cpu", show_default=True, help="What plays the GPU: cpu or cuda.")
@click.option(
    "--directory",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A folder on the SSD to measure [default: a temporary one].",
)
@click.option("--quick", is_flag=True, help="Fewer and smaller transfers, in a few seconds.")
def probe(
    reporter: Reporter, output: Path | None, device: str, directory: Path | None, quick: bool
) -> Result:
    """Measure memory, rates and latencies of this machine; --hardware takes the file."""
    from dataclasses import asdict

    from teraio.executor import probe as measure

    with reporter.progress("Measuring") as progress:
        hardware = measure(device=device, directory=directory, quick=quick, progress=progress)
    if output is not None:
        hardware.save(output)
    return Result(asdict(hardware), lambda console: _show(console, output, hardware))


def _show(console: Console, output: Path | None, hardware: Hardware) -> None:
    gpus = ", ".join(f"{gpu.name} ({size(gpu.memory_bytes)})" for gpu in hardware.gpu)
    devices: list[tuple[str, Rates]] = [
        *((f"link {link.name}", link) for link in hardware.link),
        (f"host ({size(hardware.host.memory_bytes)})", hardware.host),
        *((f"ssd {ssd.name} ({size(ssd.capacity_bytes)})", ssd) for ssd in hardware.ssd),
    ]
    rows = [
        (
            name,
            _rates(rates.read_rate, rates.write_rate),
            _rates(rates.duplex_read_rate, rates.duplex_write_rate),
            duration(rates.latency_seconds),
        )
        for name, rates in devices
    ]
    console.print(f"{output or 'not saved (no -o)'}: {gpus}")
    console.print(grid("", ("device", "read / write", "both at once", "latency"), rows))


def _rates(read: float, write: float) -> str:
    return f"{size(read)}/s / {size(write)}/s"
