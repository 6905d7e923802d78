"""SSDs that must last: a plan writes no more than its budget, or there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.planner.repeating_traces import repeating_trace

from teraio.contracts.hardware import SECONDS_PER_YEAR, Hardware
from teraio.contracts.plan import Plan
from teraio.errors import CapacityError, InputError
from teraio.planner import compare, lower_bound, plan, plan_summary, verify
from teraio.planner.greedy import plan_greedy
from teraio.planner.optimal import periods as periods_module
from teraio.traces.trace import Trace

MakeTrace = Callable[..., Trace]
MakeHardware = Callable[..., Hardware]
PLANNERS = pytest.mark.parametrize("planner", ["greedy", "optimal"])


def limited(hardware: Hardware, bytes_per_second: float) -> Hardware:
    ssds = tuple(replace(ssd, write_budget=bytes_per_second) for ssd in hardware.ssd)
    return replace(hardware, ssd=ssds)


def written(made: Plan) -> int:
    return sum(made.metadata.ssd_bytes_written.values())


@pytest.fixture(scope="module")
def two_tensors(make_trace: MakeTrace) -> Trace:
    """Eight kernels of 1 s. A (100 B) and C (60 B) are idle while B (100 B) lives in 3 and 4; the
    GPU has 100: both must leave.
    """
    return make_trace(
        [1.0] * 8,
        [("A", 100, 0, 7), ("B", 100, 3, 4), ("C", 60, 1, 6)],
        [
            (0, "A", "w"),
            (1, "C", "w"),
            (3, "B", "w"),
            (4, "B", "r"),
            (6, "C", "r"),
            (7, "A", "r"),
        ],
    )


# The budget


def test_years_are_a_rate(make_hardware: MakeHardware) -> None:
    """8 years' worth of 1 byte per second over 2 years, of which each of two GPUs gets half."""
    hardware = make_hardware(100, endurance_bytes=int(8 * SECONDS_PER_YEAR))
    assert hardware.write_budgets(0) == {}
    assert hardware.with_budgets(ssd_years=2).write_budgets(0) == pytest.approx({"ssd0": 4.0})
    node = replace(hardware, gpu=hardware.gpu * 2).with_budgets(ssd_years=2)
    assert node.write_budgets(1) == pytest.approx({"ssd0": 2.0})
    assert node.with_budgets() == node
    assert Hardware.from_toml(node.to_toml()) == node


def test_a_budget_may_stand_in_the_file(make_hardware: MakeHardware) -> None:
    text = limited(make_hardware(100), 5.0).to_toml()
    read = Hardware.from_toml(text.replace("write_budget = 5.0", 'write_budget = "30MB/s"'))
    assert read.write_budgets(0) == {"ssd0": 30e6}
    with pytest.raises(InputError, match=r"ssd ssd0\.write_budget: must be finite"):
        Hardware.from_toml(text.replace("write_budget = 5.0", "write_budget = -1.0"))


