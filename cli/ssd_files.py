"""The SSD tier's files on the command line: where they lie, what serves them, how fast it was."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from teraio.cli.tables import size
from teraio.units import format_rate

if TYPE_CHECKING:
    from teraio.executor.stores import FileUse

ssd_path_option = click.option(
    "--ssd-path",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Folder for offloaded storages; given more than once, they are striped over all.",
)

ssd_backend_option = click.option(
    "--ssd-backend",
    type=click.Choice(["auto", "gds", "file"]),
    default="auto",
    show_default=True,
    help="What serves the SSD files: kvikio (GPUDirect Storage), system calls, or the faster one.",
)


def file_facts(use: FileUse) -> dict[str, object]:
    """For ``--json``."""
    return {
        "device": use.device,
        "path": use.path,
        "backend": use.backend,
        "read_bytes": use.read_bytes,
        "write_bytes": use.write_bytes,
        "read_bytes_per_second": use.read_rate,
        "write_bytes_per_second": use.write_rate,
    }


def file_line(use: FileUse) -> str:
    """For people."""
    rates = [
        f"{verb} {size(nbytes)} at {format_rate(rate)}"
        for verb, nbytes, rate in (
            ("read", use.read_bytes, use.read_rate),
            ("wrote", use.write_bytes, use.write_rate),
        )
        if rate is not None
    ]
    return f"{use.backend}: {', '.join(rates) or 'not used'}"
