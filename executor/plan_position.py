"""Where in its plan a run is: kernels that match, extra ones, left out ones, and being adrift."""

from __future__ import annotations

from collections import deque
from enum import Enum

from teraio.executor.schedule import Schedule

_RESYNC_WINDOW = 8
"""Kernels in a row that must match before a run that drifted is taken to follow its plan again."""

_MAX_EXTRA_KERNELS = 32
"""Unplanned kernels in a row (a metric, a log line) that a run may have and still be on plan."""


class RunState(Enum):
    """How a run relates to its plan."""

    COLD = "cold"
    FOLLOWING = "following"
    ADRIFT = "adrift"


class PlanPosition:
    """Compares a run's kernels with the plan's, one after another.

    The run's kernel k is the plan's k + ``shift``, which may lie behind its end. ``is_planned``:
    the kernel under way is the one that the plan has there; ``shape_differs``: with other shapes.
    """

    def __init__(self, schedule: Schedule, state: RunState = RunState.COLD) -> None:
        self.state = state
        self.shape_differs = False
        self._schedule = schedule
        self.shift = 0
        self._is_extra = False
        self._num_extra = 0
        self._recent_ops: deque[str] = deque(maxlen=_RESYNC_WINDOW)
        self._windows = _positions_of_windows(schedule.ops)

    @property
    def is_planned(self) -> bool:
        """Whether the kernel under way is the one that the plan has at this place."""
        return self.state is RunState.FOLLOWING and not self._is_extra

    def compare(self, kernel: int, name: str, signature: int) -> str:
        """Take the run's next kernel; how it differs from the plan, "" if it does not."""
        schedule, here = self._schedule, kernel + self.shift
        self.shape_differs = self._is_extra = False
        if (
            self.state is RunState.FOLLOWING
            and here < schedule.num_kernels
            and schedule.signatures[here] == signature
            and schedule.ops[here] == name
        ):
            self._num_extra = 0
            return ""
        return self._compare_slowly(kernel, name, signature)

    def _compare_slowly(self, kernel: int, name: str, signature: int) -> str:
        if self.state is RunState.COLD:
            return ""
        if self.state is RunState.ADRIFT:
            self._recognise(kernel, name)
            if self.state is RunState.ADRIFT:
                return f"{name} while adrift"
        here, schedule = kernel + self.shift, self._schedule
        if here < schedule.num_kernels and schedule.ops[here] == name:
            self._num_extra = 0
            self.shape_differs = schedule.signatures[here] != signature
            return f"{name} has other shapes" if self.shape_differs else ""
        planned = schedule.ops[here] if here < schedule.num_kernels else "the end"
        self._take_unplanned(here, name)
        return f"{name} instead of {planned}"

    def end_kernel(self) -> None:
        """The kernel has run; an extra one takes no place in the plan."""
        if self._is_extra:
            self.shift -= 1

    def begin_iteration(self) -> None:
        """The run's next kernel is its kernel 0."""
        self.shift = 0

    def _take_unplanned(self, here: int, name: str) -> None:
        if self._num_extra == 0:
            self._recent_ops.clear()
        self._num_extra += 1
        self._recent_ops.append(name)
        left_out = self._num_left_out(here)
        if left_out:
            self.shift += left_out
            self._num_extra = 0
            return
        self._is_extra = self._num_extra <= _MAX_EXTRA_KERNELS
        if not self._is_extra:
            self.state = RunState.ADRIFT
            self.shift += self._num_extra - 1
            self._recent_ops.clear()

    def _num_left_out(self, here: int) -> int:
        """How far ahead the plan has the last kernels: some before them were left out (the first
        step after a resume lacks the end of the step before). 0 if they are not just ahead.
        """
        if len(self._recent_ops) < _RESYNC_WINDOW:
            return 0
        places = self._windows.get(tuple(self._recent_ops), ())
        ahead = (place - here for place in places)
        return min((d for d in ahead if _RESYNC_WINDOW <= d < 2 * _RESYNC_WINDOW), default=0)

    def _recognise(self, kernel: int, name: str) -> None:
        """Find the place in the plan whose last kernels are the run's last kernels."""
        self._recent_ops.append(name)
        if len(self._recent_ops) < _RESYNC_WINDOW:
            return
        places = self._windows.get(tuple(self._recent_ops))
        if places:
            here = kernel + self.shift
            nearest = min(places, key=lambda place: abs(place - here))
            self.shift += nearest - here
            self.state = RunState.FOLLOWING


def _positions_of_windows(ops: list[str]) -> dict[tuple[str, ...], list[int]]:
    """Index of the last kernel of every run of _RESYNC_WINDOW operators, by their names."""
    positions: dict[tuple[str, ...], list[int]] = {}
    for last in range(_RESYNC_WINDOW - 1, len(ops)):
        window = tuple(ops[last - _RESYNC_WINDOW + 1 : last + 1])
        positions.setdefault(window, []).append(last)
    return positions
