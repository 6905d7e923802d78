"""Whether two stretches of a trace are equal periods, and which storages correspond.

A *period* is forward and backward of one micro-batch, or, on a rank of a 1F1B pipeline, the forward
of one and the backward of another. Storages that successive micro-batches create at the same place
are a *series*. A series is known by its member of the first period; the *turn* of a member counts
periods from there (the second period's is 1, those of a warm-up are negative).

Two periods are equal if their kernels are, and if births, accesses and deaths are the same once
every storage is either the same one in both or the next member of the same series. What happens
between kernels may differ at the outer ends: views made before the first kernel of the first period
(gradients are born in the micro-batch before it), storages freed after the last kernel of the
second (a function returns).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from teraio.contracts.table import MISSING, BoolArray, IntArray
from teraio.traces.period_candidates import RANKS, Origins, Search, collectives_by_group


@dataclass(frozen=True, eq=False)
class Period:
    """The first of two equal periods, kernels ``start .. start + length - 1``.

    ``template`` int64 (S,): row of the first period's member of a storage's series, MISSING outside
    any; ``turn`` int64 (S,): number of the member. ``first`` and ``second`` int64 (members,): rows
    of the members of the two periods. ``used_until`` and ``freed_after`` int64 (S,), by row of the
    first period: how many periods after its own a member is last accessed or freed; and is freed,
    MISSING if no period frees any. ``accessed`` int64: row of the first
    period in the place of each access of the second. ``freed``, ``freed_next`` int64: rows that the
    two periods free, but for the ends of their series.
    """

    start: int
    length: int
    origins: Origins
    template: IntArray
    turn: IntArray
    first: IntArray
    second: IntArray
    used_until: IntArray
    freed_after: IntArray
    accessed: IntArray
    freed: IntArray
    freed_next: IntArray

    @property
    def end(self) -> int:
        """First kernel of the second period."""
        return self.start + self.length

    @property
    def second_end(self) -> int:
        """First kernel after the second period."""
        return self.start + 2 * self.length


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where a period differs from the one after it."""

    kernel: int
    what: str


class _UnequalError(Exception):
    def __init__(self, kernel: int, what: str) -> None:
        super().__init__(what)
        self.difference = Difference(kernel, what)


def match(search: Search, start: int, length: int) -> Period | Difference:
    """The period that starts there, or the first difference between it and the next.

    The kernels themselves are known to be equal.
    """
    try:
        return _Matching(search, start, length).period()
    except _UnequalError as error:
        return error.difference


