"""The bound of an iteration that repeats, proved on one of its turns; time limits; SSD wear."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.planner.repeating_traces import Iteration, repeating_trace

from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Plan
from teraio.errors import CapacityError, InputError
from teraio.planner.fluid import bound as bound_module
from teraio.planner.fluid import proof as proof_module
from teraio.planner.fluid.aggregation import aggregate
from teraio.planner.fluid.bound import lower_bound
from teraio.planner.fluid.proof import Instance, instance_of, prove_by_all, prove_by_turns
from teraio.planner.fluid.slots import SlotTurns, cut_into_slots, merged, turns_of_slots
from teraio.planner.greedy import plan_greedy
from teraio.planner.planning import plan as make_plan
from teraio.simulator import simulate
from teraio.simulator.trace_arrays import residency
from teraio.traces.trace import Trace
from teraio.traces.turns import find_turns

MakeTrace = Callable[..., Trace]
MakeHardware = Callable[..., Hardware]
PLENTY = 10**15


@pytest.fixture
def tiles_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small programs are made smaller as well."""
    monkeypatch.setattr(proof_module, "SMALL_ROWS", 0)


def tight(trace: Trace, make_hardware: MakeHardware, seed: int, **options: Any) -> Hardware:
    """A machine on which the trace must wait, alike for a seed."""
    chance = random.Random(seed)
    options = {"ssd_rate": chance.choice((50.0, 100.0, 200.0))} | options
    least = int(residency(trace).required_bytes.max()) + 1
    gpu_bytes = max(least, round(trace.peak_allocated_bytes * chance.uniform(0.4, 0.9)))
    return make_hardware(gpu_bytes, host_bytes=chance.choice((0, 100, PLENTY)), **options)


def cut(trace: Trace, hardware: Hardware) -> tuple[Instance | None, SlotTurns]:
    """Two slots per kernel, and the turns."""
    turns = find_turns(trace.kernels)
    assert turns is not None
    slots = cut_into_slots(trace, None, runs_may_stretch=False, turns=turns)
    of_slots = turns_of_slots(slots, turns)
    return instance_of(trace, hardware, slots, of_slots), of_slots


@pytest.mark.parametrize("block", range(3))
def test_turns_made_one_prove_as_much(make_hardware: MakeHardware, block: int) -> None:
    """Never more than the whole program; as much where turns take equal time; nearly as much with
    noise of 10 % on each kernel, though each kernel is a slot of its own.
    """
    compared = 0
    for seed in range(8 * block, 8 * block + 8):
        for noise, share in ((0.0, 1e-6), (0.1, 0.02)):
            trace = repeating_trace(seed, micro_batches=8, noise=noise)
            instance, turns = cut(trace, tight(trace, make_hardware, seed))
            if instance is None:
                continue
            whole = trace.ideal_seconds + prove_by_all(instance).stall_seconds
            small = prove_by_turns(instance, turns.inner(1))
            tiled = trace.ideal_seconds + small.stall_seconds
            assert tiled <= whole * (1 + 1e-7)
            assert tiled >= whole * (1 - share), (seed, noise)
            assert small.num_rows < len(instance.fluid.program.row_lower)
            found = trace.ideal_seconds + small.found_seconds
            assert tiled == pytest.approx(found, rel=1e-6)
            compared += whole > trace.ideal_seconds
    assert compared > 0


