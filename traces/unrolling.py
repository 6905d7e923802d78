"""Unrolling: from the trace of a few micro-batches, exactly that of many.

Once the first micro-batches are under way, each one does what the one before it did
(:mod:`teraio.traces.periods`). So a trace of N micro-batches is one of fewer with copies of the
repeating period put in after its first: kernels, births, accesses and deaths of a copy are those
of the period, with every storage of a series replaced by the member of as many turns later.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from teraio.contracts.plan import Accesses
from teraio.contracts.table import MISSING, BoolArray, IntArray, TextArray
from teraio.errors import InputError
from teraio.traces.period_candidates import (
    UNNAMED,
    collectives_by_group,
    describe_kernel,
    lives_full_cycle,
)
from teraio.traces.period_matching import Period
from teraio.traces.periods import find_period, not_periodic
from teraio.traces.trace import Kernels, Storages, Trace


def micro_batches_to_trace(stages_after: int) -> int:
    """The fewest micro-batches whose trace can be unrolled.

    ``stages_after``: stages of a 1F1B pipeline after this one, which is how many forwards run
    before the first backward; 0 without a pipeline. Gradients are born in micro-batch 0, so that
    the backward passes of 1 and 2 are the first that can be equal; as many follow in the end as
    forwards ran ahead. PyTorch's schedule holds the output of the last forward that ran ahead, so
    that only backward passes after that one's are equal.
    """
    return max(stages_after + 3, 2 * stages_after + 2)


def unroll(trace: Trace, micro_batches: int) -> Trace:
    """The trace of the same iteration with so many micro-batches.

    It equals one recorded with that many, row by row, as far as the script treats all micro-batches
    after the first alike. Times of the kernels put in are the mean of the two periods seen. Raises
    InputError for fewer micro-batches than were traced, and where the trace does not repeat itself;
    the message names the first kernel that differs.
    """
    traced = trace.metadata.micro_batches
    if micro_batches == traced:
        return trace
    if micro_batches < traced:
        raise InputError(
            f"unroll: micro_batches: {micro_batches} is less than the {traced} traced; trace fewer"
        )
    needed = micro_batches_to_trace(_forwards_ahead(trace.kernels))
    if traced < needed:
        raise InputError(
            f"unroll: {traced} micro-batches were traced, but only {needed} or more tell how this "
            "schedule goes on; trace more micro-batches"
        )
    return _Unrolling(trace, find_period(trace), micro_batches - traced).unrolled()


def _forwards_ahead(kernels: Kernels) -> int:
    """Micro-batches whose forward pass begins before any backward pass, beyond the first."""
    backward = np.flatnonzero(kernels.phase == "backward")
    before = slice(0, backward[0] if len(backward) else len(kernels))
    begun = kernels.micro_batch[before][kernels.phase[before] == "forward"]
    return max(len(np.unique(begun[begun != MISSING])) - 1, 0)


class _Unrolling:
    """Puts ``copies`` copies of the period between its first and its second occurrence.

    Storages are numbered twice: at first the old rows, then the members of each copy (a *number*
    below); in the end in the order in which a recording would list them.
    """

    def __init__(self, trace: Trace, period: Period, copies: int) -> None:
        self._trace = trace
        self._period = period
        self._copies = copies
        self._added = copies * period.length
        self._num_old = len(trace.storages)
        self._num_kernels = trace.num_kernels + self._added
        self._is_unnamed = trace.is_persistent & (period.origins.kernel != MISSING)
        first = period.first
        self._rank = np.full(self._num_old, MISSING)
        self._rank[first] = np.arange(len(first))
        self._second_of = np.full(self._num_old, MISSING)
        self._second_of[first] = period.second
        self._source = np.concatenate([np.arange(self._num_old), np.tile(first, copies)])
        self._turn = np.zeros(len(self._source), dtype=np.int64)
        self._turn[self._num_old :] = np.repeat(np.arange(1, copies + 1), len(first))

    def unrolled(self) -> Trace:
        """The new trace."""
        metadata = self._trace.metadata
        order = self._order()
        row_of_number = np.empty_like(order)
        row_of_number[order] = np.arange(len(order))
        return Trace(
            kernels=self._kernels(),
            storages=self._storages(order),
            accesses=self._accesses(row_of_number),
            metadata=replace(
                metadata,
                micro_batches=metadata.micro_batches + self._copies,
                traced_micro_batches=metadata.traced_micro_batches or metadata.micro_batches,
                tokens=self._tokens(),
            ),
            calls=self._trace.calls,
        )

    def _tokens(self) -> int | None:
        """As many per micro-batch as before."""
        metadata = self._trace.metadata
        if metadata.tokens is None:
            return None
        micro_batches = metadata.micro_batches
        return metadata.tokens * (micro_batches + self._copies) // micro_batches

    def _moved(self, kernel: IntArray) -> IntArray:
        """Where the old kernels are in the new trace; MISSING stays."""
        result: IntArray = kernel + np.where(kernel >= self._period.end, self._added, 0)
        return result

    # Kernels

    def _kernels(self) -> Kernels:
        old, period, copies = self._trace.kernels, self._period, self._copies
        first = np.arange(period.start, period.end)
        rest = np.arange(period.end, len(old))
        source = np.concatenate([np.arange(period.end), np.tile(first, copies), rest])
        turn = np.concatenate(
            [
                np.zeros(period.end, dtype=np.int64),
                np.repeat(np.arange(1, copies + 1), period.length),
                np.full(len(rest), copies),
            ]
        )
        is_copy = np.zeros(len(source), dtype=bool)
        is_copy[period.end : period.end + self._added] = True
        twin = np.where(is_copy, source + period.length, source)
        workspace = old.workspace_bytes
        columns = {column.name: getattr(old, column.name)[source] for column in old.COLUMNS}
        counts = collectives_by_group(old, period.start, period.end)[source]
        for name, step in (("micro_batch", 1), ("group_sequence", counts)):
            values = columns[name]
            columns[name] = np.where(values == MISSING, MISSING, values + turn * step)
        for name in ("duration_seconds", "gap_before_seconds"):
            values = getattr(old, name)
            columns[name] = (values[source] + values[twin]) / 2
        columns["workspace_bytes"] = np.maximum(workspace[source], workspace[twin])
        columns["kernel"] = np.arange(len(source))
        return Kernels(**columns)

    # Storages

    def _storages(self, order: IntArray) -> Storages:
        old = self._trace.storages
        columns = {column.name: getattr(old, column.name)[self._source] for column in old.COLUMNS}
        columns["birth"] = self._at_turn(old.birth)
        columns["death"] = self._deaths(columns["birth"])
        columns["name"] = self._names()
        columns = {name: values[order] for name, values in columns.items()}
        columns["storage"] = np.arange(len(order))
        return Storages(**columns)

    def _at_turn(self, kernel: IntArray) -> IntArray:
        """New kernel, by number, of an event of each storage's own (birth) at an old kernel."""
        moved = np.where(self._turn == 0, self._moved(kernel)[self._source], kernel[self._source])
        is_nowhere = kernel[self._source] == MISSING
        result: IntArray = np.where(is_nowhere, MISSING, moved + self._turn * self._period.length)
        return result

    def _names(self) -> TextArray:
        """Names, of which those of unnamed persistent storages tell their first access."""
        names: TextArray = self._trace.storages.name[self._source]
        met_first, like = self._met_first(), self._accessed_like()
        for number in np.flatnonzero(self._is_unnamed[self._source]):
            position = self._period.origins.position[like[number]]
            names[number] = f"{UNNAMED}{met_first[number]}.{position}"
        return names

    def _met_first(self) -> IntArray:
        """New kernel of the birth, or of the first access of an unnamed storage, by number."""
        return self._at_turn(self._period.origins.kernel)

    def _accessed_like(self) -> IntArray:
        """Old row whose accesses a number has: copies are made from the second period's."""
        result: IntArray = np.where(self._turn == 0, self._source, self._second_of[self._source])
        return result

    def _order(self) -> IntArray:
        """Numbers in the order of a recording: a copy stands where the second period begins.

        Tables list storages in sections (persistent, by birth, what is left from the cycle before):
        within each a new one begins where the order of births does.
        """
        storages = self._trace.storages
        section = _sections(storages)
        position = np.arange(self._num_old)
        second_begins = np.full(int(section.max(initial=0)) + 1, self._num_old)
        np.minimum.at(second_begins, section[self._period.second], self._period.second)
        place = position[self._source]
        copied = self._source[self._num_old :]
        place[self._num_old :] = second_begins[section[self._second_of[copied]]]
        turn = np.where(self._turn == 0, self._copies + 1, self._turn)
        within = self._source.copy()
        # Persistent storages without a name stand together, in the order of first accesses.
        unnamed = np.flatnonzero(self._is_unnamed[self._source])
        if len(unnamed):
            place[unnamed] = position[self._is_unnamed].min()
            turn[unnamed] = self._met_first()[unnamed]
            within[unnamed] = self._period.origins.position[self._accessed_like()[unnamed]]
        result: IntArray = np.lexsort((within, turn, place))
        return result

    def _deaths(self, birth: IntArray) -> IntArray:
        """New death by number. Each storage must be freed exactly once."""
        old, period = self._trace.storages, self._period
        death = np.full(len(self._source), MISSING)
        times_freed = np.zeros(len(self._source), dtype=np.int64)
        is_full = lives_full_cycle(self._trace)

        def free(numbers: IntArray, kernels: IntArray) -> None:
            death[numbers] = kernels
            np.add.at(times_freed, numbers, 1)

        inside = period.freed
        for turn in range(self._copies + 2):
            free(self._member(inside, turn), old.death[inside] + turn * period.length)
        is_outside = (old.death != MISSING) & ~is_full
        is_outside[inside] = is_outside[period.freed_next] = False
        outside = np.flatnonzero(is_outside)
        wraps = old.death[outside] < old.birth[outside]
        is_later = wraps | (old.death[outside] >= period.end)
        free(
            self._last_members(outside, is_later, period.freed_after),
            self._moved(old.death[outside]),
        )
        is_of_first = period.template[outside] == outside
        kept = outside[is_of_first & (period.freed_after[outside] == MISSING)]
        for turn in range(1, self._copies + 1):
            free(self._member(kept, turn), self._moved(old.death[kept]))
        full = np.flatnonzero(is_full[self._source])
        free(full, (birth[full] - 1) % self._num_kernels)
        wrong = np.flatnonzero((birth != MISSING) & (times_freed != 1))
        if len(wrong):
            kernel = int(period.origins.kernel[self._source[wrong]].min())
            raise not_periodic(self._trace, kernel, "what it creates is freed at other times")
        return death

    # Members of series

    def _member(self, rows: IntArray, turns: int | IntArray) -> IntArray:
        """Numbers of the members so many turns after the old rows, each in a series."""
        template = self._period.template[rows]
        turn = self._period.turn[rows] + turns
        numbers = np.where(turn == 0, template, self._second_of[template])
        is_copy = (turn >= 1) & (turn <= self._copies)
        copy = self._num_old + (turn - 1) * len(self._period.first) + self._rank[template]
        numbers = np.where(is_copy, copy, numbers)
        before = np.flatnonzero(turn < 0)
        if len(before):
            numbers[before] = self._earlier_members(template[before], turn[before])
        assert not (turn > self._copies + 1).any()
        return numbers

    def _earlier_members(self, template: IntArray, turn: IntArray) -> IntArray:
        """Old rows of members from before the first period."""
        period = self._period
        known = np.flatnonzero((period.template != MISSING) & (period.turn < 0))
        span = -int(min(turn.min(), period.turn[known].min(initial=0)))
        key = period.template[known] * (span + 1) - period.turn[known]
        order = np.argsort(key)
        wanted = template * (span + 1) - turn
        at = np.minimum(np.searchsorted(key[order], wanted), max(len(known) - 1, 0))
        is_known = key[order][at] == wanted if len(known) else np.zeros(len(wanted), dtype=bool)
        if not is_known.all():
            kernel = int(period.origins.kernel[template[~is_known]].min())
            what = "no micro-batch before creates the same"
            raise not_periodic(self._trace, kernel, what)
        result: IntArray = known[order][at]
        return result

    def _is_among_last(self, rows: IntArray, until: IntArray) -> BoolArray:
        """Whether a row is met after the second period as the n-th last of its series.

        ``until``, by row of the first period: how many periods later its members are met.
        """
        template, turn = self._period.template[rows], self._period.turn[rows]
        result: BoolArray = (template != MISSING) & (turn <= 0) & (turn + until[template] >= 2)
        return result

    def _last_members(self, rows: IntArray, is_later: BoolArray, until: IntArray) -> IntArray:
        """Numbers that old rows stand for outside both periods: ``is_later``, after the second."""
        numbers = rows.copy()
        moves = is_later & self._is_among_last(rows, until)
        numbers[moves] = self._member(rows[moves], self._copies)
        return numbers

    # Accesses

    def _accesses(self, row_of_number: IntArray) -> Accesses:
        """The copies are made from the second period, whose first kernel is free of what precedes
        the first: see :mod:`teraio.traces.period_matching`.
        """
        old, period, copies = self._trace.accesses, self._period, self._copies
        bounds = (period.start, period.end, period.second_end)
        begin, middle, end = np.searchsorted(old.kernel, bounds)
        head, first = np.arange(begin), np.arange(begin, middle)
        second, tail = np.arange(middle, end), np.arange(end, len(old))
        repeats = np.repeat(np.arange(copies + 1), len(second))
        source = np.concatenate([head, first, np.tile(second, copies + 1), tail])
        kernel = self._moved(old.kernel)[source]
        kernel[middle : middle + len(repeats)] -= (copies - repeats) * period.length
        rows, next_rows = np.tile([period.accessed, old.storage[second]], copies + 1)
        moves = rows != next_rows
        repeated = rows.copy()
        repeated[moves] = self._member(rows[moves], 1 + repeats[moves])
        numbers = [self._outside(head), old.storage[first], repeated, self._outside(tail)]
        return Accesses(
            kernel=kernel,
            storage=row_of_number[np.concatenate(numbers)],
            reads=old.reads[source],
            writes=old.writes[source],
        )

    def _outside(self, accesses: IntArray) -> IntArray:
        """Numbers accessed before the first period or after the second."""
        old, period = self._trace.accesses, self._period
        rows, kernel = old.storage[accesses], old.kernel[accesses]
        birth = self._trace.storages.birth[rows]
        is_later = (kernel >= period.second_end) | (birth > kernel)
        is_of_first = (period.template[rows] == rows) & is_later
        bad = np.flatnonzero(is_of_first & ~self._is_among_last(rows, period.used_until))
        if len(bad):
            place = describe_kernel(self._trace, int(kernel[bad[0]]))
            raise InputError(
                f"unroll: {place} uses one storage of every micro-batch, so that it depends on "
                "their number; trace directly as many micro-batches as wanted"
            )
        return self._last_members(rows, is_later, period.used_until)


def _sections(storages: Storages) -> IntArray:
    """Number of the section of each row: one ends where births no longer ascend, (S,)."""
    birth, ordinal = storages.birth, storages.birth_ordinal
    persistent = birth == MISSING
    breaks = np.zeros(len(birth), dtype=bool)
    breaks[1:] = persistent[1:] != persistent[:-1]
    descends = (birth[1:] < birth[:-1]) | ((birth[1:] == birth[:-1]) & (ordinal[1:] < ordinal[:-1]))
    breaks[1:] |= descends & ~persistent[1:]
    result: IntArray = np.cumsum(breaks)
    return result
