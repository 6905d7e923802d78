"""The fluid bound: below every plan that fits, tight where it can be, and proved by its duals."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.planner.random_plans import random_plan

from teraio.contracts.hardware import Gpu, Hardware, Host, Link, Slowdown, Ssd
from teraio.contracts.plan import Plan
from teraio.contracts.table import FloatArray
from teraio.errors import CapacityError, InfeasibleError, InputError
from teraio.planner.comparison import plan_summary
from teraio.planner.drafts import draft_moves
from teraio.planner.fluid.bound import Bound, lower_bound
from teraio.planner.fluid.certificate import Shown, shown_by
from teraio.planner.fluid.channels import hull
from teraio.planner.fluid.linear_program import LinearProgram
from teraio.planner.fluid.solve import solve
from teraio.planner.greedy import plan_greedy
from teraio.planner.plan_building import build_plan
from teraio.planner.planning import plan as make_plan
from teraio.planner.verifier import verify
from teraio.simulator import simulate
from teraio.traces.lifetimes import inactive_periods
from teraio.traces.trace import Kernels, Storages, Trace, TraceMetadata

MakeTrace = Callable[..., Trace]
MakeHardware = Callable[..., Hardware]
PLENTY = 10**15
COARSE = 1.0
"""Longest slot, in seconds, of what would be cut as finely as it can be."""


def is_below(bound: Bound, seconds: float) -> bool:
    """Up to the rounding of sums, the bound is no more than the time of a schedule."""
    return bound.seconds <= seconds * (1 + 1e-8) + 1e-9


@pytest.fixture(scope="session")
def k0_k1(make_trace: MakeTrace) -> Trace:
    """X (10 B) waits from 0 to 2, and Y (10 B) lives in 1."""
    return make_trace(
        [1.0] * 3,
        [("X", 10, 0, 2), ("Y", 10, 1, 1)],
        [(0, "X", "w"), (2, "X", "r"), (1, "Y", "w")],
    )


def test_stall_before_the_next_kernel_is_used(k0_k1: Trace, make_hardware: MakeHardware) -> None:
    """Capacity 10, 1 B/s: 3 s of kernels, X out for 10 s before K1 and back for 10 s after it."""
    bound = lower_bound(k0_k1, make_hardware(10, ssd_rate=1.0, host_bytes=0))
    assert bound.seconds == pytest.approx(23.0, abs=1e-6)
    assert (bound.kind, bound.status) == ("dual", "optimal")
    assert bound.value_of_gb["gpu"] == pytest.approx(2e9)
    assert bound.value_of_gb_per_second["ssd0 read"] == pytest.approx(1e10, rel=1e-4)
    assert bound.value_of_gb_per_second["ssd0 write"] == pytest.approx(1e10, rel=1e-4)
    assert bound.value_of_gb_per_second["pcie read"] == 0


def test_two_tiers_share_the_work(k0_k1: Trace, make_hardware: MakeHardware) -> None:
    """At 1 B/s and 4 B/s together, 5 B/s: 2 s each way."""
    bound = lower_bound(k0_k1, make_hardware(10, ssd_rate=1.0, host_rate=4.0))
    assert bound.seconds == pytest.approx(7.0, abs=1e-6)


def test_a_small_tier_takes_what_it_holds(k0_k1: Trace, make_hardware: MakeHardware) -> None:
    """The host holds 2 of 10 B: 8 B go to the SSD at 1 B/s, and one byte more saves 2 s."""
    bound = lower_bound(k0_k1, make_hardware(10, ssd_rate=1.0, host_rate=4.0, host_bytes=2))
    assert bound.seconds == pytest.approx(19.0, abs=1e-6)
    assert bound.value_of_gb["host"] == pytest.approx(2e9)


def test_the_link_carries_what_it_can(k0_k1: Trace, make_hardware: MakeHardware) -> None:
    """Two devices of 4 B/s behind a link of 5 B/s."""
    hardware = make_hardware(10, ssd_rate=4.0, host_rate=4.0)
    slow = replace(hardware, link=(Link(name="pcie", read_rate=5, write_rate=5),))
    bound = lower_bound(k0_k1, slow)
    assert bound.seconds == pytest.approx(7.0, abs=1e-6)
    assert bound.value_of_gb_per_second["pcie read"] > 0


def test_bounced_bytes_cross_host_memory_twice(k0_k1: Trace, make_hardware: MakeHardware) -> None:
    """Without GDS, 1 B/s of host memory moves half a byte per second."""
    hardware = make_hardware(10, ssd_rate=4.0, host_bytes=0, gds=False, bounce_bytes=0)
    host = replace(hardware.host, memory_rate=1.0)
    bound = lower_bound(k0_k1, replace(hardware, host=host))
    assert bound.seconds == pytest.approx(43.0, abs=1e-6)
    assert bound.value_of_gb_per_second["host memory"] == pytest.approx(4e10, rel=1e-4)


@pytest.mark.parametrize(("how", "seconds"), [("r", 14.0), ("rw", 24.0)])
def test_what_is_not_written_is_dropped(
    make_trace: MakeTrace, make_hardware: MakeHardware, how: str, seconds: float
) -> None:
    """W (10 B, persistent) gives way to Y (10 B) once: read back for 10 s, written if it changed.

    4 s of kernels; W is used in 0 and 2, and Y lives in 1.
    """
    trace = make_trace(
        [1.0] * 4,
        [("W", 10, None, None), ("Y", 10, 1, 1)],
        [(0, "W", how), (2, "W", "r"), (1, "Y", "w")],
    )
    bound = lower_bound(trace, make_hardware(10, ssd_rate=1.0, host_bytes=0))
    assert bound.seconds == pytest.approx(seconds, abs=1e-6)


def test_ideal_where_everything_fits(k0_k1: Trace, make_hardware: MakeHardware) -> None:
    bound = lower_bound(k0_k1, make_hardware(20))
    assert (bound.seconds, bound.kind, bound.status) == (3.0, "ideal", "optimal")


def test_a_kernel_that_can_never_run_is_named(k0_k1: Trace, make_hardware: MakeHardware) -> None:
    with pytest.raises(InfeasibleError, match=r"kernel 0 .* needs 10 bytes"):
        lower_bound(k0_k1, make_hardware(9))


def test_no_room_on_any_tier_proves_nothing(k0_k1: Trace, make_hardware: MakeHardware) -> None:
    hardware = make_hardware(10, host_bytes=5, capacity_bytes=4)
    bound = lower_bound(k0_k1, hardware)
    assert (bound.status, bound.seconds >= 3.0) == ("infeasible", True)


@pytest.mark.parametrize("factor", [1, 512, 10**9, 10**12])
def test_sizes_and_rates_in_bytes_do_not_matter(
    make_trace: MakeTrace, make_hardware: MakeHardware, factor: int
) -> None:
    """Byte-sized coefficients make solvers certify wrong optima; units are chosen anew."""
    trace = make_trace(
        [1.0] * 3,
        [("X", 10 * factor, 0, 2), ("Y", 10 * factor, 1, 1)],
        [(0, "X", "w"), (2, "X", "r"), (1, "Y", "w")],
    )
    hardware = make_hardware(10 * factor, ssd_rate=factor, host_bytes=0)
    hardware = replace(hardware, link=(Link(name="pcie", read_rate=1e16, write_rate=1e16),))
    assert lower_bound(trace, hardware).seconds == pytest.approx(23.0, abs=1e-6)


def test_the_certificate_needs_no_right_duals() -> None:
    """min x + y, x + y >= 1, x - y <= 0: any dual vector shows at most 1, the right one all of it;
    signs that point at an infinite side, and what is no number, show nothing."""
    program = LinearProgram(
        cost=np.ones(2),
        column_upper=np.full(2, 10.0),
        row_lower=np.array([1.0, -np.inf]),
        row_upper=np.array([np.inf, 0.0]),
        rows=np.array([0, 0, 1, 1]),
        columns=np.array([0, 1, 0, 1]),
        values=np.array([1.0, 1.0, 1.0, -1.0]),
    )

    def shown(duals: FloatArray) -> float:
        return shown_by(program, duals).at_zero

    duals = solve(program).duals
    assert duals is not None
    assert 1 - 1e-9 <= shown(duals) <= 1
    assert shown(np.array([np.nan, np.inf])) <= 0
    assert -1e-9 <= shown(np.array([-5.0, 0.0])) <= 0
    chance = np.random.default_rng(0)
    assert all(shown(chance.normal(size=2)) <= 1 for _ in range(1000))


def test_an_unlimited_variable_costs_what_it_is_worth() -> None:
    """At least 10, less 4 times the largest stall: 2 at a stall of 2, and no less elsewhere."""
    assert Shown(10.0, -4.0).minimum() == pytest.approx(2.0)
    assert Shown(10.0, 0.0).minimum() == pytest.approx(10.0)
    assert Shown(-1.0, -4.0).minimum() == 0.0


@pytest.mark.parametrize(
    ("duplex", "inside", "outside"),
    [
        ((10, 10), [(10, 10)], [(11, 0), (0, 11)]),
        ((6, 8), [(10, 0), (6, 8), (0, 10), (3, 9)], [(10, 1), (7, 8), (6, 9)]),
        ((2, 3), [(10, 0), (5, 5), (2, 3)], [(6, 5), (5, 6)]),
    ],
)
def test_hull_of_rates(
    duplex: tuple[float, float],
    inside: list[tuple[float, float]],
    outside: list[tuple[float, float]],
) -> None:
    """10 B/s each way alone; pairs are (read, write)."""
    faces = hull(10, 10, *duplex)

    def holds(read: float, write: float) -> bool:
        return all(read * r + write * w <= 1 + 1e-12 for r, w in faces)

    assert all(holds(*rates) for rates in inside)
    assert not any(holds(*rates) for rates in outside)


def random_hardware(chance: random.Random) -> Hardware:
    """Two tiers or three, every kind of limit; memory is plenty."""
    duplex: dict[str, Any] = {"duplex_read_rate": 20, "duplex_write_rate": 45}
    ssd: dict[str, Any] = {"capacity_bytes": PLENTY, "alignment_bytes": 1, "bounce_bytes": 0}
    read_rate, write_rate = chance.choice(((1e9, 1e9), (70, 90)))
    near: dict[str, Any] = chance.choice(({}, duplex))
    second = Ssd(name="far", read_rate=30, write_rate=25, gds=True, **ssd)
    return Hardware(
        name="random",
        gpu=(Gpu(name="gpu", memory_bytes=PLENTY, link="pcie"),),
        link=(Link(name="pcie", read_rate=read_rate, write_rate=write_rate),),
        host=Host(
            memory_bytes=PLENTY,
            read_rate=80,
            write_rate=80,
            memory_rate=chance.choice((None, 100)),
        ),
        ssd=(
            Ssd(name="near", read_rate=60, write_rate=60, gds=chance.random() < 0.5, **ssd | near),
            *([second] if chance.random() < 0.5 else []),
        ),
        slowdown=chance.choice((Slowdown(), Slowdown(read=1.25, write=1.5, both=2.0))),
    )


def random_valid_plan(trace: Trace, hardware: Hardware, chance: random.Random) -> Plan:
    """Random periods in random windows on random devices, or all of them for as long as can be."""
    periods = inactive_periods(trace)
    share = chance.choice((0.3, 0.7, 1.0))
    is_longest = chance.random() < 0.5
    rows, windows = [], []
    for row in range(len(periods)):
        after, end = int(periods.after_kernel[row]), int(periods.end_kernel[row])
        is_tail = bool(periods.is_tail[row])
        last = end + 1 if is_tail else end
        if chance.random() > share or last - after < 2:
            continue
        offload = after if is_longest else chance.randint(after, last - 2)
        free_by = offload + 1 if is_longest else chance.randint(offload + 1, last - 1)
        prefetch = end if is_longest else chance.randint(free_by + 1, last)
        rows.append(row)
        windows.append((offload, free_by, min(prefetch, end)))
    table = np.array(windows, dtype=np.int64).reshape(-1, 3)
    devices = ["host", *hardware.ssd_names][: chance.choice((1, 2, 3))]
    moves = draft_moves(
        trace,
        periods,
        np.array(rows, dtype=np.int64),
        offload_start=table[:, 0],
        free_by=table[:, 1],
        prefetch_start=table[:, 2],
        device=np.array([chance.choice(devices) for _ in rows], dtype=object),
    )
    return build_plan(trace, moves, hardware, planner="random")


def with_exact_budgets(hardware: Hardware, plan: Plan) -> Hardware:
    """The machine whose every capacity is what the plan takes, not a byte more."""
    arena = plan.metadata.arena_bytes
    exact = hardware.with_budgets(plan.metadata.peak_gpu_bytes, arena.get("host", 0))
    ssds = tuple(replace(ssd, capacity_bytes=arena.get(ssd.name, 0)) for ssd in exact.ssd)
    return replace(exact, ssd=ssds)


@pytest.mark.parametrize("block", range(4))
def test_below_every_random_plan(random_trace: Callable[[int], Trace], block: int) -> None:
    """At the very budgets that the plan takes, with clean copies, and at coarse slots too."""
    stalled = 0
    for seed in range(30 * block, 30 * block + 30):
        chance = random.Random(seed)
        trace, hardware = random_trace(seed), random_hardware(chance)
        for _ in range(2):
            plan = random_valid_plan(trace, hardware, chance)
            exact = with_exact_budgets(hardware, plan)
            timeline = simulate(trace, plan, hardware, record=False)
            if not timeline.metadata.steady:
                continue
            bound = lower_bound(trace, exact)
            assert is_below(bound, plan.predicted_seconds), (seed, bound, plan)
            assert bound.status == "optimal"
            assert bound.seconds >= trace.ideal_seconds
            if bound.solver_seconds is not None:
                assert is_below(bound, bound.solver_seconds)
                assert bound.seconds == pytest.approx(bound.solver_seconds, rel=1e-5, abs=1e-6)
            coarse = lower_bound(trace, exact, slot_seconds=COARSE)
            assert is_below(coarse, bound.seconds), (seed, coarse, bound)
            stalled += bound.kind == "dual"
    assert stalled > 0


def timed(plan: Plan, chance: random.Random) -> Trace:
    """A trace with the plan's kernels and storages, and random times."""
    kernels, storages = plan.kernels, plan.storages
    rows = []
    for k, op in enumerate(kernels.op):
        times = chance.choice((0.0, 0.5, 1.0)), chance.choice((0.0, 0.25))
        scratch = kernels.workspace_bytes[k]
        rows.append((k, op, "", "other", None, *times, scratch, k, 0, "", None, None, None))
    table = Storages(
        storage=storages.storage,
        nbytes=storages.nbytes,
        allocated_bytes=storages.allocated_bytes,
        kind=storages.kind,
        name=storages.name,
        birth=storages.birth,
        birth_ordinal=storages.birth_ordinal,
        death=storages.death,
        dtype=np.full(len(storages), "float32", dtype=object),
        resizable=np.ones(len(storages), dtype=bool),
    )
    return Trace(Kernels.from_rows(rows), table, plan.accesses, TraceMetadata(source="fake"))