def test_turns_made_one_where_tiers_are_full(make_hardware: MakeHardware) -> None:
    """Copies are kept in what room there is: nearly as much is proved, and more never."""
    compared = 0
    for seed in range(12):
        trace = repeating_trace(seed, micro_batches=8)
        small_and_fast = {"capacity_bytes": 60, "ssd_rate": 200.0, "host_rate": 20.0}
        instance, turns = cut(trace, tight(trace, make_hardware, seed, **small_and_fast))
        if instance is None or not instance.fluid.capacity_rows:
            continue
        proof = prove_by_all(instance)
        if proof.solution.status != "optimal":
            continue
        whole = trace.ideal_seconds + proof.stall_seconds
        for apart, share in ((1, 0.01), (2, 0.001)):
            small = prove_by_turns(instance, turns.inner(apart))
            tiled = trace.ideal_seconds + small.stall_seconds
            assert whole * (1 - share) <= tiled <= whole * (1 + 1e-7), (seed, apart)
        assert proof.solution.duals is not None
        prices = -proof.solution.duals[np.concatenate([*instance.fluid.capacity_rows.values()])]
        compared += prices.max() > 1e-6
    assert compared > 0


def test_as_many_turns_stay_apart_as_keep_the_program_small(
    make_hardware: MakeHardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = repeating_trace(1, micro_batches=12)
    hardware = tight(trace, make_hardware, 1, ssd_rate=50.0)
    sizes = []
    for small_rows in (0, 400, 10_000):
        monkeypatch.setattr(proof_module, "SMALL_ROWS", small_rows)
        sizes.append(lower_bound(trace, hardware).num_rows)
    assert sizes == sorted(set(sizes))
    assert sizes[1] < 400


def test_a_copy_is_written_before_it_serves_all_turns(make_hardware: MakeHardware) -> None:
    """W (10 B) is written by the first kernel, read in 9 turns, and gives way to Y (10 B) in 4.

    At 1 B/s: four reads of 10 s each, one write of 10 s, 3 s of it during the turns before, and
    19 s of kernels. Averaged, each turn writes a fifth of the other 7 B and finds the rest written:
    1.4 s less. Were a copy to serve without being written, it would be 3.5 s less.
    """
    iteration = Iteration()
    iteration.run("begin", "other", None, 1.0, w="rw")
    for m in range(9):
        iteration.run("use", "forward", m, 1.0, w="r")
        iteration.run("big", "backward", m, 1.0, **({f"y_{m}": "w"} if 3 <= m < 7 else {}))
    trace = iteration.trace({"w": 10, "y": 10}, {"w"})
    instance, turns = cut(trace, make_hardware(10, ssd_rate=1.0, host_bytes=0))
    assert instance is not None
    assert turns.count == 8
    for proof, seconds in (
        (prove_by_all(instance), 66.0),
        (prove_by_turns(instance, turns.inner(2)), 64.6),
    ):
        assert trace.ideal_seconds + proof.stall_seconds == pytest.approx(seconds, abs=1e-5)


def test_any_values_of_the_small_program_prove_nothing_wrong(make_hardware: MakeHardware) -> None:
    """What every schedule satisfies, the small program's rows do not forbid: a solution of the
    whole program, averaged over the turns, is one of the small program.
    """
    compared = 0
    for seed in range(6):
        trace = repeating_trace(seed, micro_batches=7, noise=0.1)
        instance, turns = cut(trace, tight(trace, make_hardware, seed))
        values = None if instance is None else prove_by_all(instance).solution.values
        if instance is None or values is None:
            continue
        small = aggregate(instance.fluid, instance.gaps, instance.num_slots, turns.inner(1))
        program, size = small.program, np.bincount(small.column)
        mean = np.bincount(small.column, weights=values) / size
        activity = np.bincount(
            program.rows,
            weights=program.values * mean[program.columns],
            minlength=len(program.row_lower),
        )
        assert (activity >= program.row_lower - 1e-6).all()
        assert (activity <= program.row_upper + 1e-6).all()
        assert program.cost @ mean == pytest.approx(instance.fluid.program.cost @ values)
        compared += 1
    assert compared > 0


@pytest.mark.usefixtures("tiles_everything")
def test_tiled_bound_is_below_simulated_plans(make_hardware: MakeHardware) -> None:
    compared = 0
    for seed in range(16):
        trace = repeating_trace(seed, micro_batches=6, noise=0.1 * (seed % 2))
        hardware = tight(trace, make_hardware, seed)
        try:
            plan = plan_greedy(trace, hardware)
        except CapacityError:
            continue
        bound = lower_bound(trace, hardware)
        assert bound.kind in ("tiled-dual", "ideal")
        seconds = simulate(trace, plan, hardware, record=False).iteration_seconds
        assert bound.seconds <= seconds * (1 + 1e-8), seed
        compared += bound.kind == "tiled-dual"
    assert compared > 0


@pytest.mark.usefixtures("tiles_everything")
def test_prices_are_sums_over_the_turns(make_hardware: MakeHardware) -> None:
    """A slope of a convex function lies below it on either side."""
    compared = 0
    for seed in range(8):
        trace = repeating_trace(seed, micro_batches=8)
        hardware = tight(trace, make_hardware, seed, ssd_rate=50.0)
        gpu_bytes = hardware.gpu[0].memory_bytes
        bound = lower_bound(trace, hardware)
        if bound.kind != "tiled-dual":
            continue
        for change in (-1, 1):
            other = lower_bound(trace, hardware, gpu_memory=gpu_bytes + change)
            line = bound.seconds - bound.value_of_gb["gpu"] * change / 1e9
            assert other.seconds >= line - 1e-5 * bound.seconds
        compared += bound.value_of_gb["gpu"] > 0
    assert compared > 0


@pytest.mark.usefixtures("tiles_everything")
def test_a_plan_says_how_its_bound_was_proved(make_hardware: MakeHardware, tmp_path: Path) -> None:
    trace = repeating_trace(1, micro_batches=8)
    hardware = tight(trace, make_hardware, 1, ssd_rate=50.0)
    make_plan(trace, hardware, planner="greedy", bound=True).save(tmp_path / "r.plan")
    loaded = Plan.load(tmp_path / "r.plan")
    assert loaded.metadata.bound_kind == "tiled-dual"
    assert loaded.lower_bound_seconds is not None
    assert loaded.lower_bound_seconds <= loaded.predicted_seconds


@pytest.mark.usefixtures("tiles_everything")
def test_where_nothing_repeats_the_whole_program_is_solved(make_hardware: MakeHardware) -> None:
    """The same iteration, its kernels all different."""
    trace = repeating_trace(1, micro_batches=6)
    hardware = tight(trace, make_hardware, 1, ssd_rate=50.0)
    ops = np.array([f"op{k}" for k in range(trace.num_kernels)], dtype=object)
    other = replace(trace, kernels=replace(trace.kernels, op=ops))
    assert find_turns(other.kernels) is None
    bound, tiled = lower_bound(other, hardware), lower_bound(trace, hardware)
    assert (bound.kind, tiled.kind) == ("dual", "tiled-dual")
    assert bound.seconds == pytest.approx(tiled.seconds, rel=1e-6)


def test_programs_too_large_become_coarser(
    make_hardware: MakeHardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = repeating_trace(1, micro_batches=6)
    hardware = tight(trace, make_hardware, 1, ssd_rate=50.0)
    fine = lower_bound(trace, hardware)
    monkeypatch.setattr(proof_module, "MOST_ROWS", fine.num_rows // 2)
    coarse = lower_bound(trace, hardware)
    assert coarse.num_rows <= fine.num_rows // 2
    assert trace.ideal_seconds < coarse.seconds <= fine.seconds * (1 + 1e-8)


def test_merged_slots_are_alike_in_all_turns(make_hardware: MakeHardware) -> None:
    trace = repeating_trace(2, micro_batches=6)
    turns = find_turns(trace.kernels)
    assert turns is not None
    slots = cut_into_slots(trace, None, runs_may_stretch=False, turns=turns)
    coarse, of_slots = merged(slots, turns_of_slots(slots, turns), 3)
    assert of_slots is not None
    assert coarse.seconds.sum() == pytest.approx(trace.ideal_seconds)
    inside = coarse.of_piece[2 * turns.first_kernel : 2 * turns.end_kernel]
    by_turn = inside.reshape(turns.count, -1)
    assert (by_turn - by_turn[0] == of_slots.length * np.arange(turns.count)[:, None]).all()
    assert (by_turn[0, 0], by_turn[-1, -1]) == (of_slots.first, of_slots.end - 1)


@pytest.mark.usefixtures("tiles_everything")
def test_a_coarse_bound_comes_first_under_a_limit(
    make_hardware: MakeHardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time enough: the same bound. No time: nothing, and it says so. In between: the coarse one."""
    trace = repeating_trace(1, micro_batches=8)
    hardware = tight(trace, make_hardware, 1, ssd_rate=50.0)
    monkeypatch.setattr(bound_module, "_COARSE_SLOTS_OF_TURN", 2)
    full = lower_bound(trace, hardware)
    assert lower_bound(trace, hardware, time_limit=60.0).seconds == pytest.approx(full.seconds)
    none = lower_bound(trace, hardware, time_limit=1e-6)
    assert (none.seconds, none.kind) == (trace.ideal_seconds, "ideal")
    assert none.status == "no_solution_found"
    solved = proof_module.prove

    def solve_one(instance: Instance, time_limit: float | None) -> proof_module.Proof:
        is_first = not proofs
        proofs.append(solved(instance, time_limit if is_first else 0.0))
        return proofs[-1]

    proofs: list[proof_module.Proof] = []
    monkeypatch.setattr(bound_module, "prove", solve_one)
    coarse = lower_bound(trace, hardware, time_limit=60.0)
    assert len(proofs) == 2
    assert (coarse.kind, coarse.status) == ("tiled-dual", "no_solution_found")
    assert trace.ideal_seconds < coarse.seconds <= full.seconds * (1 + 1e-8)


def test_a_budget_of_writes_is_kept_by_taking_longer(
    make_trace: MakeTrace, make_hardware: MakeHardware
) -> None:
    """X must be written, 10 B: at 0.25 B per second of iteration that takes 40 s, not 23."""
    trace = make_trace(
        [1.0] * 3,
        [("X", 10, 0, 2), ("Y", 10, 1, 1)],
        [(0, "X", "w"), (2, "X", "r"), (1, "Y", "w")],
    )
    hardware = make_hardware(10, ssd_rate=1.0, host_bytes=0)
    for budget, seconds in ((0.25, 40.0), (1.0, 23.0)):
        bound = lower_bound(trace, hardware, ssd_write_budget={"ssd0": budget})
        assert bound.seconds == pytest.approx(seconds, abs=1e-6)


@pytest.mark.usefixtures("tiles_everything")
def test_a_budget_of_writes_holds_for_all_turns_together(make_hardware: MakeHardware) -> None:
    trace = repeating_trace(1, micro_batches=8)
    hardware = tight(trace, make_hardware, 1, ssd_rate=50.0)
    bound = lower_bound(trace, hardware)
    less = lower_bound(trace, hardware, ssd_write_budget={"ssd0": 4.0})
    assert less.kind == "tiled-dual"
    assert less.seconds > bound.seconds * 1.01


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"nvme": 1.0}, r"ssd_write_budget: 'nvme' is not one of the SSDs"),
        ({"ssd0": -1.0}, r"ssd_write_budget: ssd0 must get 0 or more bytes per second, got -1.0"),
        ({"ssd0": float("nan")}, r"ssd_write_budget: ssd0 must get 0 or more"),
    ],
)
def test_a_budget_that_means_nothing_is_refused(
    make_hardware: MakeHardware, budget: dict[str, float], message: str
) -> None:
    trace = repeating_trace(1, micro_batches=4)
    with pytest.raises(InputError, match=message):
        lower_bound(trace, tight(trace, make_hardware, 1), ssd_write_budget=budget)
