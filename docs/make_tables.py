"""Rewrites the generated blocks of docs/*.md: tables' columns, commands' help texts, models.

A block stands between ``<!-- table: module.Class -->``, ``<!-- help: command -->`` or
``<!-- models: module -->`` and ``<!-- end -->``. Run ``python docs/make_tables.py``;
tests/cli/test_docs.py fails on stale blocks.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import click

from teraio.cli import main
from teraio.contracts.table import Column, Table

FOLDER = Path(__file__).parent
_BLOCK = re.compile(r"(<!-- (table|help|models): (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_HELP_WIDTH = 96


def table_text(name: str) -> str:
    """The columns of a table class, given by its full name, as a Markdown table."""
    module, _, class_name = name.rpartition(".")
    table: type[Table] = getattr(importlib.import_module(module), class_name)
    rows = ["| column | type | unit | meaning |", "|---|---|---|---|"]
    return "\n".join(rows + [_row(column) for column in table.COLUMNS]) + "\n"


def _row(column: Column) -> str:
    kind = {"int": "int64", "float": "float64", "bool": "bool", "text": "string"}[column.kind]
    null = ", null" if column.nullable else ""
    meaning = column.meaning.replace("|", "\\|")
    return f"| `{column.name}` | {kind}{null} | {column.unit} | {meaning} |"


def help_text(name: str) -> str:
    """The help of a command, as ``teraio NAME --help`` prints it."""
    settings = {**main.context_settings, "terminal_width": _HELP_WIDTH}
    group = click.Context(main, info_name="teraio", **settings)
    command = main.get_command(group, name)
    if command is None:
        raise KeyError(f"no command {name}")
    context = click.Context(command, parent=group, info_name=name)
    return f"```text\n{command.get_help(context)}\n```\n"


def models_text(module: str) -> str:
    """The models of a registry's module with their sizes, as a Markdown table."""
    models = importlib.import_module(module)
    rows = [
        "| model | parameters | layers | hidden | batch | sequence |",
        "|---|---|---|---|---|---|",
    ]
    for name, spec in models.MODELS.items():
        config, parameters = spec.config, models.num_parameters(spec.config)
        rows.append(
            f"| `{name}` | {parameters:,} | {config.layers} | {config.hidden} "
            f"| {spec.batch} | {spec.sequence} |"
        )
    return "\n".join(rows) + "\n"


def renewed(text: str) -> str:
    """The text of a document with all its generated blocks made anew."""
    makers = {"table": table_text, "help": help_text, "models": models_text}
    return _BLOCK.sub(lambda block: block[1] + makers[block[2]](block[3]) + block[5], text)


def renew_all() -> None:
    """Rewrite every document of this folder."""
    for file in sorted(FOLDER.glob("*.md")):
        file.write_text(renewed(file.read_text()))


if __name__ == "__main__":
    renew_all()
