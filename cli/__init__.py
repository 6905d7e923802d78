"""The command line: one file per command, each thin over the API (DESIGN: command line)."""

from teraio.cli.group import main

__all__ = ["main"]
