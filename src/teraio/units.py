"""Bytes, rates and seconds: parsed from what people write, formatted for people to read.

Inside teraio every quantity is in bytes, bytes per second or seconds, and its name says so.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

from teraio.errors import InputError

_FACTORS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "pb": 10**15,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "pib": 2**50,
}
_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*(/\s*s)?\s*", re.I)

PICOSECONDS_PER_SECOND = 10**12


def _parse(value: int | float | str, field: str, *, is_rate: bool) -> Decimal:
    example = "16GB/s" if is_rate else "94GB or 80GiB"
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise InputError(f"{field}: expected a number or text such as {example}, got {value!r}")
    if isinstance(value, str):
        match = _QUANTITY.fullmatch(value)
        factor = _FACTORS.get(match[2].lower()) if match else None
        if match is None or factor is None or (match[3] and not is_rate):
            raise InputError(f"{field}: cannot read {value!r}; write it as {example}")
        number = Decimal(match[1]) * factor
    else:
        number = Decimal(value)
    if not math.isfinite(float(number)) or number < 0:
        raise InputError(f"{field}: must be finite and not negative, got {value!r}")
    return number


def parse_bytes(value: int | float | str, field: str = "size") -> int:
    """Bytes from ``94GB`` (10^9), ``80GiB`` (2^30) or a plain number of bytes.

    Raises InputError, naming ``field``, for anything else.
    """
    return round(_parse(value, field, is_rate=False))


def parse_rate(value: int | float | str, field: str = "rate") -> float:
    """Bytes per second from ``16GB/s``, ``16GB`` or a plain number; see :func:`parse_bytes`."""
    return float(_parse(value, field, is_rate=True))


def format_bytes(num_bytes: float) -> str:
    """``1.50 GB`` for 1.5e9 bytes: decimal units, three significant digits."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(num_bytes) < 999.5 or unit == "TB":
            digits = 0 if unit == "B" else max(0, 2 - len(str(int(abs(num_bytes)))) + 1)
            return f"{num_bytes:.{digits}f} {unit}"
        num_bytes /= 1000
    raise AssertionError("unreachable")


def format_rate(bytes_per_second: float) -> str:
    """``16.0 GB/s`` for 16e9 bytes per second."""
    return f"{format_bytes(bytes_per_second)}/s"


def format_seconds(seconds: float) -> str:
    """``7.30 s``, ``27.3 ms`` or ``273 us``: three digits in the unit that reads best."""
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        value = seconds * factor
        if abs(value) >= 1 or unit == "us":
            digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
            return f"{value:.{digits}f} {unit}"
    raise AssertionError("unreachable")


def to_picoseconds(seconds: float) -> int:
    """Integer picoseconds, the clock of the simulator, in which equality of states is exact."""
    return round(seconds * PICOSECONDS_PER_SECOND)
