"""``teraio probe``: measure this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from teraio.cli.command import Reporter, command
from teraio.cli.options import Size, output_option, plot_option
from teraio.cli.probe_tables import show_measurements
from teraio.cli.result import Result

if TYPE_CHECKING:
    from teraio.executor import Measurements


class Sizes(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.5
    """Sizes with commas between them: ``1MiB,64MiB``."""

    name = "sizes"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Bytes of each."""
        return tuple(Size().convert(text, param, ctx) for text in value.split(","))


@command(
    "probe",
    example="teraio probe -o hardware.toml --device cuda --directory /mnt/nvme0 "
    "--directory /mnt/nvme1",
)
@output_option("The hardware file to write, e.g. hardware.toml.", required=False)
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    help="What plays the GPU: cpu, cuda (all GPUs) or cuda:N.",
)
@click.option(
    "--directory",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A folder on an SSD to measure; again for each further SSD [default: a temporary one].",
)
@click.option("--stripe", is_flag=True, help="All directories together are one striped device.")
@click.option("--quick", is_flag=True, help="Fewer and smaller transfers, in a few seconds.")
@click.option(
    "--sizes", type=Sizes(), help="Sizes of transfers, e.g. 1MiB,64MiB [default: 256KiB to 256MB]."
)
@click.option(
    "--sustained",
    type=float,
    metavar="SECONDS",
    help="Write to each SSD for so long [default: 60; 0 with --quick].",
)
@click.option(
    "--host-memory", type=Size(), help="Touch so much host memory; it becomes the host tier."
)
@plot_option
def probe(
    reporter: Reporter,
    output: Path | None,
    device: str,
    directory: tuple[Path, ...],
    stripe: bool,
    quick: bool,
    sizes: tuple[int, ...] | None,
    sustained: float | None,
    host_memory: int | None,
    plot: Path | None,
) -> Result:
    """Measure memory, rates and latencies of this machine; --hardware takes the file.

    Rates are fitted to transfers of many sizes: seconds = latency + bytes / rate. Each SSD is
    written to for a minute, because drives are fast only until their cache is full.
    """
    from teraio.executor import measure_machine

    with reporter.progress("Measuring") as progress:
        measured = measure_machine(
            device=device,
            directory=directory or None,
            stripe=stripe,
            quick=quick,
            sizes=sizes,
            sustained=sustained,
            host_memory=host_memory,
            progress=progress,
        )
    if output is not None:
        measured.hardware.save(output)
    if plot is not None:
        _draw(measured, plot)
    return Result(measured.to_dict(), lambda console: show_measurements(console, output, measured))


def _draw(measured: Measurements, file: Path) -> None:
    from teraio.contracts.drawing import save_picture
    from teraio.executor.probing.plot_measurements import plot_measurements

    save_picture(plot_measurements(measured), file)
