"""How long an iteration takes when nothing watches it: the truth that a trace's sum must meet.

Watching slows Python down in ways that no clock inside can tell apart (caches go cold, autograd
takes other paths). So after the recording a few iterations run with no dispatch mode at all, and
only their length is taken.
"""

from __future__ import annotations

import statistics
from time import perf_counter
from typing import Any

import numpy as np
import torch

from teraio.contracts.table import FloatArray

_LAPS = 3


class UnwatchedPace:
    """Times whole iterations, from optimizer step to optimizer step."""

    def __init__(self, device_type: str) -> None:
        self._is_gpu = device_type == "cuda"
        self._period = 0
        self._steps = 0
        self._marks: list[Any] = []

    def start(self, period: int) -> None:
        """An iteration begins now; it ends after ``period`` optimizer steps."""
        self._period = period
        self._marks = [self._now()]

    def note_step(self) -> None:
        """An optimizer has stepped, or a loop without one says that its iteration has ended."""
        if not self._marks or self.is_complete:
            return
        self._steps += 1
        if self._steps == self._period:
            self._steps = 0
            self._marks.append(self._now())

    @property
    def is_complete(self) -> bool:
        """Whether enough iterations were timed."""
        return len(self._marks) > _LAPS

    @property
    def seconds(self) -> float | None:
        """The median iteration, as for kernels; None before one ended. Waits for the device."""
        laps = [self._between(a, b) for a, b in zip(self._marks, self._marks[1:], strict=False)]
        return statistics.median(laps) if laps else None

    def _now(self) -> Any:
        if not self._is_gpu:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        if not self._is_gpu:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3


def meet_pace(
    durations: FloatArray, gaps: FloatArray, seconds: float | None
) -> tuple[FloatArray, FloatArray]:
    """Kernels' durations and gaps in seconds, shortened so that they sum to ``seconds``.

    Gaps give way first, all by the same factor, then durations. They are never lengthened: an
    unwatched iteration that took longer was disturbed.
    """
    running, waiting = float(np.sum(durations)), float(np.sum(gaps))
    if seconds is None or seconds >= running + waiting:
        return durations, gaps
    gap_factor = max(0.0, seconds - running) / waiting if waiting > 0 else 0.0
    return durations * min(1.0, seconds / running), gaps * gap_factor