@pytest.mark.parametrize(
    ("years", "message"),
    [
        (0.0, "ssd_years: must be above 0 years, got 0"),
        (float("nan"), "ssd_years: must be finite"),
        (5.0, r"ssd_years: the endurance of ssd ssd0 is unknown; give endurance_bytes"),
    ],
)
def test_years_that_mean_nothing_are_refused(
    one_tensor: Trace, make_hardware: MakeHardware, years: float, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        plan(one_tensor, make_hardware(100), ssd_years=years)


# Plans


@PLANNERS
def test_an_ssd_that_may_not_be_written_is_not(
    two_tensors: Trace, make_hardware: MakeHardware, planner: str
) -> None:
    """The host takes what the SSD would have."""
    hardware = make_hardware(100, ssd_rate=200.0, host_rate=50.0)
    free = plan(two_tensors, hardware, planner=planner)
    assert written(free) >= 100
    bound = plan(two_tensors, limited(hardware, 0.0), planner=planner)
    assert (written(bound), set(bound.moves.device)) == (0, {"host"})
    assert bound.predicted_seconds >= free.predicted_seconds


@PLANNERS
def test_a_budget_is_used_as_far_as_it_goes(
    two_tensors: Trace, make_hardware: MakeHardware, planner: str
) -> None:
    """15 B/s for an iteration of at least 8 s: A or C, not both (160 B). The host has one slot, of
    its 512 B alignment, for the other.
    """
    hardware = limited(make_hardware(100, ssd_rate=200.0, host_bytes=600, host_rate=200.0), 15.0)
    made = plan(two_tensors, hardware, planner=planner)
    assert written(made) in (60, 100)
    assert written(made) <= 15 * made.predicted_seconds
    assert set(made.moves.device) == {"host", "ssd0"}


@PLANNERS
def test_a_budget_too_small_is_an_answer(
    two_tensors: Trace, make_hardware: MakeHardware, planner: str
) -> None:
    """160 B must be written, and 80 may: the SSD, both numbers, and what to do."""
    hardware = limited(make_hardware(100, ssd_rate=1e6, host_bytes=0), 10.0)
    message = r"ssd0: the plan of \w+ would write 160 bytes .* allows 80 \(80 B\); ask for fewer"
    with pytest.raises(CapacityError, match=message):
        plan(two_tensors, hardware, planner=planner)
    table = compare(two_tensors, hardware, [planner, "ideal"])
    assert "would write 160 bytes" in table["note"][0]
    assert table["note"][1] == ""


@pytest.mark.parametrize("planner", ["flashneuron", "g10"])
def test_other_planners_are_held_to_it(
    two_tensors: Trace, make_hardware: MakeHardware, planner: str
) -> None:
    """They plan as ever; what breaks the budget is refused, and what keeps to it is not."""
    hardware = make_hardware(100, ssd_rate=200.0, host_bytes=0)
    free = plan(two_tensors, hardware, planner=planner)
    rate = written(free) / free.predicted_seconds
    assert rate > 0
    assert written(plan(two_tensors, limited(hardware, 1.001 * rate), planner=planner)) > 0
    with pytest.raises(CapacityError, match=f"ssd0: the plan of .* would write {written(free)}"):
        plan(two_tensors, limited(hardware, 0.99 * rate), planner=planner)


@PLANNERS
@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.8])
def test_plans_of_repeating_iterations_keep_to_their_budget(
    make_hardware: MakeHardware,
    monkeypatch: pytest.MonkeyPatch,
    planner: str,
    seed: int,
    share: float,
) -> None:
    """A share of what they would write; the guide is of a folded trace, and is what is used."""
    monkeypatch.setattr(periods_module, "SMALL_KERNELS", 0)
    trace = repeating_trace(seed, micro_batches=8)
    capacity = int(0.6 * trace.peak_allocated_bytes)
    hardware = make_hardware(capacity, ssd_rate=200.0, host_rate=100.0)
    options: dict[str, Any] = {"planner": planner, "bound": False}
    free = plan(trace, hardware, **options)
    if not written(free):
        pytest.skip("nothing goes to the SSD")
    rate = share * written(free) / free.predicted_seconds
    made = plan(trace, limited(hardware, rate), **options)
    assert written(made) <= rate * made.predicted_seconds
    assert verify(trace, made).fits
    assert made.metadata.options.get("origin") != "greedy"
    bound = lower_bound(trace, made.hardware)
    assert made.predicted_seconds >= bound.seconds * (1 - 1e-9)


def test_the_bound_knows_the_budget_of_the_hardware(
    one_tensor: Trace, make_hardware: MakeHardware
) -> None:
    """100 B at 10 B per second of iteration: 10 s, not 6. What is given replaces it."""
    hardware = limited(make_hardware(100, host_bytes=0), 10.0)
    assert lower_bound(one_tensor, hardware).seconds == pytest.approx(10.0)
    given = lower_bound(one_tensor, hardware, ssd_write_budget={"ssd0": 50.0})
    assert given.seconds == pytest.approx(6.0)


# The verifier


def test_the_verifier_counts_what_moves_write(
    one_tensor: Trace, make_hardware: MakeHardware
) -> None:
    """100 B in 6 s: 16.7 B/s are enough, 16 are not, whichever of plan and machine says so."""
    hardware = make_hardware(100, host_bytes=0)
    made = plan_greedy(one_tensor, hardware)
    assert made.predicted_seconds == pytest.approx(6.0)
    assert verify(one_tensor, made, limited(hardware, 16.7)).fits
    worn = verify(one_tensor, made, limited(hardware, 16.0))
    assert (worn.valid, worn.fits, worn.num_violations) == (True, False, 1)
    assert (
        str(worn.violations[0]) == "moves: ssd0: 100 bytes per iteration are above 96 [endurance]"
    )
    own = replace(made.metadata, hardware=limited(hardware, 16.0).to_toml())
    assert not verify(one_tensor, replace(made, metadata=own)).fits
    assert not verify(one_tensor, replace(made, metadata=own), hardware).fits


def test_years_asked_for_are_years_had(one_tensor: Trace, make_hardware: MakeHardware) -> None:
    """The plan writes 100 B in 6 s of 10^9 B: 1.9 years. Those can be asked for, 2 cannot."""
    hardware = make_hardware(100, host_bytes=0, endurance_bytes=10**9)
    made = plan(one_tensor, hardware, ssd_years=1.9)
    years = plan_summary(made)["ssd_years"]
    assert years == pytest.approx(1e9 / 100 * 6 / SECONDS_PER_YEAR)
    assert 1.9 < years < 2
    with pytest.raises(CapacityError, match="ssd0"):
        plan(one_tensor, hardware, ssd_years=2.0)
