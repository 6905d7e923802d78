"""What must hold on every small instance, against the best plan found by trying them all."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, pairwise

import numpy as np
import pytest
from tests.planner.brute_force import (
    all_fitting,
    best_plan,
    moves_of,
    options_of,
    play,
    pose,
    set_writing,
)
from tests.planner.tiny_instances import Tiny, tiny_instances

from teraio.contracts.hardware import Hardware, Link, Slowdown
from teraio.errors import CapacityError, InfeasibleError
from teraio.planner.fluid.bound import lower_bound
from teraio.planner.milp.exact import plan_milp
from teraio.planner.plan_building import build_plan
from teraio.planner.planning import plan as make_plan
from teraio.planner.verifier import verify
from teraio.simulator import simulate

INSTANCES, BLOCKS = 1000, 10
"""Instances tried in all, and in how many tests."""

MOST_PLANS = 1e4
"""Combinations of windows of an instance: up to three periods of medium length."""

FEW_PLANS = 100
"""Combinations of an instance where each plan is simulated."""

SLOT_BYTES = 512
"""The smallest slot in host memory."""

LONG = 64
"""Iterations in which any of these plans has become steady."""


def of_block(block: int, count: int = INSTANCES // BLOCKS) -> Iterator[Tiny]:
    return tiny_instances(10_000 * block, count, MOST_PLANS)


def best_seconds(tiny: Tiny, hardware: Hardware) -> float | None:
    """Iteration time of the best plan on another machine, None if there is none."""
    problem, _ = pose(tiny.trace, hardware, ticks_per_second=2)
    best = best_plan(problem)
    return None if best is None else best.ticks / best.iterations / 2


def sample(block: int, count: int) -> Iterator[Tiny]:
    """Some instances of a block; all there are if TERAIO_ALL_INSTANCES is set (minutes a test)."""
    if "TERAIO_ALL_INSTANCES" in os.environ:
        return chain.from_iterable(of_block(number) for number in range(BLOCKS))
    return of_block(block, count)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_the_best_of_all_plans(block: int) -> None:
    """The fluid bound is never above it; the program finds it and proves it."""
    stalled = 0
    for tiny in of_block(block):
        best = best_plan(tiny.problem)
        if best is None:
            with pytest.raises((CapacityError, InfeasibleError)):
                plan_milp(tiny.trace, tiny.hardware)
            continue
        seconds = best.ticks / best.iterations
        bound = lower_bound(tiny.trace, tiny.hardware)
        assert bound.seconds <= seconds * (1 + 1e-8), (tiny.seed, bound, best)
        made = plan_milp(tiny.trace, tiny.hardware)
        assert made.predicted_seconds == pytest.approx(seconds, rel=1e-12), (tiny.seed, best)
        assert made.metadata.options["proof"] == "optimal", tiny.seed
        verification = verify(tiny.trace, made)
        assert verification.fits, (tiny.seed, verification)
        if seconds > tiny.trace.ideal_seconds * (1 + 1e-9) and made.metadata.options["rounds"]:
            objective = made.metadata.options["objective_seconds"]
            assert made.predicted_seconds == pytest.approx(objective, rel=1e-12), tiny.seed
            stalled += 1
    assert stalled > 0


def test_playing_plans_is_what_the_simulator_does() -> None:
    """Random plans of random instances, with rows in random order; and each best plan."""
    chance = random.Random(0)
    for tiny in of_block(0, 40):
        options, first = options_of(tiny.problem)
        best = best_plan(tiny.problem)
        tried = [] if best is None else [(best.windows, best.rank)]
        for _ in range(4):
            chosen = [chance.randrange(*pair) for pair in pairwise(first)]
            tried.append(
                (options[chosen], np.array(chance.sample(range(len(chosen)), len(chosen))))
            )
        for windows, rank in tried:
            writes = np.zeros(len(windows), dtype=np.int64)
            set_writing(tiny.problem, windows, writes)
            ticks, iterations = play(tiny.problem, windows, writes, rank)
            moves = moves_of(tiny.trace, tiny.problem, tiny.devices, windows, rank)
            unlimited = tiny.hardware.with_budgets(gpu_memory=10**12)
            plan = build_plan(tiny.trace, moves, unlimited, planner="tried")
            assert plan.moves.writes.sum() == writes.sum(), tiny.seed
            timeline = simulate(tiny.trace, plan, record=False, max_iterations=LONG)
            assert timeline.metadata.steady
            seconds = pytest.approx(ticks / iterations, rel=1e-12)
            assert timeline.iteration_seconds == seconds, (tiny.seed, windows, rank)


@pytest.mark.timeout(1800)  # All instances, on a busy core.
def test_more_memory_and_more_bandwidth_never_hurt() -> None:
    """The bound and the optimum fall, or stay, with each of them."""
    fell = 0
    for tiny in sample(1, 60):
        seconds = best_seconds(tiny, tiny.hardware)
        if seconds is None:
            continue
        bound = lower_bound(tiny.trace, tiny.hardware).seconds
        for more in better_machines(tiny.hardware):
            better = best_seconds(tiny, more)
            assert better is not None
            assert better <= seconds, (tiny.seed, more)
            higher = lower_bound(tiny.trace, more).seconds
            assert higher <= bound * (1 + 1e-8), (tiny.seed, more)
            fell += better < seconds and higher < bound
    assert fell > 0


def better_machines(hardware: Hardware) -> Iterator[Hardware]:
    """A little more of one thing at a time."""
    yield hardware.with_budgets(gpu_memory=hardware.gpu[0].memory_bytes + 4)
    for way in ("read_rate", "write_rate"):
        ssd, host = hardware.ssd[0], hardware.host
        faster = {way: 2 * getattr(ssd, way), f"duplex_{way}": 2 * getattr(ssd, way)}
        yield replace(hardware, ssd=(replace(ssd, **faster),))
        faster = {way: 2 * getattr(host, way), f"duplex_{way}": 2 * getattr(host, way)}
        yield replace(hardware, host=replace(host, **faster))
    slow = replace(hardware.ssd[0], latency_seconds=0.0)
    yield replace(hardware, ssd=(slow,))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("planner", ["optimal", "greedy", "milp", "ideal", "on-demand"])
def test_every_plan_verifies_and_none_beats_the_best(planner: str) -> None:
    """``plan`` raises if the verifier finds anything. Only the ideal one has its own GPU."""
    compared = 0
    for tiny in sample(2, 30):
        best = best_plan(tiny.problem)
        if best is None:
            continue
        try:
            made = make_plan(tiny.trace, tiny.hardware, planner=planner)
        except CapacityError:
            assert planner == "greedy", tiny.seed
            continue
        assert verify(tiny.trace, made).valid
        timeline = simulate(tiny.trace, made, record=False, max_iterations=LONG)
        if planner in ("optimal", "greedy", "milp"):
            seconds = best.ticks / best.iterations
            assert timeline.iteration_seconds >= seconds * (1 - 1e-12), tiny.seed
        compared += 1
    assert compared > 10


def machine_of_kind(hardware: Hardware, kind: str) -> Hardware:
    """The machine with one thing that the program by itself, or packing, cannot see."""
    ssd, host = hardware.ssd[0], hardware.host
    if kind == "shared link":
        rates = {
            way: max(getattr(ssd, way), getattr(host, way)) for way in ("read_rate", "write_rate")
        }
        return replace(hardware, link=(Link(name="pcie", **rates),))
    if kind == "duplex":
        half = {f"duplex_{way}": getattr(ssd, way) / 2 for way in ("read_rate", "write_rate")}
        return replace(hardware, ssd=(replace(ssd, **half),))
    if kind == "slow kernels":
        return replace(hardware, slowdown=Slowdown(read=1.5, write=1.5, both=2.0))
    if kind == "write budget":
        return replace(hardware, ssd=(replace(ssd, write_budget=0.25),))
    assert kind == "small tiers"
    small = replace(hardware, ssd=(replace(ssd, capacity_bytes=24),))
    return small.with_budgets(host_memory=SLOT_BYTES)


@pytest.mark.parametrize(
    "kind", ["shared link", "duplex", "slow kernels", "small tiers", "write budget"]
)
def test_the_best_where_transfers_and_slots_meet(kind: str) -> None:
    """Every plan judged by the simulator: here no plan can be judged transfer by transfer."""
    compared = 0
    for tiny in tiny_instances(0, 24, FEW_PLANS):
        if len(tiny.devices) < 2:
            continue
        hardware = machine_of_kind(tiny.hardware, kind)
        seconds = best_simulated(tiny, hardware)
        if seconds is None:
            continue
        made = plan_milp(tiny.trace, hardware)
        assert made.predicted_seconds == pytest.approx(seconds, rel=1e-9), tiny.seed
        assert made.metadata.options["proof"] == "optimal", tiny.seed
        assert verify(tiny.trace, made).fits
        assert lower_bound(tiny.trace, hardware).seconds <= seconds * (1 + 1e-8), tiny.seed
        compared += 1
    assert compared > 3


def best_simulated(tiny: Tiny, hardware: Hardware) -> float | None:
    """The least simulated time of all plans with slots that can be packed and writes allowed."""
    best: float | None = None
    for windows, rank in all_fitting(tiny.problem):
        moves = moves_of(tiny.trace, tiny.problem, tiny.devices, windows, rank)
        try:
            plan = build_plan(tiny.trace, moves, hardware, planner="tried", predicted_seconds=1.0)
        except CapacityError:
            continue
        timeline = simulate(tiny.trace, plan, record=False, max_iterations=LONG)
        assert timeline.metadata.steady
        seconds = timeline.iteration_seconds
        budget = hardware.ssd[0].write_budget
        written = sum(plan.metadata.ssd_bytes_written.values())
        if budget is not None and written > budget * seconds:
            continue
        best = seconds if best is None else min(best, seconds)
    return best
