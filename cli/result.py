"""What a command hands back: an object for ``--json``, and how to show the same to people."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, is_dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_WIDTH = 120
"""Columns of a table that is written to a file or pipe, where no terminal gives a width."""


@dataclass(frozen=True)
class Result:
    """The outcome of a command: ``data`` for machines, ``show`` for people, the exit code."""

    data: Mapping[str, Any]
    show: Callable[[Console], None]
    exit_code: int = 0


def json_text(data: Mapping[str, Any]) -> str:
    """One JSON object: NaN and infinities as null, a DataFrame as ``{"rows": [...]}``."""
    return json.dumps(_plain(data), allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if hasattr(value, "to_dict") and hasattr(value, "columns"):
        return {"rows": [_plain(row) for row in value.to_dict("records")]}
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    return None if type(value).__name__ in ("NAType", "NaTType") else str(value)


def console(*, error: bool = False) -> Console:
    """A rich console on stdout or stderr, wide enough for our tables where there is no terminal."""
    from rich.console import Console

    stream = sys.stderr if error else sys.stdout
    plain = not stream.isatty() and "COLUMNS" not in os.environ
    width = PLAIN_WIDTH if plain else None
    return Console(file=stream, markup=False, emoji=False, highlight=False, width=width)


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send everything written to stdout, by Python or by other code of the process, to stderr."""
    sys.stdout.flush()
    saved = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
