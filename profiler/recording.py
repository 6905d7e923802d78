"""What has been recorded so far, and whether it is enough for a trace."""

from __future__ import annotations

from teraio.contracts.table import IntArray
from teraio.errors import InputError
from teraio.profiler.segments import Segment
from teraio.profiler.steady import (
    REMEMBERED_SEGMENTS,
    Difference,
    Steady,
    find_difference,
    find_steady,
)

TIMED_ITERATIONS = 3
"""Steady iterations whose times are kept; a trace holds their median."""

STRICT_SEGMENTS = 8
"""Segments after which iterations that differ in shapes only are taken to be alike."""

_HOPELESS_SEGMENTS = 32
"""Segments after which nothing alike will be found either."""

_MAX_METERED_ATTEMPTS = 3
_MAX_KERNELS_KEPT = 1_000_000


class Recording:
    """Closed segments, the steady iterations among them, and the scratch memory measured.

    The template, that is the iteration that becomes the trace, is the first of the two equal
    iterations that ended the search; lifetimes that reach into the next are taken from that.
    ``awaited_optimizers`` (by id) exist but may not have stepped yet, as in adversarial training.
    ``shape_difference``: where iterations differ in shapes, if they are alike in all else only.
    """

    def __init__(self) -> None:
        self.segments: list[Segment | None] = []
        self.steady: Steady | None = None
        self.timed: list[int] = []
        self.workspace_bytes: IntArray | None = None
        self.awaited_optimizers: set[int] | None = None
        self.shape_difference: Difference | None = None
        self._optimizers_seen: set[int] = set()
        self._metered_attempts = 0
        self._has_given_up = False

    @property
    def ends_group_next(self) -> bool:
        """Whether the segment to be added ends an iteration of the steady period."""
        return self.steady is not None and (len(self.segments) + 1) % self.steady.period == 0

    @property
    def wants_workspace(self) -> bool:
        """Whether the iteration that begins now should be spent on measuring scratch memory."""
        return (
            self.steady is not None
            and len(self.segments) % self.steady.period == 0
            and self.workspace_bytes is None
            and not self._is_workspace_out_of_reach
        )

    @property
    def _is_workspace_out_of_reach(self) -> bool:
        return self._has_given_up or self._metered_attempts >= _MAX_METERED_ATTEMPTS

    @property
    def has_given_up_workspace(self) -> bool:
        """Whether measuring scratch memory failed, of which the user has been told."""
        return self._has_given_up

    def give_up_workspace(self) -> None:
        """Scratch memory cannot be measured here."""
        self._has_given_up = True

    @property
    def is_complete(self) -> bool:
        """Whether further iterations would add nothing, or have long ceased to."""
        if self.steady is None:
            return len(self.segments) >= _HOPELESS_SEGMENTS
        if len(self.segments) >= self.steady.start + REMEMBERED_SEGMENTS * self.steady.period:
            return True
        has_workspace = self.workspace_bytes is not None or self._is_workspace_out_of_reach
        missing = (self.awaited_optimizers or set()) - self._optimizers_seen
        return len(self.timed) >= TIMED_ITERATIONS and has_workspace and not missing

    def add(self, segment: Segment, workspace_bytes: IntArray | None, *, is_metered: bool) -> None:
        """Append a closed segment; ``is_metered``: it ran under a memory profiler.

        ``workspace_bytes``: scratch of the iteration's kernels, int64 (kernels,), on its last
        segment if it was measured.
        """
        self.segments.append(segment)
        self._forget_old()
        if segment.optimizer not in self._optimizers_seen:
            self._optimizers_seen.add(segment.optimizer)
            self.steady = None
        if self.steady is None:
            self._begin_steady(self._find_steady())
            return
        period = self.steady.period
        if len(self.segments) % period:
            return
        first = len(self.segments) - period
        reference = self.steady.start + period
        self._metered_attempts += is_metered
        if self._difference(reference, first, period) is None:
            if is_metered:
                self.workspace_bytes = workspace_bytes
            else:
                self.timed.append(first)
        else:
            self._search_again()

    def _find_steady(self) -> Steady | None:
        found = find_steady(self.segments)
        if found is not None:
            self.shape_difference = None
        elif len(self.segments) >= STRICT_SEGMENTS:
            found = find_steady(self.segments, is_loose=True)
            if found is not None:
                second = found.start + found.period
                self.shape_difference = find_difference(
                    self.segments, found.start, second, found.period
                )
        return found

    def _difference(self, first: int, second: int, period: int) -> Difference | None:
        is_loose = self.shape_difference is not None
        return find_difference(self.segments, first, second, period, is_loose=is_loose)

    def _begin_steady(self, steady: Steady | None) -> None:
        if steady is not None:
            self.steady = steady
            self.timed = [steady.start, steady.start + steady.period]
            self.workspace_bytes = None
            self._metered_attempts = 0

    def _search_again(self) -> None:
        # An iteration that differs is passed over, unless another period explains it, or the two
        # alike that were found so far were themselves the exception (two skipped steps in a row).
        assert self.steady is not None
        found = self._find_steady()
        is_unconfirmed = len(self.timed) <= 2 and self.workspace_bytes is None
        if found is not None and (is_unconfirmed or found.period != self.steady.period):
            self._begin_steady(found)

    def _forget_old(self) -> None:
        if self.steady is not None:
            return
        kept = 0
        for index in range(len(self.segments) - 1, -1, -1):
            segment = self.segments[index]
            if segment is None:
                break
            kept += len(segment)
            if kept > _MAX_KERNELS_KEPT and index < len(self.segments) - 4:
                if segment.times is not None:
                    segment.times.release()
                self.segments[index] = None

    @property
    def oldest_kept(self) -> int:
        """Index of the first segment that has not been dropped."""
        kept = (i for i, segment in enumerate(self.segments) if segment is not None)
        return next(kept, len(self.segments))

    def forget(self) -> None:
        """Drop all segments; what is known of their number and of steadiness stays."""
        for segment in self.segments:
            if segment is not None and segment.times is not None:
                segment.times.release()
        self.segments = [None] * len(self.segments)

    def describe(self) -> str:
        """One line for people who wait."""
        steps = len(self.segments)
        if self.steady is None:
            return f"optimizer step {steps}: not steady yet"
        found = f"{len(self.timed)} of {TIMED_ITERATIONS} steady iterations timed"
        scratch = "" if self.workspace_bytes is None else ", scratch memory measured"
        return f"optimizer step {steps}: {found}{scratch}"

    def require_steady(self) -> Steady:
        """The steady iterations found. Raises InputError that says what is missing."""
        if self.steady is not None:
            return self.steady
        count = len(self.segments)
        if count < 3:
            raise InputError(
                f"profile: {count} optimizer step{'s' * (count != 1)} recorded, but the first "
                "differs from all others (it creates optimizer state): run at least 3, better 8"
            )
        difference = find_difference(self.segments, count - 2, count - 1, 1)
        what = str(difference) if difference else "not every optimizer has stepped twice"
        raise InputError(
            f"profile: no two of the {count} optimizer steps recorded are alike, so none can stand "
            f"for all; {what}. Run more steps, or make their shapes equal"
        )

    def segment(self, index: int) -> Segment:
        """A segment that is still kept."""
        segment = self.segments[index]
        assert segment is not None
        return segment
