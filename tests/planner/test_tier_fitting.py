"""What finds no room on a full tier goes to another one, and no more than has to."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.planner.optimal_cases import random_case

from teraio.contracts.hardware import Hardware
from teraio.contracts.table import IntArray
from teraio.planner.optimal import optimal as optimal_module
from teraio.planner.optimal.guide import solve_guide
from teraio.planner.optimal.guiding import Advice, Guiding
from teraio.planner.optimal.local_search import search_locally
from teraio.planner.optimal.occupancy import arena_bytes, limited_devices, taken_slots
from teraio.planner.optimal.optimal import plan_optimal
from teraio.planner.optimal.periods import STAYS, Problem
from teraio.planner.optimal.repairing import repair
from teraio.planner.optimal.search import Search
from teraio.planner.optimal.slots import guide_slots
from teraio.planner.optimal.tier_fitting import fit_tiers
from teraio.planner.verifier import verify
from teraio.traces.trace import Trace

HOST, SSD = 0, 1
SLOT_BYTES = 512
"""The host's alignment."""

MakeTrace = Callable[..., Trace]
MakeHardware = Callable[..., Hardware]


def idle_tensors(make_trace: MakeTrace, slots: list[int], b_bytes: int) -> Trace:
    """Tensors of so many slots each, idle while B lives."""
    names = [f"s{i}" for i in range(len(slots))]
    return make_trace(
        [1.0] * 6,
        [
            *((name, n * SLOT_BYTES, 0, 5) for name, n in zip(names, slots, strict=True)),
            ("B", b_bytes, 2, 3),
        ],
        [
            (2, "B", "w"),
            (3, "B", "r"),
            *((k, name, how) for name in names for k, how in ((0, "w"), (5, "r"))),
        ],
    )


def row_of(problem: Problem, name: str) -> int:
    storage = problem.trace.storages.name.tolist().index(name)
    rows = np.flatnonzero((problem.storage == storage) & ~problem.is_tail)
    assert len(rows) == 1
    return int(rows[0])


@pytest.mark.parametrize(
    ("slots", "host_slots", "leaves"),
    [
        ([4, 4, 5], 10, ["s0"]),
        ([8, 1, 2], 10, ["s1"]),
        ([8, 1, 2], 11, []),
        ([3, 3, 3], 3, ["s0", "s1"]),
    ],
)
def test_least_that_frees_enough_leaves_the_host(
    slots: list[int],
    host_slots: int,
    leaves: list[str],
    make_trace: MakeTrace,
    make_hardware: MakeHardware,
) -> None:
    """3 of 13 slots too many: one of 4 leaves, not the one of 5. 1 of 11: the one of 1. 6 of 9."""
    trace = idle_tensors(make_trace, slots, 1)
    hardware = make_hardware(10**6, ssd_rate=50.0, host_bytes=host_slots * SLOT_BYTES)
    problem = Problem.of(trace, hardware)
    device = np.full(len(problem.period), STAYS)
    for i in range(len(slots)):
        device[row_of(problem, f"s{i}")] = HOST
    fitted = fit_tiers(problem, device)
    expected = device.copy()
    expected[[row_of(problem, name) for name in leaves]] = SSD
    assert fitted.tolist() == expected.tolist()


def test_choice_stays_as_it_was_where_no_tier_has_room(
    make_trace: MakeTrace, make_hardware: MakeHardware
) -> None:
    """Nine slots for a host of four and an SSD of four."""
    trace = idle_tensors(make_trace, [3, 3, 3], 1)
    room = 4 * SLOT_BYTES
    hardware = make_hardware(10**6, host_bytes=room, capacity_bytes=room)
    problem = Problem.of(trace, hardware)
    device = np.full(len(problem.period), STAYS)
    device[[row_of(problem, f"s{i}") for i in range(3)]] = HOST
    assert fit_tiers(problem, device).tolist() == device.tolist()


