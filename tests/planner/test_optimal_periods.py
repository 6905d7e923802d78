"""Periods of the optimal planner: who writes, what stays; repair fits if anything can."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.planner.optimal_cases import random_case, random_choice

from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Moves
from teraio.contracts.table import IntArray
from teraio.planner.clean_copies import chain_moves
from teraio.planner.drafts import draft_moves
from teraio.planner.optimal.periods import STAYS, Problem
from teraio.planner.optimal.repairing import repair
from teraio.planner.residency import resident_bytes
from teraio.traces.trace import Trace

MakeHardware = Callable[..., Hardware]
RandomTrace = Callable[[int], Trace]
SEEDS = range(60)


def draft(problem: Problem, device: IntArray) -> Moves:
    """The choice as moves, away as long as can be."""
    rows = np.flatnonzero(device != STAYS)
    return draft_moves(
        problem.trace,
        problem.all_periods,
        problem.period[rows],
        offload_start=problem.after[rows],
        free_by=problem.away_first[rows],
        prefetch_start=problem.away_end[rows],
        device=np.array(problem.machine.devices, dtype=object)[device[rows]],
    )


def test_writes_are_those_of_the_plan(random_trace: RandomTrace) -> None:
    """Of any choice, the same moves write as in the plan that is built of it."""
    num_writes = num_reused = 0
    for seed in SEEDS:
        trace, hardware = random_case(seed, random_trace)
        problem = Problem.of(trace, hardware)
        device = random_choice(problem, seed, share=0.8)
        moves = draft(problem, device)
        chains = chain_moves(moves, trace.storages, trace.accesses, trace.num_kernels)
        writes = problem.writes(device)
        assert not writes[device == STAYS].any()
        np.testing.assert_array_equal(writes[device != STAYS], chains.writes)
        num_writes += int(chains.writes.sum())
        num_reused += int((~chains.writes).sum())
    assert num_writes > 100
    assert num_reused > 100


def test_bytes_left_are_those_of_the_plan(random_trace: RandomTrace) -> None:
    """The longest absences, counted here and counted by the plan's own account."""
    for seed in SEEDS:
        trace, hardware = random_case(seed, random_trace)
        problem = Problem.of(trace, hardware)
        device = random_choice(problem, seed)
        rows = np.flatnonzero(device != STAYS)
        np.testing.assert_array_equal(
            problem.resident_with(rows, problem.away_first[rows], problem.away_end[rows]),
            resident_bytes(
                trace.storages,
                trace.kernels.workspace_bytes,
                draft(problem, device),
                trace.num_kernels,
            ),
        )


def left_with(problem: Problem, device: IntArray) -> int:
    rows = np.flatnonzero(device != STAYS)
    left = problem.resident_with(rows, problem.away_first[rows], problem.away_end[rows])
    return int(left.max())


@pytest.mark.parametrize("lacking_bytes", [0, 1])
def test_repair_fits_exactly_where_anything_can(
    lacking_bytes: int, random_trace: RandomTrace
) -> None:
    """With just what is needed when all leave it finds a choice, with a byte less it says no.

    What was chosen before stays chosen.
    """
    for seed in SEEDS:
        trace, hardware = random_case(seed, random_trace)
        everything = np.zeros(len(Problem.of(trace, hardware).period), dtype=np.int64)
        needed = left_with(Problem.of(trace, hardware), everything)
        if needed - lacking_bytes < 1:
            continue
        problem = Problem.of(trace, hardware.with_budgets(gpu_memory=needed - lacking_bytes))
        device = random_choice(problem, seed, share=0.2)
        repaired = repair(problem, device)
        if lacking_bytes:
            assert repaired is None
            continue
        assert repaired is not None
        assert left_with(problem, repaired) <= needed
        chosen = device != STAYS
        np.testing.assert_array_equal(repaired[chosen], device[chosen])


def test_repair_leaves_alone_what_fits(random_trace: RandomTrace) -> None:
    """The very same choice comes back."""
    trace, hardware = random_case(0, random_trace)
    problem = Problem.of(trace, hardware.with_budgets(gpu_memory=trace.peak_allocated_bytes))
    device = random_choice(problem, 0)
    assert repair(problem, device) is device


def test_repair_sends_the_longest_idle_to_the_quicker_device(
    make_trace: Callable[..., Trace], make_hardware: Callable[..., Hardware]
) -> None:
    """Of A (idle 0 to 5) and C (idle 1 to 4), 100 B each, one must leave in 2 and 3: A, to the SSD.

    The host would take twenty times as long.
    """
    trace = make_trace(
        [1.0] * 6,
        [("A", 100, 0, 5), ("C", 100, 1, 4), ("B", 100, 2, 3)],
        [(0, "A", "w"), (5, "A", "r"), (1, "C", "w"), (4, "C", "r"), (2, "B", "w"), (3, "B", "r")],
    )
    problem = Problem.of(trace, make_hardware(200, host_rate=5.0))
    repaired = repair(problem, np.full(len(problem.period), STAYS))
    assert repaired is not None
    assert problem.storage[repaired != STAYS].tolist() == [0]
    assert repaired[repaired != STAYS].tolist() == [problem.machine.devices.index("ssd0")]


def test_device_without_room_gets_nothing(
    one_tensor: Trace, make_hardware: Callable[..., Hardware]
) -> None:
    """A host of no bytes, however quick, is no device."""
    problem = Problem.of(one_tensor, make_hardware(100, host_bytes=0, host_rate=1e6))
    repaired = repair(problem, np.full(len(problem.period), STAYS))
    assert repaired is not None
    assert repaired.tolist() == [problem.machine.devices.index("ssd0")]


def test_host_alone_leaves_ssds_closed(one_tensor: Trace, make_hardware: MakeHardware) -> None:
    """Devices keep their numbers; without SSDs, or with a small host, there is nothing to try."""
    problem = Problem.of(one_tensor, make_hardware(100, num_ssds=2))
    on_host = problem.with_host_alone()
    assert on_host is not None
    assert on_host.machine.devices == problem.machine.devices
    assert on_host.machine.capacity_bytes.tolist() == [problem.machine.capacity_bytes[0], 0, 0]
    assert on_host.hardware.ssd == ()
    repaired = repair(on_host, np.full(len(problem.period), STAYS))
    assert repaired is not None
    assert repaired.max() == 0
    for hardware in (make_hardware(100, num_ssds=0), make_hardware(100, host_bytes=99)):
        assert Problem.of(one_tensor, hardware).with_host_alone() is None
