"""Folding: from the trace of many micro-batches, that of few; the inverse of unrolling.

The middle micro-batches of an iteration do the same (:mod:`teraio.traces.turns`), so a planner may
plan a trace from which most of their turns are cut out, and repeat what it decides for the turn
before the cut. What the cut leaves is joined so: a storage from before it becomes the one that is
as many micro-batches later when the cut ends, where there is one (hidden values), else it stays
itself (gradients). That no storage is left over, that every turn cut out does what the turn before
the cut does, and that lifetimes are the same in both traces, is checked; times may differ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from teraio.contracts.plan import Accesses
from teraio.contracts.table import MISSING, BoolArray, IntArray, TextArray
from teraio.errors import InputError
from teraio.traces.lifetimes import InactivePeriods
from teraio.traces.period_candidates import UNNAMED, collectives_by_group, lives_full_cycle
from teraio.traces.trace import Kernels, Storages, Trace, TraceMetadata
from teraio.traces.turns import Places, Turns, find_turns

_SAME_IN_ALL_TURNS = ("nbytes", "allocated_bytes", "resizable", "kind", "dtype")


@dataclass(frozen=True, eq=False)
class Folding:
    """A trace of fewer micro-batches, and what each row of the full trace is in it.

    ``num_turns`` turns of ``turn_kernels`` kernels were cut out at kernel ``first_kernel``; the
    full trace repeats itself up to ``end_kernel``. ``kernel`` int64 (K,) and ``storage`` int64 (S,)
    tell of the full kernels and storages which folded ones they are: those cut out are of the turn
    before the cut. A storage that moves on with the turns (``moves_on``, bool (S,)) is used as many
    kernels earlier in the folded trace as it is born earlier: ``shift_kernels``, int64 (S,).
    """

    trace: Trace
    kernel: IntArray
    storage: IntArray
    turn_kernels: int
    first_kernel: int
    num_turns: int
    end_kernel: int
    shift_kernels: IntArray
    moves_on: BoolArray


def fold(trace: Trace, micro_batches: int) -> Folding | None:
    """The same iteration with only so many micro-batches, and how the two correspond.

    It equals a trace recorded with that many, row by row, as far as the script treats all middle
    micro-batches alike; times of the turn before the cut are the mean over the turns that it stands
    for, so that its ideal time is that of the full trace less whole turns. None where the trace
    does not repeat itself in all but times, or where too few of its turns would be left: less than
    two, or not more than a storage of one of them lives on for.
    """
    turns = find_turns(trace.kernels)
    num_cut = trace.metadata.micro_batches - micro_batches
    if turns is None or num_cut < 1 or turns.count - num_cut < 2:
        return None
    try:
        return _Cut(trace, turns, num_cut).folding()
    except _UnequalError:
        return None


def map_periods(folding: Folding, full: InactivePeriods, folded: InactivePeriods) -> IntArray:
    """Row of the folded period that each full one is a copy of, int64 (full periods,).

    MISSING where there is none; in a trace that folds there always is. A copy is as long as its
    origin, or longer by whole turns where it reaches over the cut.
    """
    storage, after = full.storage, full.after_kernel
    shift = np.where(folding.moves_on, folding.shift_kernels, 0)[storage]
    moves_on = folding.moves_on[storage] & (after >= folding.first_kernel)
    moves_on &= after < folding.end_kernel
    new_after = np.where(moves_on, after - shift, folding.kernel[after])
    count = len(folding.trace.storages)
    known = folded.after_kernel * count + folded.storage
    wanted = new_after * count + folding.storage[storage]
    row = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    longer = full.end_kernel - after - (folded.end_kernel - folded.after_kernel)[row]
    cut = folding.num_turns * folding.turn_kernels
    is_copy = (longer == 0) | (longer == cut) | (longer == shift) | (longer == cut - shift)
    is_copy &= (known[row] == wanted) & (full.is_tail == folded.is_tail[row])
    return np.where(is_copy, row, MISSING)


class Windows(NamedTuple):
    """When each inactive period's storage moves, unrolled from ``after_kernel``, int64 (periods,).

    The fields are those of :class:`teraio.contracts.plan.Moves`; prefetch_start of tails is unused.
    """

    offload_start: IntArray
    free_by: IntArray
    prefetch_start: IntArray


def unfold_windows(
    rows: IntArray, full: InactivePeriods, folded: InactivePeriods, windows: Windows
) -> Windows:
    """Windows of all full periods, from those of all folded periods.

    ``rows`` is what :func:`map_periods` found; without MISSING. A storage leaves as many kernels
    after its last access as in the folded trace, and returns as many before its next one. Any other
    decision on a folded period (its tier) unfolds by indexing with ``rows``.
    """
    leaves = full.after_kernel - folded.after_kernel[rows]
    returns = full.end_kernel - folded.end_kernel[rows]
    return Windows(
        offload_start=windows.offload_start[rows] + leaves,
        free_by=windows.free_by[rows] + leaves,
        prefetch_start=windows.prefetch_start[rows] + returns,
    )


class _UnequalError(Exception):
    """The turns are not equal in all but times."""


def _require(holds: bool | np.bool_) -> None:
    if not holds:
        raise _UnequalError


class _Cut:
    """Cuts ``num_cut`` turns out. Kernels: the turn before the cut begins at ``base``, the cut at
    ``start``, what follows it at ``stop``; ``end`` comes after the last turn.
    """

    def __init__(self, trace: Trace, turns: Turns, num_cut: int) -> None:
        self._trace, self._places = trace, Places.of(trace)
        self._length, self._num_cut = turns.length, num_cut
        self._is_full = lives_full_cycle(trace)
        storages = trace.storages
        wraps = storages.death < storages.birth
        self._death = storages.death + np.where(wraps, trace.num_kernels, 0)
        kept = turns.count - num_cut
        # What the turn before the cut creates is used in as many turns as in the full trace.
        before = min((kept + 1) // 2, kept - self._turns_outlived(turns))
        _require(before >= 1)
        self._start = turns.first_kernel + before * turns.length
        self._base = self._start - turns.length
        self._removed = num_cut * turns.length
        self._stop, self._end = self._start + self._removed, turns.end_kernel
        self._num_kernels = trace.num_kernels - self._removed

    def _turns_outlived(self, turns: Turns) -> int:
        """How many turns after its own a storage of the second turn is used, if not in the end."""
        first = turns.first_kernel + turns.length
        kernel, accesses = self._places.kernel, self._trace.accesses
        is_of_turn = (kernel >= first) & (kernel < first + turns.length)
        used = accesses.kernel[is_of_turn[accesses.storage]]
        # What is freed when the turns are over dies after the last kernel of the last.
        death = self._death[is_of_turn & (self._death < turns.end_kernel - 1)]
        last = max(used[used < turns.end_kernel].max(initial=first), death.max(initial=first))
        return int(last - first) // turns.length

    def folding(self) -> Folding:
        """All parts. Raises _UnequalError at the first that does not repeat itself."""
        self._match_births()
        moves_on = self._match_accesses()
        self._join()
        moves_on |= self._is_cut | self._is_joined
        self._require_room(moves_on)
        is_kept = ~self._is_cut
        row = np.cumsum(is_kept) - 1
        kernel = np.arange(self._trace.num_kernels)
        inside = slice(self._start, self._stop)
        kernel[inside] = self._base + (kernel[inside] - self._start) % self._length
        kernel[self._stop :] -= self._removed
        try:
            trace = Trace(
                kernels=self._kernels(),
                storages=self._storages(is_kept),
                accesses=self._accesses(row),
                metadata=self._metadata(),
                calls=self._trace.calls,
            )
        except InputError:
            raise _UnequalError from None
        return Folding(
            trace=trace,
            kernel=kernel,
            storage=row[self._twin],
            turn_kernels=self._length,
            first_kernel=self._start,
            num_turns=self._num_cut,
            end_kernel=self._end,
            shift_kernels=self._shift,
            moves_on=moves_on,
        )

    def _alike(self, rows: IntArray, others: IntArray) -> BoolArray:
        """Which storages equal the others in all but lifetime and the name if persistent."""
        storages, is_persistent = self._trace.storages, self._trace.is_persistent
        result: BoolArray = is_persistent[rows] == is_persistent[others]
        result &= self._is_full[rows] == self._is_full[others]
        for name in _SAME_IN_ALL_TURNS:
            values = getattr(storages, name)
            result &= (values[rows] == values[others]).astype(bool)
        names = storages.name
        result &= is_persistent[rows] | (names[rows] == names[others]).astype(bool)
        return result

    # The turns cut out do what the turn before the cut does, and so does the turn after it

    def _match_births(self) -> None:
        places, num_turns = self._places, self._num_cut + 2
        is_born = (places.kernel >= self._base) & (places.kernel < self._stop + self._length)
        rows = np.flatnonzero(is_born)
        _require(len(rows) % num_turns == 0)
        rows = rows[np.lexsort((places.rank[rows], places.kernel[rows]))]
        born = rows.reshape(num_turns, -1)
        offset = places.kernel[born] - self._length * np.arange(num_turns)[:, None]
        _require((offset == offset[0]).all() and (places.rank[born] == places.rank[born[0]]).all())
        _require(self._alike(born[1:-1], born[0]).all())
        count = len(self._trace.storages)
        self._is_cut = np.zeros(count, dtype=bool)
        self._is_cut[born[1:-1]] = True
        self._twin = np.arange(count)
        self._twin[born[1:-1]] = born[0]
        self._shift = np.where(places.kernel >= self._stop, self._removed, 0)
        self._shift[born[1:-1]] = self._length * np.arange(1, num_turns - 1)[:, None]

    def _match_accesses(self) -> BoolArray:
        """Which storages the turns use as another one in each, bool (S,)."""
        accesses, places = self._trace.accesses, self._places
        num_turns = self._num_cut + 1
        turn = np.arange(1, num_turns + 1)[:, None]
        bounds = self._base, self._start, self._start + self._length, self._stop + self._length
        begin, first, second, end = np.searchsorted(accesses.kernel, bounds).tolist()
        _require(end - first == num_turns * (second - first) and second - first <= first - begin)
        # Views made before the first kernel of a turn belong to what precedes it.
        surplus = slice(begin, first - (second - first))
        is_view = ~accesses.reads[surplus] & ~accesses.writes[surplus]
        _require((is_view & (accesses.kernel[surplus] == self._base)).all())
        base, rest = slice(surplus.stop, first), slice(first, end)
        kernel = accesses.kernel[rest].reshape(num_turns, -1) - self._length * turn
        _require((kernel == accesses.kernel[base]).all())
        for flags in (accesses.reads, accesses.writes):
            _require((flags[rest].reshape(num_turns, -1) == flags[base]).all())
        rows, others = accesses.storage[rest].reshape(num_turns, -1), accesses.storage[base]
        is_same = rows == others
        is_next = (places.place[rows] == places.place[others]) & (places.place[others] != MISSING)
        is_next &= places.rank[rows] == places.rank[others]
        is_next &= places.micro_batch[rows] - places.micro_batch[others] == turn
        _require((is_same | is_next).all())
        moves_on = np.zeros(len(self._trace.storages), dtype=bool)
        moves_on[rows[~is_same]] = True
        _require(not moves_on[rows[is_same]].any())
        return moves_on

    # What the cut joins

    def _join(self) -> None:
        """Find what each storage that is there when the cut ends was as many turns before."""
        places, kernel = self._places, self._places.kernel
        stays = self._trace.is_persistent
        self._joined = np.arange(len(kernel))
        before = np.flatnonzero(
            (kernel != MISSING) & (kernel < self._start) & (stays | (self._death >= self._start))
        )
        after = np.flatnonzero(
            (kernel != MISSING) & (kernel < self._stop) & (stays | (self._death >= self._stop))
        )
        known = dict(zip(places.identities(before, self._num_cut), before.tolist(), strict=True))
        partner = np.array(
            [known.get(name, MISSING) for name in places.identities(after)], dtype=np.int64
        )
        is_joined = (partner != MISSING) & self._alike(partner, after)
        # What the cut leaves without a partner is kept to the end: one in every turn.
        self._joined[after] = np.where(is_joined, partner, self._twin[after])
        self._is_left_over = np.zeros(len(kernel), dtype=bool)
        self._is_left_over[after[~is_joined & self._is_cut[after]]] = True
        self._is_joined = np.zeros(len(kernel), dtype=bool)
        self._is_joined[after[is_joined]] = self._is_joined[partner[is_joined]] = True
        self._there_after = after

    def _require_room(self, moves_on: BoolArray) -> None:
        """What moves on with the turns is used within them in the folded trace too."""
        accesses = self._trace.accesses
        inside = slice(*np.searchsorted(accesses.kernel, (self._start, self._end)))
        storage = accesses.storage[inside]
        folded = accesses.kernel[inside] - self._shift[storage]
        _require(not (moves_on[storage] & (folded >= self._end - self._removed)).any())

    # The folded trace

    def _kernels(self) -> Kernels:
        old = self._trace.kernels
        columns = {
            column.name: np.delete(getattr(old, column.name), slice(self._start, self._stop))
            for column in old.COLUMNS
        }
        turn, inside = slice(self._base, self._start), slice(self._base, self._stop)
        for name in ("duration_seconds", "gap_before_seconds"):
            seconds = getattr(old, name)[inside].reshape(self._num_cut + 1, -1)
            columns[name][turn] += (seconds - seconds[0]).mean(axis=0)  # Exact where all are equal.
        workspace = old.workspace_bytes[inside].reshape(self._num_cut + 1, -1)
        columns["workspace_bytes"][turn] = workspace.max(axis=0)
        later = columns["micro_batch"][self._start :]
        is_labelled = later != MISSING
        _require(later[is_labelled].min(initial=self._num_cut) >= self._num_cut)
        later[is_labelled] -= self._num_cut
        self._renumber_collectives(columns["group_sequence"])
        columns["kernel"] = np.arange(self._num_kernels)
        return Kernels(**columns)

    def _renumber_collectives(self, sequence: IntArray) -> None:
        """Number the collectives after the cut as if those cut out had not been."""
        old = self._trace.kernels
        if (old.group_sequence == MISSING).all():
            return
        counts = collectives_by_group(old, self._base, self._start)
        inside = old.group_sequence[self._base : self._stop].reshape(self._num_cut + 1, -1)
        steps = np.arange(self._num_cut + 1)[:, None] * counts[self._base : self._start]
        _require((inside == np.where(inside[0] == MISSING, MISSING, inside[0] + steps)).all())
        later = sequence[self._start :]
        is_counted = later != MISSING
        later[is_counted] -= self._num_cut * counts[self._stop :][is_counted]

    def _storages(self, is_kept: BoolArray) -> Storages:
        old = self._trace.storages
        birth = old.birth - np.where(old.birth >= self._stop, self._removed, 0)
        death = self._deaths(is_kept) % self._num_kernels
        death[self._is_full] = (birth[self._is_full] - 1) % self._num_kernels
        columns = {column.name: getattr(old, column.name) for column in old.COLUMNS}
        columns |= {
            "name": self._folded_names(),
            "birth": birth,
            "death": np.where(old.death == MISSING, MISSING, death),
        }
        columns = {name: values[is_kept] for name, values in columns.items()}
        columns["storage"] = np.arange(len(columns["birth"]))
        return Storages(**columns)

    def _deaths(self, is_kept: BoolArray) -> IntArray:
        """New death of what is kept, unrolled from its birth, int64 (S,).

        What is there when the cut begins dies as what it becomes there; every other storage must
        live as long as its twin, or longer by whole turns if it lasts until after the cut.
        """
        birth, death, removed = self._trace.storages.birth, self._death, self._removed
        lives = (birth != MISSING) & ~self._is_full
        is_later, again = birth >= self._stop, death - self._trace.num_kernels
        _require(not (lives & is_later & (again >= self._start) & (again < self._stop)).any())
        result = death - np.where(is_later, removed, 0)
        spans = lives & (birth < self._start) & (death >= self._start)
        result[spans] = MISSING
        after = self._there_after[lives[self._there_after]]
        # The last of its kind may be held for longer: by what it is itself, not by what it becomes.
        np.maximum.at(result, self._joined[after], death[after] - removed)
        shorter = death - result[self._twin]
        is_same = shorter == self._shift
        is_same |= (death >= self._stop) & (shorter == removed)
        is_same |= (again >= 0) & (shorter == removed + self._shift)
        _require((is_same | ~lives).all() and (result[lives & is_kept] != MISSING).all())
        return result

    def _folded_names(self) -> TextArray:
        """Names, of which those of unnamed persistent storages tell their first access."""
        places, names = self._places, self._trace.storages.name.copy()
        is_renamed = self._trace.is_persistent & (places.kernel >= self._stop)
        for row in np.flatnonzero(is_renamed).tolist():
            names[row] = f"{UNNAMED}{places.kernel[row] - self._removed}.{places.position[row]}"
        return names

    def _accesses(self, row: IntArray) -> Accesses:
        """``row`` int64 (S,): new row of what is kept."""
        old = self._trace.accesses
        begin, end = np.searchsorted(old.kernel, (self._start, self._stop))
        source = np.append(np.arange(begin), np.arange(end, len(old)))
        storage, kernel = old.storage[source], old.kernel[source].copy()
        is_before = np.arange(len(source)) < begin
        kernel[~is_before] -= self._removed
        joined = np.where(is_before, self._twin[storage], self._joined[storage])
        left_over = self._is_left_over[storage] | (self._is_cut[storage] & is_before)
        keys = kernel * len(row) + joined
        first = np.unique(keys[~left_over], return_index=True)[1]
        # One kernel uses what every micro-batch left: then it uses that of those which are kept.
        _require(np.isin(keys[left_over], keys[~left_over]).all())
        kept = np.flatnonzero(~left_over)[np.sort(first)]
        return Accesses(
            kernel=kernel[kept],
            storage=row[joined[kept]],
            reads=old.reads[source[kept]],
            writes=old.writes[source[kept]],
        )

    def _metadata(self) -> TraceMetadata:
        old = self._trace.metadata
        micro_batches = old.micro_batches - self._num_cut
        traced = old.traced_micro_batches if old.traced_micro_batches < micro_batches else 0
        return replace(old, micro_batches=micro_batches, traced_micro_batches=traced)