def test_random_choices_fit_and_keep_what_leaves(random_trace: Callable[[int], Trace]) -> None:
    """With a third of what the host would need, and an SSD with room for all."""
    num_moved = 0
    for seed in range(80):
        trace, hardware = random_case(seed, random_trace)
        ssds = tuple(replace(ssd, capacity_bytes=10**12) for ssd in hardware.ssd)
        if not ssds:
            continue
        problem = Problem.of(trace, replace(hardware, ssd=ssds).with_budgets(host_memory=10**12))
        chosen = repair(problem, np.full(len(problem.period), STAYS))
        if chosen is None:
            continue
        chosen = np.where(chosen == STAYS, STAYS, HOST)
        needed = arena_bytes(taken_slots(problem, chosen, HOST), trace.num_kernels)
        small = Problem.of(trace, problem.hardware.with_budgets(host_memory=max(needed // 3, 1)))
        fitted = fit_tiers(small, chosen)
        assert ((fitted == STAYS) == (chosen == STAYS)).all()
        if HOST in limited_devices(small):
            taken = arena_bytes(taken_slots(small, fitted, HOST), trace.num_kernels)
            assert taken <= small.machine.capacity_bytes[HOST]
            num_moved += int((fitted != chosen).any())
    assert num_moved > 10


def test_plan_fills_the_host_to_the_last_slot(
    make_trace: MakeTrace, make_hardware: MakeHardware
) -> None:
    """40 tensors of a slot must leave, the host has room for 39, and the SSD needs 10 s for one."""
    trace = idle_tensors(make_trace, [1] * 40, 40 * SLOT_BYTES)
    hardware = make_hardware(
        40 * SLOT_BYTES, ssd_rate=SLOT_BYTES / 10, host_rate=1e9, host_bytes=39 * SLOT_BYTES
    )
    plan = plan_optimal(trace, hardware)
    assert verify(trace, plan).fits
    assert plan.moves.tier.tolist().count("ssd") == 1
    # 10 s each way: 1 s of either hides.
    assert plan.predicted_seconds == pytest.approx(6 + 2 * 9, abs=1e-3)


def test_large_storages_move_as_a_whole(make_trace: MakeTrace, make_hardware: MakeHardware) -> None:
    """B needs 3 of the 10 slots that two tensors of 5 have: a fluid moves 3 of them, a plan 5."""
    trace = idle_tensors(make_trace, [5, 5], 3 * SLOT_BYTES)
    problem = Problem.of(trace, make_hardware(10 * SLOT_BYTES, ssd_rate=1e6, host_bytes=0))
    slots = guide_slots(trace, 0.0, math.inf)
    divided = solve_guide(problem, slots, None)
    whole = solve_guide(problem, slots, None, whole=True)
    assert divided is not None
    assert whole is not None
    assert divided.wanted_bytes.sum() == pytest.approx(3 * SLOT_BYTES, rel=1e-4)
    assert whole.wanted_bytes.sum() == pytest.approx(5 * SLOT_BYTES, rel=1e-4)


def test_guides_leave_time_to_the_local_search(
    make_trace: MakeTrace, make_hardware: MakeHardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long they take: at least a third of the limit is left when it begins."""
    trace = idle_tensors(make_trace, [2, 3, 5, 7], 9 * SLOT_BYTES)
    hardware = make_hardware(17 * SLOT_BYTES, ssd_rate=SLOT_BYTES / 2, host_bytes=4 * SLOT_BYTES)
    left: list[float] = []
    advise = Guiding.advise

    def slow(self: Guiding, **keywords: Any) -> Advice | None:
        time.sleep(0.2)
        return advise(self, **keywords)

    def watched(search: Search, group: IntArray, most: int | None) -> None:
        assert search.deadline is not None
        left.append(search.deadline - time.monotonic())
        search_locally(search, group, 1)

    monkeypatch.setattr(Guiding, "advise", slow)
    monkeypatch.setattr(optimal_module, "search_locally", watched)
    plan_optimal(trace, hardware, time_limit=1.5)
    assert left
    assert left[0] > 0.5
