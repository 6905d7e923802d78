"""From times of transfers by size to what Hardware says: ``latency + bytes / rate``.

One latency serves both directions, alone and together, as in Hardware and in the simulator, which
holds a channel for that long with each transfer. So it is what transfers in a row cost beyond their
bytes, fitted together with the rates: the sum of the absolute relative errors of all times is the
least, with half as long as bad as twice as long. Squares instead would let a few small transfers
that no latency describes (1 MiB in both directions at once on an H200 takes twice the time that
large ones suggest) bend the rates of large ones, which carry nearly all bytes, by five per cent.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from teraio.contracts.table import FloatArray

KINDS = ("read", "write", "duplex_read", "duplex_write")
"""Read alone, write alone, and each while the other runs."""


_ITERATIONS = 60
_LEAST_RATIO = 0.05
_SMALL_ERROR = 1e-3
"""Below that all errors count alike: it is less than any measurement tells."""


@dataclass(frozen=True)
class Timing:
    """Seconds that each of many transfers of ``nbytes`` in a row takes."""

    kind: str
    nbytes: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.nbytes / self.seconds


@dataclass(frozen=True)
class Fit:
    """Bytes per second, and seconds: the fields of ``contracts.hardware.Rates``."""

    read_rate: float
    write_rate: float
    duplex_read_rate: float
    duplex_write_rate: float
    latency_seconds: float

    def seconds(self, kind: str, nbytes: int) -> float:
        """What the simulator takes for a transfer on this device alone."""
        rate: float = getattr(self, f"{kind}_rate")
        return self.latency_seconds + nbytes / rate

    def misfit(self, timing: Timing) -> float:
        """Relative error of the predicted time: 0.1 where it is 10 % too long."""
        return self.seconds(timing.kind, timing.nbytes) / timing.seconds - 1

    def typical_misfit(self, timings: Sequence[Timing]) -> float:
        """Median of the absolute relative errors."""
        return statistics.median(abs(self.misfit(timing)) for timing in timings)

    def worst(self, timings: Sequence[Timing]) -> Timing:
        """The timing that the fit describes worst."""
        return max(timings, key=lambda timing: abs(self.misfit(timing)))


def fit_rates(timings: Sequence[Timing]) -> Fit:
    """Latency and rates that describe ``timings`` best. All four kinds must occur.

    A duplex rate above the solo one is noise, or the work of a cache, and is clipped.
    """
    kinds = np.array([KINDS.index(timing.kind) for timing in timings])
    nbytes = np.array([timing.nbytes for timing in timings], dtype=np.float64)
    seconds = np.array([timing.seconds for timing in timings])
    # Unknowns: the latency, then the seconds per byte of each kind.
    matrix = np.zeros((len(timings), 1 + len(KINDS)))
    matrix[:, 0] = 1 / seconds
    matrix[np.arange(len(timings)), 1 + kinds] = nbytes / seconds
    solution = _least_absolute_errors(matrix)
    if solution[0] < 0 or (solution[1:] <= 0).any() or len(set(nbytes)) == 1:
        solution = np.r_[0.0, _least_absolute_errors(matrix[:, 1:])]
    rates = {f"{kind}_rate": _rounded(1 / x) for kind, x in zip(KINDS, solution[1:], strict=True)}
    for kind in ("read_rate", "write_rate"):
        rates[f"duplex_{kind}"] = min(rates[f"duplex_{kind}"], rates[kind])
    return Fit(**rates, latency_seconds=_rounded(solution[0]))


def _least_absolute_errors(matrix: FloatArray) -> FloatArray:
    """x for which the sum of |log(matrix @ x)| is least, by reweighted least squares.

    Each entry of ``matrix @ x`` is a predicted time over the measured one.
    """
    # Bytes are many and the seconds of one are few: scaled, the numbers are of one size.
    scale = np.abs(matrix).max(axis=0)
    weights = np.ones(len(matrix))
    for _ in range(_ITERATIONS):
        scaled = np.linalg.lstsq(matrix / scale * weights[:, None], weights, rcond=None)[0]
        solution: FloatArray = scaled / scale
        ratios = np.maximum(matrix @ solution, _LEAST_RATIO)
        weights = 1 / np.sqrt(np.maximum(np.abs(ratios - 1), _SMALL_ERROR) * ratios)
    return solution


def _rounded(value: float) -> float:
    """Four significant digits: more would claim what no measurement gives."""
    return float(f"{value:.4g}")
