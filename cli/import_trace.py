"""``teraio import``: a trace of what another tool wrote."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import click

from teraio.cli.command import Reporter, command
from teraio.cli.options import INPUT_PATH, output_option
from teraio.cli.result import Result
from teraio.cli.trace_facts import trace_result

if TYPE_CHECKING:
    from teraio.traces.trace import Trace


@command("import", example="teraio import g10 BERT_Base-256.json.gz -o bert.trace")
@click.argument("format_name", metavar="FORMAT", type=click.Choice(["g10"]))
@click.argument("file", metavar="FILE", type=INPUT_PATH)
@output_option("The trace to write, e.g. bert.trace.")
def import_trace(reporter: Reporter, format_name: str, file: Path, output: Path) -> Result:
    """Make a trace of a file that another tool wrote.

    FORMAT is g10: the normalised traces of the G10 artifact (MICRO 2023), as .json.gz.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trace = _import(format_name, file)
    trace.save(output)
    notes = [*trace.metadata.known_differences, *(str(warning.message) for warning in caught)]
    return trace_result(trace, output, {"warnings": notes})


def _import(format_name: str, file: Path) -> Trace:
    from teraio.traces.importers.g10 import import_g10

    importers = {"g10": import_g10}
    return importers[format_name](file)
