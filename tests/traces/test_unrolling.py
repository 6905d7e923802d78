"""Unrolling made-up iterations: equal, row by row, to having played all micro-batches."""

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
    "losses listed, one held": Habits(losses="listed, one held"),
    "losses hoarded": Habits(losses="hoarded"),
    "running loss in place": Habits(total="in place"),
    "running loss anew": Habits(total="anew"),
    "batches listed before": Habits(batches="listed"),
    "gradients freed at the top": Habits(frees_gradients_at_top=True, losses="rebound"),
    "sharded": Habits(is_sharded=True),
    "output held": Habits(holds_output=True),
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
        unroll(play(Habits(stages_after=stages_after, holds_output=True), few), few + 5)


def test_as_many_as_traced_is_the_trace_itself() -> None:
    trace = play(Habits(), 4)
    assert unroll(trace, 4) is trace


def test_metadata_tell_how_many_were_traced() -> None:
    once = unroll(play(Habits(), 3), 5)
    twice = unroll(once, 9)
    assert (once.metadata.micro_batches, once.metadata.traced_micro_batches) == (5, 3)
    assert (twice.metadata.micro_batches, twice.metadata.traced_micro_batches) == (9, 3)
    assert_equal(twice, play(Habits(), 9))


def test_times_of_copies_are_the_mean_of_the_two_periods_seen() -> None:
    trace = play(Habits(), 3)
    seconds = np.exp2(np.arange(trace.num_kernels, dtype=np.float64))
    workspace = np.arange(trace.num_kernels)
    timed = replace(trace.kernels, duration_seconds=1e-20 * seconds, workspace_bytes=workspace)
    unrolled = unroll(replace(trace, kernels=timed), 5).kernels
    old, new = timed.duration_seconds, unrolled.duration_seconds
    length = (len(unrolled) - len(timed)) // 2
    start = int(np.flatnonzero(new[: len(old)] != old)[0]) - length
    first, second = old[start : start + length], old[start + length : start + 2 * length]
    for copy in (1, 2):
        begin = start + copy * length
        assert new[begin : begin + length].tolist() == ((first + second) / 2).tolist()
        found = unrolled.workspace_bytes[begin : begin + length]
        assert found.tolist() == workspace[start + length : start + 2 * length].tolist()
    assert new[start + 3 * length :].tolist() == old[start + length :].tolist()


def test_collectives_are_numbered_through() -> None:
    kernels = unroll(play(Habits(is_sharded=True, stages_after=1), 4), 6).kernels
    is_counted = kernels.group == "shard"
    assert kernels.group_sequence[is_counted].tolist() == list(range(int(is_counted.sum())))
    assert (kernels.group_sequence[~is_counted] == MISSING).all()


def test_fewer_than_traced_is_refused() -> None:
    with pytest.raises(InputError, match="2 is less than the 3 traced; trace fewer"):
        unroll(play(Habits(), 3), 2)


@pytest.mark.parametrize("losses", ["stacked", "stacked, chained"])
def test_a_kernel_over_all_micro_batches_is_refused(losses: str) -> None:
    trace = play(Habits(losses=losses), 4)
    with pytest.raises(InputError) as caught:
        unroll(trace, 7)
    assert str(caught.value) == (
        f"unroll: kernel {row_of(trace, 'log', 0)} (log in module.log) uses one storage of every "
        "micro-batch, so that it depends on their number; trace directly as many micro-batches as "
        "wanted"
    )


def test_a_kernel_over_all_micro_batches_of_the_iteration_before_is_refused() -> None:
    with pytest.raises(InputError, match=r"kernel 0 \(begin .* one storage of every micro-batch"):
        unroll(play(Habits(losses="kept, logged"), 4), 7)


def changed(trace: Trace, table: str, column: str, row: int, value: Any) -> Trace:
    values = getattr(getattr(trace, table), column).copy()
    values[row] = value
    return replace(trace, **{table: replace(getattr(trace, table), **{column: values})})


def row_of(trace: Trace, op: str, number: int) -> int:
    """Kernel of the call with this number of an operator."""
    return int(np.flatnonzero(trace.kernels.op == op)[number])


def test_another_kernel_in_the_last_micro_batch_is_refused() -> None:
    trace = play(Habits(), 3)
    row = row_of(trace, "relu1", 2)
    with pytest.raises(InputError) as caught:
        unroll(changed(trace, "kernels", "signature", row, 7), 5)
    assert str(caught.value) == (
        "unroll: none of the 3 micro-batches traced has the kernels of the one before it: first "
        f"difference at kernel {row} (relu1 in module.relu1); trace more micro-batches, or "
        "directly as many as wanted"
    )


