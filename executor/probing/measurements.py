"""What a probe has measured: the Hardware, and the tables that it was made from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from teraio.contracts.hardware import Hardware, Slowdown
from teraio.executor.probing.fitting import Fit, Timing
from teraio.executor.probing.limits import Limits
from teraio.executor.probing.links import Together
from teraio.executor.probing.sustained import SustainedWrites


@dataclass(frozen=True)
class MeasuredPath:
    """One way between a GPU and a device, by size of transfer, and what was fitted to it.

    ``device`` is named as in Hardware. ``backend`` is what carried the bytes: ``memory`` (pinned
    copies beside a GPU), or what the files of a store say: ``file`` (bounced through host memory),
    ``file buffered`` (no O_DIRECT there), ``gds``, ``gds-compat`` (without GPUDirect).
    """

    device: str
    backend: str
    gpu: int
    timings: tuple[Timing, ...]
    fit: Fit

    @property
    def worst_misfit(self) -> float:
        """The largest relative error of a time that the fit predicts, with its sign."""
        return self.fit.misfit(self.fit.worst(self.timings))

    def rows(self) -> Iterator[dict[str, Any]]:
        """The table: measured and predicted rates (bytes/s) by kind and size."""
        for timing in self.timings:
            yield {
                "device": self.device,
                "backend": self.backend,
                "gpu": self.gpu,
                "kind": timing.kind,
                "bytes": timing.nbytes,
                "rate": timing.rate,
                "fitted_rate": timing.nbytes / self.fit.seconds(timing.kind, timing.nbytes),
                "misfit": self.fit.misfit(timing),
            }


@dataclass(frozen=True)
class Measurements:
    """Hardware as measured, and how it came about.

    ``slowdowns`` is by kind of kernel; ``together`` the links of several GPUs
    (None for one); ``notes`` are
    sentences for whoever reads the result.
    """

    hardware: Hardware
    paths: tuple[MeasuredPath, ...]
    slowdowns: dict[str, Slowdown]
    sustained: tuple[SustainedWrites, ...]
    together: Together | None
    limits: Limits
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The Hardware's fields, and the tables as ``{"rows": [...]}``."""
        sustained = [
            {"device": writes.device, "seconds": at, "rate": rate}
            for writes in self.sustained
            for at, rate in writes.over_time()
        ]
        together = [
            {"gpu": gpu, "kind": kind, "rate": rate}
            for gpu, rates in enumerate(self.together.rates if self.together else ())
            for kind, rate in rates.items()
        ]
        return {
            **asdict(self.hardware),
            "rates": {"rows": [row for path in self.paths for row in path.rows()]},
            "worst_misfit": max((path.worst_misfit for path in self.paths), key=abs),
            "kernels": {"rows": [{"kind": k, **asdict(x)} for k, x in self.slowdowns.items()]},
            "sustained_writes": {"rows": sustained},
            "gpus_together": {"rows": together},
            "limits": asdict(self.limits),
            "notes": list(self.notes),
        }