class _Matching:
    """Compares kernels ``start .. start + length - 1`` with the ``length`` kernels after them."""

    def __init__(self, search: Search, start: int, length: int) -> None:
        self._search = search
        self._trace = search.trace
        self._start, self._end = start, start + length
        self._length = length
        count = len(search.trace.storages)
        self._template = np.full(count, MISSING)
        self._turn = np.zeros(count, dtype=np.int64)
        self._used_until = np.zeros(count, dtype=np.int64)
        self._freed_after = np.full(count, MISSING)

    def period(self) -> Period:
        """All checks in turn. Raises _UnequalError at the first that fails."""
        self._check_group_sequences()
        first, second = self._match_births()
        self._find_earlier_members(first)
        rows, next_rows = self._match_accesses()
        freed, freed_next = self._match_deaths()
        self._check_accesses(rows, next_rows)
        self._check_kept(first, second)
        return Period(
            start=self._start,
            length=self._length,
            origins=self._search.origins,
            template=self._template,
            turn=self._turn,
            first=first,
            second=second,
            used_until=np.maximum(self._used_until, self._freed_after),
            freed_after=self._freed_after,
            accessed=rows,
            freed=freed,
            freed_next=freed_next,
        )

    def _check_group_sequences(self) -> None:
        kernels = self._trace.kernels
        sequence = kernels.group_sequence
        counts = collectives_by_group(kernels, self._start, self._end)
        first = sequence[self._start : self._end]
        second = sequence[self._end : self._end + self._length]
        expected = first + counts[self._start : self._end]
        expected[first == MISSING] = MISSING
        _refuse(second != expected, self._end, "its collectives are numbered otherwise")

    # Births

    def _match_births(self) -> tuple[IntArray, IntArray]:
        """Rows of the storages created in the first period and in the second."""
        first, first_place = self._born_in(self._start)
        second, second_place = self._born_in(self._end)
        # An unnamed persistent storage that only the first period meets first is one for all.
        is_one = self._trace.is_persistent[first] & ~np.isin(first_place, second_place)
        first, first_place = first[~is_one], first_place[~is_one]
        what = "other storages are created"
        if not np.array_equal(first_place, second_place):
            only_one = np.setxor1d(first_place, second_place)
            raise _UnequalError(self._end + int(only_one[0]) // RANKS, what)
        code, is_other = self._search.storage_code, np.zeros(self._length, dtype=bool)
        is_other[first_place[code[first] != code[second]] // RANKS] = True
        _refuse(is_other, self._end, what)
        self._template[first] = self._template[second] = first
        self._turn[second] = 1
        return first, second

    def _born_in(self, begin: int) -> tuple[IntArray, IntArray]:
        """Rows created in a period, ordered by place: kernel within the period, and rank there."""
        origins = self._search.origins
        rows = np.flatnonzero((origins.kernel >= begin) & (origins.kernel < begin + self._length))
        place = (origins.kernel[rows] - begin) * RANKS + origins.rank[rows]
        order = np.argsort(place, kind="stable")
        return rows[order], place[order]

    def _find_earlier_members(self, first: IntArray) -> None:
        """Members of the series in the micro-batches before the first period, by their place."""
        search, origins = self._search, self._search.origins
        earlier = np.flatnonzero((origins.kernel >= 0) & (origins.kernel < self._start))
        if not len(first) or not len(earlier):
            return
        key = search.place[origins.kernel] * RANKS + origins.rank
        micro_batch = search.micro_batch[origins.kernel]
        known = first[np.argsort(key[first], kind="stable")]
        at = np.searchsorted(key[known], key[earlier])
        found = known[np.minimum(at, len(known) - 1)]
        turn = micro_batch[earlier] - micro_batch[found]
        is_member = (key[found] == key[earlier]) & (turn < 0) & (micro_batch[earlier] != MISSING)
        is_member &= search.storage_code[found] == search.storage_code[earlier]
        self._template[earlier[is_member]] = found[is_member]
        self._turn[earlier[is_member]] = turn[is_member]

    # Accesses

    def _match_accesses(self) -> tuple[IntArray, IntArray]:
        """Storages that both periods access, int64 (accesses of the second period,) each."""
        accesses = self._trace.accesses
        bounds = (self._start, self._end, self._end + self._length)
        begin, middle, end = np.searchsorted(accesses.kernel, bounds).tolist()
        counts = np.bincount(accesses.kernel[begin:end] - self._start, minlength=2 * self._length)
        surplus = max(0, int(counts[0] - counts[self._length]))
        only_views = ~accesses.reads & ~accesses.writes
        if only_views[begin : begin + surplus].all():
            begin += surplus
            counts[0] -= surplus
        first, second = slice(begin, middle), slice(middle, end)
        what = "other arguments are read or written"
        _refuse(counts[: self._length] != counts[self._length :], self._end, what)
        is_other = accesses.reads[first] != accesses.reads[second]
        is_other |= accesses.writes[first] != accesses.writes[second]
        self._refuse_accesses(is_other, what)
        rows, next_rows = accesses.storage[first], accesses.storage[second]
        self._join(rows, next_rows)
        return rows, next_rows

    def _refuse_accesses(self, is_other: BoolArray, what: str) -> None:
        """Raise for the first access of the second period where ``is_other`` is true."""
        if is_other.any():
            kernel = self._trace.accesses.kernel
            first_row = np.searchsorted(kernel, self._end)
            raise _UnequalError(int(kernel[first_row + np.argmax(is_other)]), what)

    def _join(self, rows: IntArray, next_rows: IntArray) -> None:
        """What precedes the first period and is followed by a member of it is the member before."""
        code, kernel = self._search.storage_code, self._search.origins.kernel[rows]
        if len(rows) != len(next_rows):
            return
        joins = (kernel != MISSING) & (kernel < self._start) & (code[rows] == code[next_rows])
        joins &= self._template[next_rows] == next_rows
        replaced = np.isin(self._template, next_rows[joins]) & (self._turn == -1)
        self._template[replaced] = MISSING
        self._template[rows[joins]] = next_rows[joins]
        self._turn[rows[joins]] = -1

    def _check_accesses(self, rows: IntArray, next_rows: IntArray) -> None:
        known = self._template[rows] != MISSING
        is_next = known & (self._template[rows] == self._template[next_rows])
        is_next &= self._turn[next_rows] == self._turn[rows] + 1
        is_of_period = known & (self._turn[rows] >= 0)
        is_same = (rows == next_rows) & ~is_of_period
        self._refuse_accesses(~(is_next | is_same), "it touches storages of another origin")
        used = rows[is_next]
        np.maximum.at(self._used_until, self._template[used], -self._turn[used])

    # Deaths

    def _match_deaths(self) -> tuple[IntArray, IntArray]:
        """Rows that the first period frees, and those that the second frees in their place."""
        death = self._trace.storages.death
        first, second = self._freed_in(self._start), self._freed_in(self._end)
        is_left, is_left_next = self._unequal_deaths(first, second)
        left, left_next = first[is_left], second[is_left_next]
        at_end = death[left_next] == self._end + self._length - 1
        # What the place does not tell corresponds in the order of deaths and births.
        self._join(left, left_next[~at_end] if len(left) < len(left_next) else left_next)
        is_left, is_left_next = self._unequal_deaths(first, second)
        left_next = second[is_left_next]
        is_inside = death[left_next] < self._end + self._length - 1
        other = np.append(death[first[is_left]] + self._length, death[left_next[is_inside]])
        if len(other):
            raise _UnequalError(int(other.min()), "other storages are freed")
        self._freed_after[self._template[first]] = -self._turn[first]
        return first, second[~is_left_next]

    def _unequal_deaths(self, first: IntArray, second: IntArray) -> tuple[BoolArray, BoolArray]:
        """Which rows freed in either period have no counterpart in the other."""
        first_keys, second_keys = self._death_keys(first, 0), self._death_keys(second, 1)
        unknown = self._template[first] == MISSING, self._template[second] == MISSING
        return (
            unknown[0] | ~np.isin(first_keys, second_keys),
            unknown[1] | ~np.isin(second_keys, first_keys),
        )

    def _freed_in(self, begin: int) -> IntArray:
        """Rows freed in a period, ordered by death and birth."""
        storages = self._trace.storages
        is_freed = (storages.death >= begin) & (storages.death < begin + self._length)
        rows = np.flatnonzero(is_freed & ~self._search.lives_full_cycle)
        place = storages.birth_ordinal[rows], storages.birth[rows], storages.death[rows]
        return rows[np.lexsort(place)]

    def _death_keys(self, rows: IntArray, period: int) -> IntArray:
        """What a period frees: when, and which member of which series, counted from it."""
        offset = self._trace.storages.death[rows] - self._start - period * self._length
        turn = self._turn[rows] - period + self._search.num_micro_batches
        series = offset * (len(self._template) + 1) + self._template[rows] + 1
        result: IntArray = series * (2 * self._search.num_micro_batches + 2) + turn
        return result

    def _check_kept(self, first: IntArray, second: IntArray) -> None:
        """What neither period frees must live until the same moment, however many there are.

        The last of a series may live for another time than those before (a loop's variable still
        holds it), if the first period and the one before it show that those do not differ.
        """
        death, is_full = self._trace.storages.death, self._search.lives_full_cycle
        before = np.full(len(death), MISSING)
        rows = np.flatnonzero((self._template != MISSING) & (self._turn == -1))
        before[self._template[rows]] = death[rows]
        is_alike = (death[first] == death[second]) | (death[first] == before[first])
        is_alike = (is_full[first] == is_full[second]) & (is_full[first] | is_alike)
        is_other = (self._freed_after[first] == MISSING) & ~is_alike
        if is_other.any():
            kernel = int(self._search.origins.kernel[second[is_other]].min())
            raise _UnequalError(kernel, "what it creates lives for another time")


def _refuse(is_other: BoolArray, first_kernel: int, what: str) -> None:
    """Raise for the first kernel of a period where ``is_other`` is true."""
    if is_other.any():
        raise _UnequalError(first_kernel + int(np.argmax(is_other)), what)