def test_kernels_of_no_micro_batch_are_refused() -> None:
    trace = play(Habits(), 3)
    nowhere = np.full(trace.num_kernels, MISSING)
    unlabelled = replace(trace, kernels=replace(trace.kernels, micro_batch=nowhere))
    with pytest.raises(InputError, match="the trace does not say which kernels belong to which"):
        unroll(unlabelled, 5)


@pytest.mark.parametrize(
    ("column", "more", "what"),
    [
        ("nbytes", -1, "(mm1 in module.mm1): other storages are created"),
        ("death", 1, "(relu1 in module.relu1): other storages are freed"),
    ],
)
def test_another_storage_in_the_last_micro_batch_is_refused(
    column: str, more: int, what: str
) -> None:
    trace = play(Habits(), 3)
    row = int(np.flatnonzero(trace.storages.birth == row_of(trace, "mm1", 2))[1])
    value = getattr(trace.storages, column)[row] + more
    with pytest.raises(InputError, match="not periodic: first difference at") as caught:
        unroll(changed(trace, "storages", column, row, value), 5)
    assert what in str(caught.value)


@pytest.mark.parametrize("column", ["reads", "writes"])
def test_another_access_in_the_last_micro_batch_is_refused(column: str) -> None:
    trace = play(Habits(), 3)
    row = int(np.flatnonzero(trace.accesses.kernel == row_of(trace, "relu0", 2))[0])
    other = not getattr(trace.accesses, column)[row]
    with pytest.raises(InputError, match=r"\(relu0 in module.relu0\): other arguments are read"):
        unroll(changed(trace, "accesses", column, row, other), 5)


def test_another_argument_in_the_last_micro_batch_is_refused() -> None:
    trace = play(Habits(parameters=2), 3)
    kernel = row_of(trace, "mm0", 2)
    weights = trace.storages.name[trace.accesses.storage]
    row = int(np.flatnonzero((trace.accesses.kernel == kernel) & (weights == "weight0"))[0])
    with pytest.raises(InputError, match=r"mm0.*it touches storages of another origin"):
        unroll(changed(trace, "accesses", "storage", row, 1), 5)


def test_a_storage_of_the_micro_batch_before_in_place_of_its_own_is_refused() -> None:
    trace = play(Habits(total="in place", losses="listed"), 3)
    kernels = [row_of(trace, "add_", number) for number in (0, 1)]
    rows = [int(np.flatnonzero(trace.accesses.kernel == kernel)[0]) for kernel in kernels]
    loss = trace.accesses.storage[rows[0]]
    with pytest.raises(InputError, match="it touches storages of another origin"):
        unroll(changed(trace, "accesses", "storage", rows[1], loss), 5)


def test_other_numbers_of_collectives_are_refused() -> None:
    trace = play(Habits(is_sharded=True), 3)
    row = row_of(trace, "gather", 5)
    number = int(trace.kernels.group_sequence[row])
    with pytest.raises(InputError, match=r"gather.*its collectives are numbered otherwise"):
        unroll(changed(trace, "kernels", "group_sequence", row, number + 1), 5)


def test_unrolls_to_half_a_million_kernels() -> None:
    habits = Habits(parameters=40, total="in place", batches="listed", is_sharded=True)
    few = play(habits, 3)
    per_period = play(habits, 4).num_kernels - few.num_kernels
    micro_batches = 3 + 500_000 // per_period
    trace = unroll(few, micro_batches)
    assert trace.num_kernels == few.num_kernels + (micro_batches - 3) * per_period
    assert int(trace.kernels.micro_batch.max()) == micro_batches - 1
    assert trace.peak_live_bytes - few.peak_live_bytes == (micro_batches - 3) * 8


def habits() -> st.SearchStrategy[Habits]:
    return st.builds(
        Habits,
        stages_after=st.integers(0, 4),
        parameters=st.integers(1, 3),
        losses=st.sampled_from(
            ["freed", "rebound", "listed", "listed, one held", "kept", "hoarded"]
        ),
        total=st.sampled_from(["", "in place", "anew"]),
        batches=st.sampled_from(["drawn", "listed"]),
        lag=st.integers(0, 3),
        holds_output=st.booleans(),
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