@pytest.mark.parametrize("block", range(4))
def test_below_plans_that_a_machine_built(small_hardware: Hardware, block: int) -> None:
    """Plans from another builder: copies reused in its own way, sizes that are rounded up."""
    compared = 0
    for seed in range(40 * block, 40 * block + 40):
        plan = random_plan(seed, small_hardware.to_toml())
        trace = timed(plan, random.Random(seed))
        slow = replace(
            small_hardware,
            host=Host(read_rate=4000, write_rate=4000, memory_bytes=100_000),
            ssd=tuple(
                Ssd(name=ssd.name, read_rate=3000, write_rate=3000, capacity_bytes=PLENTY, gds=True)
                for ssd in small_hardware.ssd
            ),
        )
        slow = slow.with_budgets(plan.metadata.gpu_memory_bytes, 100_000)
        metadata = replace(plan.metadata, trace_hash=trace.hash, hardware=slow.to_toml())
        timeline = simulate(trace, replace(plan, metadata=metadata), slow, record=False)
        if not timeline.metadata.steady or timeline.metadata.evictions:
            continue
        bound = lower_bound(trace, slow)
        assert is_below(bound, timeline.iteration_seconds), (seed, bound)
        compared += bound.kind == "dual"
    assert compared > 0


@pytest.mark.parametrize("block", range(4))
def test_below_greedy_and_falling_with_memory_and_rates(
    random_trace: Callable[[int], Trace], make_hardware: MakeHardware, block: int
) -> None:
    compared = 0
    for seed in range(15 * block, 15 * block + 15):
        trace, chance = random_trace(seed), random.Random(seed)
        gpu_bytes = round(trace.peak_allocated_bytes * chance.uniform(0.5, 0.95))
        host_bytes = chance.choice((0, 100, PLENTY))
        make = partial(make_hardware, gpu_bytes, ssd_rate=50.0, host_bytes=host_bytes)
        try:
            plan = plan_greedy(trace, make())
        except (CapacityError, InfeasibleError):
            continue
        bound = lower_bound(trace, make())
        assert verify(trace, plan).fits
        assert is_below(bound, plan.predicted_seconds), (seed, bound)
        more = (
            lower_bound(trace, make(), gpu_memory=gpu_bytes + 5),
            lower_bound(trace, make(), host_memory=host_bytes + 40),
            lower_bound(trace, make(host_rate=120.0)),
            lower_bound(trace, make_hardware(gpu_bytes, ssd_rate=70.0, host_bytes=host_bytes)),
        )
        assert all(is_below(faster, bound.seconds) for faster in more), (seed, bound, more)
        compared += 1
    assert compared > 0


