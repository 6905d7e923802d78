"""The verifier against an obvious machine that moves contents, on random traces and plans.

Where the verifier says *valid*, the machine must never read what is absent, stale or foreign; where
it says *fits*, it must never hold more than the budget. The other way round, plans built to be
right must pass.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planner.plan_machine import Machine, windows_of
from tests.planner.random_plans import random_plan, source_of

from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Plan
from teraio.contracts.plan_checks import check_plan, find_violations


@pytest.fixture(scope="session")
def machine_text(small_hardware: Hardware) -> str:
    return small_hardware.to_toml()


def runs_right(plan: Plan, seed: int) -> Machine:
    machine = Machine(plan, random.Random(seed))
    machine.start_cold()
    machine.run(4)
    return machine


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_plans_built_to_be_right_pass_and_run(machine_text: str, seed: int) -> None:
    plan = random_plan(seed, machine_text)
    assert check_plan(plan) == []
    assert runs_right(plan, seed).problems == []


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_fits_is_exact_to_the_byte(machine_text: str, seed: int) -> None:
    plan = random_plan(seed, machine_text)
    tighter = replace(
        plan,
        metadata=replace(plan.metadata, gpu_memory_bytes=plan.metadata.gpu_memory_bytes - 1),
    )
    verdict = find_violations(tighter).verification()
    assert verdict.valid
    assert not verdict.fits


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_slots_collide_exactly_if_two_copies_hold_a_block_at_once(
    machine_text: str, seed: int
) -> None:
    """Against a count of holders per block and kernel, with places thrown into a small arena."""
    plan, chance = random_plan(seed, machine_text), random.Random(seed)
    offsets = plan.moves.tier_offset_bytes.copy()
    for place in {w.place for w in windows_of(plan)}:
        rows = [w.row for w in windows_of(plan) if w.place == place]
        offsets[rows] = 4096 * chance.randint(0, 8)
    plan = replace(plan, moves=replace(plan.moves, tier_offset_bytes=offsets))
    found = {v.rule for v in check_plan(plan)}
    assert "clean" not in found
    assert ("slot" in found) == has_collision(plan)


def has_collision(plan: Plan) -> bool:
    num_kernels, windows = len(plan.kernels), windows_of(plan)
    machine = Machine(plan, random.Random(0))
    holders: dict[tuple[int, str, int], set[tuple[int, int]]] = {}
    for window in windows:
        made = source_of(plan, window, windows)
        span = range(num_kernels) if made is None else range(made, window.end)
        copy = (window.storage, -1 if made is None else made % num_kernels)
        for kernel in span:
            for block in machine.blocks_of(window.storage, window.device, window.offset):
                holders.setdefault((kernel % num_kernels, *block), set()).add(copy)
    return any(len(copies) > 1 for copies in holders.values())


def change(plan: Plan, chance: random.Random) -> Plan:
    """One random cell of one random table takes another value of its kind, sensible or not.

    Half of the changes are of the subtle sorts: a flag of a write flips, a move stands twice.
    """
    if len(plan.moves) and chance.random() < 0.1:
        twice = [*range(len(plan.moves)), chance.randrange(len(plan.moves))]
        return replace(plan, moves=plan.moves.take(np.array(twice)))
    if chance.random() < 0.4:
        name = chance.choice(["moves", "accesses"] if len(plan.moves) else ["accesses"])
        writes = getattr(plan, name).writes.copy()
        row = chance.randrange(len(writes))
        writes[row] = not writes[row]
        return replace(plan, **{name: replace(getattr(plan, name), writes=writes)})
    names = [n for n in ("moves", "storages", "accesses", "copies", "kernels") if getattr(plan, n)]
    name = chance.choice([*names, "moves"] if len(plan.moves) else names)
    table = getattr(plan, name)
    column = chance.choice(table.COLUMNS)
    values = getattr(table, column.name).copy()
    row = chance.randrange(len(table))
    choices: dict[str, list[Any]] = {
        "int": [*range(-2, 12), 512, 4096, 2**62, -(2**62), int(values[0]) + 1]
        if column.kind == "int"
        else [],
        "bool": [True, False],
        "text": ["", "gpu", "host", "ssd", "near", "far", "recompute"],
    }
    values[row] = chance.choice(choices[column.kind])
    return replace(plan, **{name: replace(table, **{column.name: values})})


@settings(max_examples=500, deadline=None)
@given(seed=st.integers(0, 2**32), num_changes=st.integers(1, 4))
def test_a_changed_plan_never_crashes_and_runs_if_valid(
    machine_text: str, seed: int, num_changes: int
) -> None:
    chance = random.Random(seed)
    plan = random_plan(seed % 500, machine_text)
    for _ in range(num_changes):
        plan = change(plan, chance)
    verdict = find_violations(plan).verification()
    if not verdict.valid:
        assert verdict.violations
        return
    machine = runs_right(plan, seed)
    assert machine.problems == []
    if verdict.fits:
        assert max(machine.used) <= plan.metadata.gpu_memory_bytes
