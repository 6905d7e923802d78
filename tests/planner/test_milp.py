"""The planner milp on instances solved by hand, and at its limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from teraio.contracts.hardware import Hardware, Link
from teraio.contracts.plan import Plan
from teraio.errors import CapacityError, InputError
from teraio.planner.greedy import plan_greedy
from teraio.planner.milp.coarsening import MOST_PERIODS, MOST_STEPS, coarsen, merge_alike
from teraio.planner.milp.exact import plan_milp
from teraio.planner.milp.instance import NONE
from teraio.planner.milp.periods import find_periods, select, useful
from teraio.planner.milp.scaling import make_instance
from teraio.planner.planning import plan
from teraio.planner.verifier import verify
from teraio.traces.trace import Trace

MakeTrace = Callable[..., Trace]
MakeHardware = Callable[..., Hardware]


@pytest.fixture(scope="module")
def k0_k1(make_trace: MakeTrace) -> Trace:
    """X (10 B) waits from 0 to 2, and Y (10 B) lives in 1."""
    return make_trace(
        [1.0] * 3,
        [("X", 10, 0, 2), ("Y", 10, 1, 1)],
        [(0, "X", "w"), (2, "X", "r"), (1, "Y", "w")],
    )


def proof_of(made: Plan) -> tuple[str, bool]:
    return made.metadata.options["proof"], made.metadata.options["coarse"]


def test_the_only_plan_is_the_best(k0_k1: Trace, make_hardware: MakeHardware) -> None:
    """Capacity 10, 1 B/s: 3 s of kernels, X out for 10 s before K1 and back for 10 s after it."""
    made = plan(k0_k1, make_hardware(10, ssd_rate=1.0, host_bytes=0), planner="milp", bound=True)
    assert made.metadata.planner == "milp"
    assert made.predicted_seconds == pytest.approx(23.0, rel=1e-12)
    assert proof_of(made) == ("optimal", False)
    assert made.metadata.options["proved_seconds"] == pytest.approx(23.0)
    assert made.metadata.options["objective_seconds"] == pytest.approx(23.0, rel=1e-12)
    assert made.metadata.bound_kind == "dual"
    assert made.gap == pytest.approx(0.0, abs=1e-6)


def test_two_tiers_share_the_work(make_trace: MakeTrace, make_hardware: MakeHardware) -> None:
    """A and B (8 B each) leave before K1 and are back before K2, at 1 and 1 B/s: one on each tier.

    3 s of kernels, 8 s out and 8 s back; on one tier it would be 35 s.
    """
    trace = make_trace(
        [1.0] * 3,
        [("A", 8, 0, 2), ("B", 8, 0, 2), ("Y", 16, 1, 1)],
        [(0, "A", "w"), (2, "A", "r"), (0, "B", "w"), (2, "B", "r"), (1, "Y", "w")],
    )
    made = plan_milp(trace, make_hardware(16, ssd_rate=1.0, host_rate=1.0))
    assert made.predicted_seconds == pytest.approx(19.0, rel=1e-12)
    assert sorted(made.moves.device) == ["host", "ssd0"]
    crowded = plan_milp(trace, make_hardware(16, ssd_rate=1.0, host_rate=1.0, host_bytes=511))
    assert crowded.predicted_seconds == pytest.approx(35.0, rel=1e-12)


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
    made = plan_milp(trace, make_hardware(10, ssd_rate=1.0, host_bytes=0))
    assert made.predicted_seconds == pytest.approx(seconds, rel=1e-12)


def test_a_copy_is_written_early_for_a_later_move(
    make_trace: MakeTrace, make_hardware: MakeHardware
) -> None:
    """W (10 B) leaves while there is room to spare, so that it is only dropped where there is none.

    Y (10 B) lives in 5 alone, where W must be away; W is read in 4 and 6, so written then it would
    hold up K5 for 10 s. It leaves after 0 as well, and is back for 4 just in time.
    """
    trace = make_trace(
        [1.0, 10.0, 1.0, 10.0, 1.0, 1.0, 1.0],
        [("W", 10, None, None), ("Y", 10, 5, 5)],
        [(0, "W", "rw"), (4, "W", "r"), (6, "W", "r"), (5, "Y", "w")],
    )
    made = plan_milp(trace, make_hardware(10, ssd_rate=1.0, host_bytes=0))
    assert made.predicted_seconds == pytest.approx(trace.ideal_seconds + 10.0, rel=1e-12)
    assert dict(zip(made.moves.after_kernel.tolist(), made.moves.writes.tolist(), strict=True)) == {
        0: True,
        4: False,
    }


def test_greedy_is_beaten_and_said_to_be(
    random_trace: Callable[[int], Trace], make_hardware: MakeHardware
) -> None:
    """Where greedy takes more than half as long again."""
    trace = random_trace(26)
    hardware = make_hardware(202, ssd_rate=25.0, host_bytes=0)
    greedy, made = plan_greedy(trace, hardware), plan_milp(trace, hardware)
    assert proof_of(made) == ("optimal", False)
    assert made.predicted_seconds * 1.5 < greedy.predicted_seconds
    assert verify(trace, made).fits


def test_nothing_moves_where_everything_fits(k0_k1: Trace, make_hardware: MakeHardware) -> None:
    made = plan_milp(k0_k1, make_hardware(20))
    assert len(made.moves) == 0
    assert proof_of(made) == ("optimal", False)
    assert made.metadata.options["rounds"] == 0


def test_no_room_on_any_tier(k0_k1: Trace, make_hardware: MakeHardware) -> None:
    with pytest.raises(CapacityError, match="ssd0"):
        plan_milp(k0_k1, make_hardware(10, host_bytes=5, capacity_bytes=4))


def test_what_may_not_be_written_to_an_ssd_goes_elsewhere(
    k0_k1: Trace, make_hardware: MakeHardware
) -> None:
    """The SSD would be ten times as fast, but may take 10 B in 100 s only; the host is left."""
    fast = make_hardware(10, ssd_rate=10.0, host_rate=1.0, write_budget=0.1)
    made = plan(k0_k1, fast, planner="milp")
    assert made.predicted_seconds == pytest.approx(23.0, rel=1e-12)
    assert made.moves.device.tolist() == ["host"]
    assert proof_of(made) == ("optimal", False)
    with pytest.raises(CapacityError, match="ssd0"):
        plan_milp(k0_k1, fast.with_budgets(host_memory=0))


def test_a_search_cut_short_returns_greedys_plan(k0_k1: Trace, make_hardware: MakeHardware) -> None:
    hardware = make_hardware(10, ssd_rate=1.0, host_bytes=0)
    made = plan_milp(k0_k1, hardware, time_limit=1e-9)
    assert proof_of(made) == ("feasible", False)
    assert made.metadata.options["proved_seconds"] == k0_k1.ideal_seconds
    assert made.moves.equals(plan_greedy(k0_k1, hardware).moves)


def test_a_share_of_the_rates_proves_nothing_at_full_rates(
    k0_k1: Trace, make_hardware: MakeHardware
) -> None:
    hardware = make_hardware(10, ssd_rate=1.0, host_bytes=0)
    made = plan_milp(k0_k1, hardware, bandwidth_share=0.5)
    assert made.predicted_seconds == pytest.approx(23.0, rel=1e-12)
    assert made.metadata.options["objective_seconds"] == pytest.approx(43.0, rel=1e-12)
    assert proof_of(made) == ("feasible", False)


def test_times_without_a_common_divisor_are_rounded(
    make_trace: MakeTrace, make_hardware: MakeHardware
) -> None:
    """To a millionth of the iteration; the plan is simulated as it is."""
    trace = make_trace(
        [1.0123456789, 0.1, 0.77777777],
        [("X", 10, 0, 2), ("Y", 10, 1, 1)],
        [(0, "X", "w"), (2, "X", "r"), (1, "Y", "w")],
    )
    made = plan_milp(trace, make_hardware(10, ssd_rate=3.1, host_bytes=0))
    assert made.predicted_seconds == pytest.approx(trace.ideal_seconds + 20 / 3.1, rel=1e-10)
    assert proof_of(made) == ("optimal", False)
    assert 0 < made.metadata.options["resolution_seconds"] < 1e-3


def layers(make_trace: MakeTrace, num_layers: int) -> Trace:
    """Forward and backward of layers; each keeps 30 + 70 B from its forward to its backward."""
    K = 2 * num_layers
    storages, accesses = [], []
    for i in range(num_layers):
        for name, nbytes in ((f"a{i}", 30), (f"b{i}", 70)):
            storages.append((name, nbytes, i, K - 1 - i))
            accesses += [(i, name, "w"), (K - 1 - i, name, "r")]
    return make_trace([1.0] * K, storages, accesses)


def test_a_large_trace_is_coarsened(make_trace: MakeTrace, make_hardware: MakeHardware) -> None:
    """200 kernels and 200 storages: not worse than greedy, right, and nothing claimed."""
    trace = layers(make_trace, 100)
    hardware = make_hardware(6000, ssd_rate=40.0, host_bytes=0)
    made = plan_milp(trace, hardware, time_limit=2.0)
    assert proof_of(made) == ("feasible", True)
    assert made.metadata.options["proved_seconds"] == trace.ideal_seconds
    assert made.predicted_seconds <= plan_greedy(trace, hardware).predicted_seconds
    assert verify(trace, made).fits


def test_steps_and_groups_are_few_and_whole(make_trace: MakeTrace) -> None:
    """What is born and dies in the same steps leaves together; no step lasts much longer."""
    trace = layers(make_trace, 100)
    first_kernel, periods = coarsen(trace, 6000)
    assert len(first_kernel) - 1 <= MOST_STEPS
    assert (first_kernel[0], first_kernel[-1]) == (0, 200)
    assert np.diff(first_kernel).max() <= 2 * 200 / (len(first_kernel) - 1)
    assert len(periods) <= MOST_PERIODS
    assert min(len(rows) for rows in periods.rows) >= 2
    members = np.concatenate(periods.rows)
    assert len(np.unique(members)) == len(members)


def test_versions_survive_merging(make_trace: MakeTrace) -> None:
    """Two storages used alike are one, with its two periods in a version; a third is not alike."""
    accesses = [(0, "A", "rw"), (2, "A", "r"), (4, "A", "r")]
    accesses += [(k, "B", how) for k, _, how in accesses]
    accesses += [(0, "C", "r"), (2, "C", "r"), (4, "C", "r")]
    trace = make_trace([1.0] * 6, [(name, 10, None, None) for name in "ABC"], accesses)
    merged = merge_alike(find_periods(trace, np.arange(7)))
    assert [len(rows) for rows in merged.rows] == [2, 2, 2, 1, 1, 1]
    assert merged.previous.tolist() == [NONE, 0, 1, NONE, 3, 4]
    assert merged.is_unwritten.tolist() == [False] * 3 + [True] * 3


def test_periods_left_out_are_skipped_in_their_version(make_trace: MakeTrace) -> None:
    """Memory is short in 5 only: of the written storage the copy made before may serve, of the
    other one no copy is ever written.
    """
    accesses = [(0, "A", "rw"), (2, "A", "r"), (4, "A", "r"), (6, "A", "r")]
    accesses += [(k, "C", "r") for k, *_ in accesses]
    trace = make_trace([1.0] * 8, [(name, 10, None, None) for name in "AC"], accesses)
    periods = find_periods(trace, np.arange(9))
    needed = np.array([0, 0, 0, 0, 0, 1, 0, 0])
    keep = useful(periods, needed)
    after = list(zip(periods.storage[keep].tolist(), periods.after[keep].tolist(), strict=True))
    assert after == [(0, 0), (0, 2), (0, 4), (1, 4)]
    keep[1] = False
    assert select(periods, keep).previous.tolist() == [NONE, 0, NONE]


def test_a_trace_beyond_all_limits_is_refused(
    make_trace: MakeTrace, make_hardware: MakeHardware
) -> None:
    """200 kernels, in each of which memory is short by what lives from one to the second next."""
    K = 200
    storages = [(f"s{k}", 10, k, (k + 2) % K) for k in range(K)]
    accesses = [(k, f"s{k}", "w") for k in range(K)] + [
        ((k + 2) % K, f"s{k}", "r") for k in range(K)
    ]
    trace = make_trace([1.0] * K, storages, accesses)
    with pytest.raises(InputError, match=r"milp takes up to 48 kernels .* 200 kernels"):
        plan_milp(trace, make_hardware(20, host_bytes=0))


def test_rates_that_vary_are_noticed(k0_k1: Trace, make_hardware: MakeHardware) -> None:
    """One device behind a slow link still has one rate; two that share it have not."""
    one, two = make_hardware(10, host_bytes=0), make_hardware(10)
    kernels = np.arange(4)
    periods = find_periods(k0_k1, kernels)

    def is_constant(hardware: Hardware) -> bool:
        return make_instance(k0_k1, hardware, 1.0, kernels, periods).has_constant_rates

    slow = Link(name="pcie", read_rate=5.0, write_rate=5.0)
    assert is_constant(one)
    assert is_constant(two)
    assert is_constant(replace(one, link=(slow,)))
    assert not is_constant(replace(two, link=(slow,)))
    assert not is_constant(replace(two, slowdown=replace(two.slowdown, read=1.1)))
    assert not is_constant(replace(two, host=replace(two.host, memory_rate=150.0)))
