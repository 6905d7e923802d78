"""Unrolling made-up iterations: equal, row by row, to having played all micro-batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.traces import random_programs
from tests.traces.micro_batch_programs import Habits, play

from teraio.errors import InputError
from teraio.traces.trace import Trace
from teraio.traces.unrolling import micro_batches_to_trace, unroll


def assert_equal(found: Trace, expected: Trace) -> None:
    for name in ("kernels", "storages", "accesses", "calls"):
        table, other = getattr(found, name), getattr(expected, name)
        for column in table.COLUMNS:
            values, wanted = getattr(table, column.name), getattr(other, column.name)
            assert values.tolist() == wanted.tolist(), f"{name}.{column.name}"
    assert replace(found.metadata, traced_micro_batches=0) == expected.metadata


def assert_unrolls(habits: Habits, few: int, many: int) -> None:
    assert_equal(unroll(play(habits, few), many), play(habits, many))


HABITS = {
    "plain": Habits(),
    "loss rebound": Habits(losses="rebound"),
    "losses listed": Habits(losses="listed"),
    "losses kept for an iteration": Habits(losses="kept"),
    "running loss in place": Habits(total="in place"),
    "running loss anew": Habits(total="anew"),
    "batches listed before": Habits(batches="listed"),
    "gradients freed at the top": Habits(frees_gradients_at_top=True, losses="rebound"),
    "sharded": Habits(is_sharded=True),
}


@pytest.mark.parametrize("stages_after", [0, 1, 2, 3])
@pytest.mark.parametrize("habits", HABITS.values(), ids=HABITS)
def test_unrolls_from_the_fewest_micro_batches(habits: Habits, stages_after: int) -> None:
    few = micro_batches_to_trace(stages_after)
    assert_unrolls(replace(habits, stages_after=stages_after), few, few + 5)


@pytest.mark.parametrize("stages_after", [0, 1, 3])
def test_one_less_than_the_fewest_is_refused(stages_after: int) -> None:
    few = micro_batches_to_trace(stages_after) - 1
    with pytest.raises(InputError, match="trace more micro-batches"):
        unroll(play(Habits(stages_after=stages_after), few), few + 5)


def habits() -> st.SearchStrategy[Habits]:
    return st.builds(
        Habits,
        stages_after=st.integers(0, 4),
        parameters=st.integers(1, 3),
        losses=st.sampled_from(["freed", "rebound", "listed", "kept"]),
        total=st.sampled_from(["", "in place", "anew"]),
        batches=st.sampled_from(["drawn", "listed"]),
        lag=st.integers(0, 3),
        frees_gradients_at_top=st.booleans(),
        is_sharded=st.booleans(),
    )


@settings(max_examples=60, deadline=None)
@given(habits=habits(), more=st.integers(1, 6), spare=st.integers(0, 2))
def test_unrolls_scripts_of_any_habits(habits: Habits, more: int, spare: int) -> None:
    few = micro_batches_to_trace(habits.stages_after) + habits.lag + spare
    assert_unrolls(habits, few, few + more)


@settings(max_examples=200, deadline=None)
@given(program=random_programs.programs(), more=st.integers(1, 4), spare=st.integers(0, 2))
def test_unrolls_random_programs(program: random_programs.Program, more: int, spare: int) -> None:
    few = program.fewest + spare
    unrolled = unroll(random_programs.play(program, few), few + more)
    assert_equal(unrolled, random_programs.play(program, few + more))