def test_a_plan_keeps_its_bound(k0_k1: Trace, make_hardware: MakeHardware, tmp_path: Path) -> None:
    """The only plan for K0 and K1 is optimal, and its file says so; the moves are the same."""
    hardware = make_hardware(10, ssd_rate=1.0, host_bytes=0)
    made = make_plan(k0_k1, hardware, bound=True)
    made.save(tmp_path / "k.plan")
    loaded = Plan.load(tmp_path / "k.plan")
    assert loaded.metadata.bound_kind == "dual"
    assert loaded.lower_bound_seconds == pytest.approx(23.0, abs=1e-6)
    assert loaded.gap == pytest.approx(0.0, abs=1e-7)
    summary = plan_summary(loaded)
    assert summary["bound_seconds"] > 0
    assert summary["value_of_gb"]["gpu"] == pytest.approx(2e9)
    assert summary["value_of_gb_per_second"]["ssd0 write"] == pytest.approx(1e10, rel=1e-4)
    assert made.moves.equals(make_plan(k0_k1, hardware).moves)


def test_no_bound_where_nothing_needs_to_fit(k0_k1: Trace, make_hardware: MakeHardware) -> None:
    with pytest.raises(InputError, match="bound: holds for plans that fit"):
        make_plan(k0_k1, make_hardware(10), planner="on-demand", bound=True)


def test_a_bound_cut_short_is_still_one(k0_k1: Trace, make_hardware: MakeHardware) -> None:
    bound = lower_bound(k0_k1, make_hardware(10, ssd_rate=1.0), time_limit=1e-9)
    assert 3.0 <= bound.seconds <= 23.0
