"""Folding made-up iterations: equal, row by row, to having played fewer micro-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.traces import random_programs
from tests.traces.micro_batch_programs import Habits, play

from teraio.contracts.table import MISSING
from teraio.traces.folding import Folding, Windows, fold, map_periods, unfold_windows
from teraio.traces.lifetimes import inactive_periods
from teraio.traces.trace import Trace
from teraio.traces.unrolling import micro_batches_to_trace, unroll

LOSSES = (
    "freed",
    "rebound",
    "listed",
    "listed, one held",
    "stacked",
    "stacked, chained",
    "kept",
    "kept, logged",
    "hoarded",
)


def assert_equal(found: Trace, expected: Trace) -> None:
    for name in ("kernels", "storages", "accesses", "calls"):
        table, other = getattr(found, name), getattr(expected, name)
        for column in table.COLUMNS:
            values, wanted = getattr(table, column.name), getattr(other, column.name)
            assert values.tolist() == wanted.tolist(), f"{name}.{column.name}"
    assert found.metadata == expected.metadata


def assert_corresponds(folding: Folding, full: Trace) -> None:
    """Every kernel, storage and inactive period of the full trace is a copy of its folded one."""
    folded = folding.trace
    for column in ("op", "module", "phase", "signature", "group"):
        values = getattr(folded.kernels, column)[folding.kernel]
        assert values.tolist() == getattr(full.kernels, column).tolist()
    for column in ("nbytes", "kind", "birth_ordinal"):
        values = getattr(folded.storages, column)[folding.storage]
        assert values.tolist() == getattr(full.storages, column).tolist()
    born = np.flatnonzero(full.storages.birth != MISSING)
    births = folded.storages.birth[folding.storage[born]]
    assert births.tolist() == folding.kernel[full.storages.birth[born]].tolist()
    assert np.unique(folding.storage).tolist() == list(range(len(folded.storages)))
    assert_periods_correspond(folding, full)


def assert_periods_correspond(folding: Folding, full: Trace) -> None:
    many, few = inactive_periods(full), inactive_periods(folding.trace)
    rows = map_periods(folding, many, few)
    assert (rows != MISSING).all()
    assert np.unique(rows).tolist() == list(range(len(few)))
    assert few.storage[rows].tolist() == folding.storage[many.storage].tolist()
    assert few.is_tail[rows].tolist() == many.is_tail.tolist()
    length = folding.turn_kernels
    for many_kernels, few_kernels in (
        (many.after_kernel, few.after_kernel[rows]),
        (many.end_kernel, few.end_kernel[rows]),
    ):
        ops = full.kernels.op[many_kernels % full.num_kernels].tolist()
        assert ops == folding.trace.kernels.op[few_kernels % folding.trace.num_kernels].tolist()
    longer = many.end_kernel - many.after_kernel - (few.end_kernel - few.after_kernel)[rows]
    assert set((longer % length).tolist()) <= {0}
    assert 0 <= longer.min(initial=0) <= longer.max(initial=0) <= folding.num_turns * length


def assert_folds(habits: Habits, few: int, many: int) -> Folding:
    full = play(habits, many)
    folding = fold(full, few)
    assert folding is not None
    assert folding.num_turns == many - few
    assert_equal(folding.trace, play(habits, few))
    assert_corresponds(folding, full)
    return folding


def changed(trace: Trace, table: str, column: str, row: int, value: Any) -> Trace:
    values = getattr(getattr(trace, table), column).copy()
    values[row] = value
    return replace(trace, **{table: replace(getattr(trace, table), **{column: values})})


def with_jitter(trace: Trace, seed: int = 0) -> Trace:
    """The trace with each duration off by 10 % or so, and gaps between kernels."""
    random = np.random.default_rng(seed)
    kernels = trace.kernels
    seconds = kernels.duration_seconds * (1 + 0.1 * random.standard_normal(len(kernels)))
    gaps = random.uniform(0, 1e-4, len(kernels))
    return replace(
        trace,
        kernels=replace(kernels, duration_seconds=np.maximum(seconds, 0), gap_before_seconds=gaps),
    )


@pytest.mark.parametrize("stages_after", [0, 1, 2, 3])
@pytest.mark.parametrize("losses", LOSSES)
def test_folds_to_the_fewest_micro_batches_that_repeat(losses: str, stages_after: int) -> None:
    few = micro_batches_to_trace(stages_after)
    for more in (1, 4):
        assert_folds(Habits(losses=losses, stages_after=stages_after), few, few + more)


@pytest.mark.parametrize(
    "habits",
    [
        Habits(total="in place"),
        Habits(total="anew"),
        Habits(batches="listed"),
        Habits(lag=2),
        Habits(holds_output=True, stages_after=3),
        Habits(frees_gradients_at_top=True, losses="rebound"),
        Habits(is_sharded=True, stages_after=1),
    ],
    ids=str,
)
def test_folds_to_eight_micro_batches(habits: Habits) -> None:
    folding = assert_folds(habits, 8, 16)
    assert folding.end_kernel - folding.first_kernel > 8 * folding.turn_kernels


def test_turns_are_left_on_either_side_of_the_cut() -> None:
    folding = assert_folds(Habits(stages_after=1), 8, 20)
    length = folding.turn_kernels
    after = folding.end_kernel - folding.first_kernel - folding.num_turns * length
    assert after == 3 * length
    kernels = folding.trace.kernels
    turns = [folding.first_kernel + turn * length for turn in (-3, -2, -1, 0, 1, 2)]
    ops = [kernels.op[start : start + length].tolist() for start in turns]
    assert ops == [ops[0]] * 6


def habits() -> st.SearchStrategy[Habits]:
    return st.builds(
        Habits,
        stages_after=st.integers(0, 4),
        parameters=st.integers(1, 3),
        losses=st.sampled_from(LOSSES),
        total=st.sampled_from(["", "in place", "anew"]),
        batches=st.sampled_from(["drawn", "listed"]),
        lag=st.integers(0, 3),
        holds_output=st.booleans(),
        frees_gradients_at_top=st.booleans(),
        is_sharded=st.booleans(),
    )


@settings(max_examples=30, deadline=None)
@given(habits=habits(), more=st.integers(1, 6), spare=st.integers(0, 2))
def test_folds_scripts_of_any_habits(habits: Habits, more: int, spare: int) -> None:
    few = micro_batches_to_trace(habits.stages_after) + 2 * habits.lag + spare
    # What only one micro-batch does is told from what all do where the cut is longer than that.
    more += habits.stages_after if habits.holds_output else 0
    assert_folds(habits, few, few + more)


@settings(max_examples=60, deadline=None)
@given(program=random_programs.programs(), more=st.integers(1, 4), spare=st.integers(0, 2))
def test_random_programs_fold_right_or_not_at_all(
    program: random_programs.Program, more: int, spare: int
) -> None:
    few = program.fewest + spare
    full = random_programs.play(program, few + more)
    folding = fold(full, few)
    if folding is not None:
        assert_equal(folding.trace, random_programs.play(program, few))
        assert_corresponds(folding, full)


def test_folding_undoes_unrolling() -> None:
    habits = Habits(stages_after=2, batches="listed", losses="listed", is_sharded=True)
    trace = play(habits, 6)
    folding = fold(unroll(trace, 40), 9)
    assert folding is not None
    assert_equal(folding.trace, unroll(trace, 9))


def test_micro_batches_recorded_of_an_unrolled_trace_are_kept_if_fewer() -> None:
    trace = unroll(play(Habits(), 5), 12)
    traced = []
    for micro_batches in (9, 5, 4):
        folding = fold(trace, micro_batches)
        assert folding is not None
        traced.append(folding.trace.metadata.traced_micro_batches)
    assert traced == [5, 0, 0]


def test_times_are_means_over_the_turns_that_one_stands_for() -> None:
    full = with_jitter(play(Habits(stages_after=1), 20))
    folding = fold(full, 8)
    assert folding is not None
    assert_corresponds(folding, full)
    for column in ("duration_seconds", "gap_before_seconds"):
        seconds = getattr(full.kernels, column)
        sums = np.bincount(folding.kernel, weights=seconds)
        means = sums / np.bincount(folding.kernel)
        assert getattr(folding.trace.kernels, column) == pytest.approx(means, rel=1e-12)
    turn = slice(folding.first_kernel - folding.turn_kernels, folding.first_kernel)
    kernels = folding.trace.kernels
    turn_seconds = (kernels.duration_seconds[turn] + kernels.gap_before_seconds[turn]).sum()
    ideal_seconds = folding.trace.ideal_seconds + folding.num_turns * turn_seconds
    assert ideal_seconds == pytest.approx(full.ideal_seconds, rel=1e-12)


def test_workspace_is_the_most_of_the_turns_that_one_stands_for() -> None:
    trace = play(Habits(), 12)
    folding = fold(trace, 4)
    assert folding is not None
    last = folding.first_kernel + folding.num_turns * folding.turn_kernels - 1
    again = fold(changed(trace, "kernels", "workspace_bytes", last, 77), 4)
    assert again is not None
    workspace = again.trace.kernels.workspace_bytes
    assert np.flatnonzero(workspace).tolist() == [folding.first_kernel - 1]
    assert workspace.max() == 77


def test_windows_keep_their_distance_from_both_ends() -> None:
    full = play(Habits(stages_after=1, losses="listed"), 14)
    folding = fold(full, 8)
    assert folding is not None
    many, few = inactive_periods(full), inactive_periods(folding.trace)
    rows = map_periods(folding, many, few)
    windows = Windows(
        offload_start=few.after_kernel,
        free_by=few.after_kernel + 1,
        prefetch_start=few.end_kernel - 1,
    )
    unfolded = unfold_windows(rows, many, few, windows)
    assert unfolded.offload_start.tolist() == many.after_kernel.tolist()
    assert unfolded.free_by.tolist() == (many.after_kernel + 1).tolist()
    assert unfolded.prefetch_start.tolist() == (many.end_kernel - 1).tolist()


def row_of(trace: Trace, op: str, number: int) -> int:
    """Kernel of the call with this number of an operator."""
    return int(np.flatnonzero(trace.kernels.op == op)[number])


def access_of(trace: Trace, op: str, number: int) -> int:
    return int(np.searchsorted(trace.accesses.kernel, row_of(trace, op, number)))


def birth_at(trace: Trace, op: str, number: int) -> int:
    return int(np.flatnonzero(trace.storages.birth == row_of(trace, op, number))[0])


@pytest.mark.parametrize("number", [3, 6, 9])
@pytest.mark.parametrize(
    ("table", "column", "row", "value"),
    [
        ("kernels", "signature", lambda trace, n: row_of(trace, "relu0", n), 7),
        ("kernels", "op", lambda trace, n: row_of(trace, "relu0", n), "other"),
        ("kernels", "group_sequence", lambda trace, n: row_of(trace, "gather", 2 * n), 500),
        ("storages", "nbytes", lambda trace, n: birth_at(trace, "mm0", n), 999),
        ("storages", "kind", lambda trace, n: birth_at(trace, "mm0", n), "buffer"),
        ("accesses", "reads", lambda trace, n: access_of(trace, "relu0", n), False),
        ("accesses", "storage", lambda trace, n: access_of(trace, "gather", 2 * n), 1),
    ],
)
def test_one_other_micro_batch_among_those_cut_out_does_not_fold(
    table: str, column: str, row: Any, value: Any, number: int
) -> None:
    trace = play(Habits(is_sharded=True), 14)
    assert fold(trace, 4) is not None
    assert fold(changed(trace, table, column, row(trace, number), value), 4) is None


@pytest.mark.parametrize("number", [3, 6, 9])
def test_another_lifetime_among_those_cut_out_does_not_fold(number: int) -> None:
    trace = play(Habits(), 14)
    row = birth_at(trace, "mm1", number)
    death = int(trace.storages.death[row]) + 1
    assert fold(changed(trace, "storages", "death", row, death), 4) is None


def test_too_few_micro_batches_do_not_fold() -> None:
    trace = play(Habits(), 8)
    assert fold(trace, 3) is not None
    for micro_batches in (0, 1, 2, 8, 9):
        assert fold(trace, micro_batches) is None
    for micro_batches in (1, 2):
        assert fold(play(Habits(), micro_batches), 1) is None


def test_kernels_of_no_micro_batch_do_not_fold() -> None:
    trace = play(Habits(), 8)
    nowhere = np.full(trace.num_kernels, MISSING)
    assert fold(replace(trace, kernels=replace(trace.kernels, micro_batch=nowhere)), 4) is None
