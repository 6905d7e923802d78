"""Importers: traces that other tools recorded, turned into teraio's."""

from teraio.traces.importers.g10 import import_g10

__all__ = ["import_g10"]
