"""Times heavy kernels in the company that they keep in training.

Matrix products draw so much power that the GPU lowers its clocks, and how far depends on what runs
between them. So after each was timed alone, they are played for a few seconds in the mixture of the
trace: each as often as it occurs there, evenly spread, with memory-bound kernels in between for as
long as those take in the trace. On an H200 single TF32 products ran up to 16 % faster so than
alone, and blocks compiled in bf16 8 % slower.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from teraio.profiler.costs.measuring import MakeCall

_PLAYED_SECONDS = 2.5
_WARM_UP_SECONDS = 0.5
_SHORTEST_PLAY_SECONDS = 5e-4
"""Calls are repeated for so long between two events, whose own time then does not show."""

_FEWEST_PLAYS = 3
_FILLER_ELEMENTS = 2**24


@dataclass(frozen=True, slots=True)
class HeavyCall:
    """A call to play: how to make it, how often it occurs, its seconds alone."""

    make: MakeCall
    count: int
    seconds: float

    @property
    def repeats(self) -> int:
        """Calls between two events."""
        return max(1, round(_SHORTEST_PLAY_SECONDS / max(self.seconds, 1e-7)))


def sustained_seconds(calls: Sequence[HeavyCall], light_share: float) -> list[float]:
    """Seconds of each call in the mixture, in the order given.

    ``light_share``: part of the iteration that other kernels take. Raises torch.OutOfMemoryError if
    the arguments of all calls do not fit at once.
    """
    made = [call.make() for call in calls]
    filler = [torch.randn(_FILLER_ELEMENTS, device="cuda") for _ in range(4)]
    filler_seconds = _filler_seconds(filler)
    light_per_heavy = light_share / max(1.0 - light_share, 1e-3)
    marks: list[tuple[int, Any, Any]] = []
    owed = 0.0
    for number in spread(plays_of(calls, light_share)):
        call = calls[number]
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(call.repeats):
            made[number]()
        last.record()
        marks.append((number, first, last))
        owed += call.repeats * call.seconds * light_per_heavy
        while owed > filler_seconds:
            torch.add(filler[0], filler[1], out=filler[2])
            filler = [*filler[1:], filler[0]]
            owed -= filler_seconds
    torch.cuda.synchronize()
    return _medians(calls, marks)


def plays_of(calls: Sequence[HeavyCall], light_share: float) -> list[int]:
    """How often each call is played: in proportion to its count, each a few times at least."""
    iteration = sum(call.count * call.seconds for call in calls) / max(1.0 - light_share, 1e-3)
    scale = (_PLAYED_SECONDS + _WARM_UP_SECONDS) / max(iteration, 1e-9)
    return [max(_FEWEST_PLAYS, round(call.count * scale / call.repeats)) for call in calls]


def spread(plays: Sequence[int]) -> list[int]:
    """Indices into ``plays``, each as often as it says and at even distances."""
    places = [((j + 0.5) / count, i) for i, count in enumerate(plays) for j in range(count)]
    return [index for _, index in sorted(places)]


def _filler_seconds(filler: Sequence[torch.Tensor]) -> float:
    """Seconds of one memory-bound kernel, 200 MB of traffic."""
    repeats = 50
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.add(filler[0], filler[1], out=filler[2])
    first.record()
    for number in range(repeats):
        torch.add(filler[number % 2], filler[2], out=filler[3])
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) * 1e-3 / repeats


def _medians(calls: Sequence[HeavyCall], marks: Sequence[tuple[int, Any, Any]]) -> list[float]:
    """Median seconds of each call, those played while the GPU warmed up left out if others are."""
    began = marks[0][1]
    by_call: list[list[float]] = [[] for _ in calls]
    early: list[list[float]] = [[] for _ in calls]
    for number, first, last in marks:
        is_early = began.elapsed_time(first) * 1e-3 < _WARM_UP_SECONDS
        seconds = first.elapsed_time(last) * 1e-3 / calls[number].repeats
        (early if is_early else by_call)[number].append(seconds)
    return [statistics.median(by_call[i] or early[i]) for i in range(len(calls))]
