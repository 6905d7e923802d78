"""How long an iteration takes when nothing watches it: the truth that a trace's sum must meet.

Watching slows Python down in ways that no clock inside can tell apart (caches go cold, autograd
takes other paths). So after the recording a few iterations run with no dispatch mode at all, and
only their length is taken.

On a GPU watched kernels may also take less time than in training: on an H200 those of a Llama in
bf16 summed to 5 % less than an iteration took, in fp32 they did not. The likely cause is power: the
GPU rests between watched iterations, and then runs at clocks that it cannot keep up. So there the
unwatched iterations go on until the clocks have settled, and kernels may be lengthened to meet
them.
"""

from __future__ import annotations

import statistics
from time import perf_counter
from typing import Any

import numpy as np
import torch

from teraio.contracts.table import FloatArray

_FEWEST_LAPS = 3
"""Iterations to time; no more where clocks play no part."""

_MOST_LAPS = 13
"""Iterations to time at most, however short they are."""

_SETTLING_SECONDS = 3.5
"""A GPU is kept busy for so long after the first of them, in which code may be compiled anew, so
that its clocks have settled in the second half."""

_LAST_LAPS = 4
"""The median of so many iterations counts."""

_MOST_LENGTHENING = 1.25
"""Lower clocks make kernels longer by this factor at most; what took longer was disturbed."""


class UnwatchedPace:
    """Times whole iterations, from optimizer step to optimizer step."""

    def __init__(self, device_type: str) -> None:
        self._is_gpu = device_type == "cuda"
        self._has_clocks_to_settle = False
        self._period = 0
        self._steps = 0
        self._marks: list[Any] = []
        self._ended: list[float] = []

    def start(self, period: int) -> None:
        """An iteration begins now; it ends after ``period`` optimizer steps."""
        self._period = period
        # Ranks must all leave after the same step, which a measured time could not promise; and an
        # iteration that waits for another rank tells nothing of clocks.
        self._has_clocks_to_settle = self._is_gpu and not _has_other_ranks()
        self._marks = [self._now()]

    def note_step(self) -> None:
        """An optimizer has stepped, or a loop without one says that its iteration has ended."""
        if not self._marks or self.is_complete:
            return
        self._steps += 1
        if self._steps == self._period:
            self._steps = 0
            self._marks.append(self._now())
            self._ended.append(perf_counter())

    @property
    def is_complete(self) -> bool:
        """Whether enough iterations were timed."""
        if len(self._ended) < _FEWEST_LAPS:
            return False
        # By the host's time, since asking the device for its own would make it wait.
        has_settled = self._ended[-1] - self._ended[0] >= _SETTLING_SECONDS
        return not self._has_clocks_to_settle or has_settled or len(self._ended) >= _MOST_LAPS

    @property
    def tells_clocks(self) -> bool:
        """Whether iterations longer than the sum of their kernels mean that clocks were lower."""
        return self._has_clocks_to_settle and len(self._ended) >= _FEWEST_LAPS

    @property
    def seconds(self) -> float | None:
        """The median of the last iterations; None before one ended. Waits for the device."""
        pairs = list(zip(self._marks, self._marks[1:], strict=False))[-_LAST_LAPS:]
        laps = [self._between(start, end) for start, end in pairs]
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


def _has_other_ranks() -> bool:
    distributed = torch.distributed
    is_parallel = distributed.is_available() and distributed.is_initialized()
    return is_parallel and distributed.get_world_size() > 1


def meet_pace(
    durations: FloatArray,
    gaps: FloatArray,
    seconds: float | None,
    *,
    may_lengthen: bool = False,
) -> tuple[FloatArray, FloatArray]:
    """Kernels' durations and gaps in seconds, changed so that they sum to ``seconds``.

    If they must be shorter, gaps give way first, all by the same factor, then durations. Only
    durations are ever lengthened, where an iteration that took longer tells of lower clocks
    (``may_lengthen``); otherwise, or if it took much longer, it was disturbed and nothing changes.
    """
    running, waiting = float(np.sum(durations)), float(np.sum(gaps))
    if seconds is None:
        return durations, gaps
    if seconds >= running + waiting:
        factor = (seconds - waiting) / running if running > 0 else 1.0
        is_by_clocks = may_lengthen and factor <= _MOST_LENGTHENING
        return (durations * factor if is_by_clocks else durations), gaps
    gap_factor = max(0.0, seconds - running) / waiting if waiting > 0 else 0.0
    return durations * min(1.0, seconds / running), gaps * gap_factor
