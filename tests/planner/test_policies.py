"""The policies compared with ours: each does what its source says, and its plans verify."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.planner.layered import HIDDEN, OUTPUT, layered_trace

from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Plan
from teraio.errors import CapacityError, InfeasibleError
from teraio.planner import compare, plan, verify
from teraio.planner.policies.activation_only import plan_activation_only
from teraio.planner.policies.flashneuron import plan_flashneuron
from teraio.planner.policies.g10 import plan_g10
from teraio.planner.policies.recompute_only import plan_recompute_only
from teraio.planner.policies.registry import PAGED_POLICIES, POLICIES
from teraio.simulator import simulate
from teraio.traces.trace import Trace

MakeHardware = Callable[..., Hardware]
MakeTrace = Callable[..., Trace]

# Parameters and state 240, gradients 120, and at the loss three h, four x, l and d3.
PEAK = 240 + 120 + 3 * HIDDEN + 4 * OUTPUT + 1 + OUTPUT


@pytest.fixture(scope="module")
def layered() -> Trace:
    """Three layers, two micro-batches."""
    return layered_trace(layers=3, micro_batches=2)


def names(trace: Trace, plan: Plan) -> list[str]:
    """What moves, in the order of the table."""
    return [str(name) for name in trace.storages.name[plan.moves.storage]]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_plan_verifies_and_is_predicted(
    policy: str, layered: Trace, make_hardware: MakeHardware, tmp_path: Path
) -> None:
    """Valid; it fits unless the policy pages; the simulator agrees, also after a save.

    The fraction of ideal is that of the trace as recorded, whatever the policy made of it.
    """
    made = plan(layered, make_hardware(515), planner=policy)
    assert made.metadata.planner == policy
    assert made.ideal_seconds == layered.ideal_seconds
    assert made.metadata.trace_hash == layered.hash
    made.save(tmp_path / "made.plan")
    loaded = Plan.load(tmp_path / "made.plan")
    verification = verify(layered, loaded)
    assert verification.valid, verification.violations
    assert verification.fits or policy in PAGED_POLICIES
    timeline = simulate(layered, loaded)
    assert timeline.iteration_seconds == pytest.approx(made.predicted_seconds, rel=1e-12)
    assert timeline.metadata.ideal_seconds == layered.ideal_seconds


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(8))
def test_plans_of_random_traces_verify(
    policy: str, seed: int, random_trace: Callable[[int], Trace], make_hardware: MakeHardware
) -> None:
    """``plan`` raises RuntimeError for a plan that does not verify; a plain no is an answer.

    Random traces have kernels of phase forward only, so the transforms have nothing to do.
    """
    trace = random_trace(seed)
    for share in (0.9, 0.6):
        hardware = make_hardware(int(share * trace.peak_allocated_bytes), host_bytes=150)
        try:
            plan(trace, hardware, planner=policy)
        except (CapacityError, InfeasibleError):
            continue


def test_comparison_says_why_a_policy_has_no_plan(
    layered: Trace, make_hardware: MakeHardware
) -> None:
    """All policies in one table; at 380 bytes what only some of them move is too much to stay."""
    table = compare(layered, make_hardware(380), sorted(POLICIES)).set_index("planner")
    rows = table.to_dict("index")
    for policy in ("activation-only", "flashneuron", "recompute-only"):
        assert "380" in rows[policy]["note"]
        assert np.isnan(rows[policy]["predicted_seconds"])
    for policy in ("g10", "zero-infinity", "zero-offload"):
        assert rows[policy]["note"] == ""
        assert rows[policy]["fraction_of_ideal"] > 0


def test_zero_does_not_apply_without_an_optimizer(
    one_tensor: Trace, make_hardware: MakeHardware
) -> None:
    """A note, not an error: the other rows of a comparison stand."""
    rows = compare(one_tensor, make_hardware(100), ["zero-offload", "zero-infinity", "greedy"])
    notes = rows["note"].tolist()
    assert all("no kernels of phase optimizer" in note for note in notes[:2])
    assert notes[2] == ""


def test_activation_only_moves_saved_activations_only(
    layered: Trace, make_hardware: MakeHardware
) -> None:
    """Also where moving optimizer state would be easier."""
    made = plan_activation_only(layered, make_hardware(PEAK - 100))
    assert set(layered.storages.kind[made.moves.storage]) == {"activation"}
    with pytest.raises(CapacityError, match="activation-only moves saved activations and nothing"):
        plan_activation_only(layered, make_hardware(365))


def test_flashneuron_takes_the_first_tensors_of_the_forward_pass(
    layered: Trace, make_hardware: MakeHardware
) -> None:
    """100 bytes too many: in forward order x0 (10 B) and h0 (100 B) leave, in each micro-batch.

    200 too many: x0, h0, x1, h1 (220 B). Only to the SSD, though the host has room.
    """
    for missing, count, expected in (
        (100, 2, {"x0.0", "h0.0", "x0.1", "h0.1"}),
        (200, 4, {f"{a}{i}.{b}" for a in "xh" for i in (0, 1) for b in (0, 1)}),
    ):
        made = plan_flashneuron(layered, make_hardware(PEAK - missing))
        assert made.metadata.options["tensors_per_micro_batch"] == count
        assert set(names(layered, made)) == expected
        assert set(made.moves.tier) == {"ssd"}


def test_flashneuron_prefetches_in_the_backward_pass_only(
    layered: Trace, make_hardware: MakeHardware
) -> None:
    """No memory is taken back before the micro-batch's backward pass has begun."""
    made = plan_flashneuron(layered, make_hardware(PEAK - 150))
    backward = layered.kernels.phase == "backward"
    first = {b: np.flatnonzero(backward & (layered.kernels.micro_batch == b))[0] for b in (0, 1)}
    for storage, start in zip(made.moves.storage, made.moves.prefetch_start, strict=True):
        assert start >= first[int(layered.storages.name[storage][-1])]


def test_flashneuron_needs_an_ssd_and_room(layered: Trace, make_hardware: MakeHardware) -> None:
    """Without one there is no plan; nor where parameters and gradients alone are too much."""
    with pytest.raises(CapacityError, match="reaches none"):
        plan_flashneuron(layered, make_hardware(500, num_ssds=0))
    with pytest.raises(
        CapacityError,
        match=r"kernel .* under flashneuron all but saved activations stay there, but 300",
    ):
        plan_flashneuron(layered, make_hardware(300))


def g10_instance(make_trace: MakeTrace) -> Trace:
    """A and C (100 B each) wait from 0 to 9; B (200 B) lives in 4 and 5."""
    return make_trace(
        [1.0] * 10,
        [("A", 100, 0, 9), ("C", 100, 0, 9), ("B", 200, 4, 5)],
        [(0, "A", "w"), (0, "C", "w"), (9, "A", "r"), (9, "C", "r"), (4, "B", "w"), (5, "B", "r")],
    )


def test_g10_fills_the_ssd_before_the_host(
    make_trace: MakeTrace, make_hardware: MakeHardware
) -> None:
    """A and C must both leave, released together. At 200 B/s the SSD has room for C in the half
    second in which C alone would be written; at 50 B/s A fills the two seconds: C goes to the host.
    """
    trace = g10_instance(make_trace)
    both = plan_g10(trace, make_hardware(203, ssd_rate=200.0))
    assert both.moves.tier.tolist() == ["ssd", "ssd"]
    one = plan_g10(trace, make_hardware(203, ssd_rate=50.0))
    assert sorted(one.moves.tier) == ["host", "ssd"]
    assert one.predicted_seconds == pytest.approx(10.0, abs=1e-6)


def test_g10_pages_what_it_leaves(one_tensor: Trace, make_hardware: MakeHardware) -> None:
    """A's period of 4 s is shorter than 2.5 transfers of 2 s, on either tier: it stays.

    The simulation evicts it, which the comparison shows.
    """
    hardware = make_hardware(100, ssd_rate=50.0, host_rate=50.0)
    made = plan_g10(one_tensor, hardware)
    assert len(made.moves) == 0
    assert not verify(one_tensor, made).fits
    row = compare(one_tensor, hardware, ["g10"]).iloc[0]
    assert (row["evictions"], row["demand_fetches"]) == (1, 1)


def test_recompute_only_recomputes_the_fewest_layers(
    layered: Trace, make_hardware: MakeHardware
) -> None:
    """One h of 100 bytes less per layer; nothing moves; each costs a second per micro-batch."""
    for missing, layers in ((0, 0), (1, 1), (101, 2), (201, 3)):
        made = plan_recompute_only(layered, make_hardware(PEAK - missing))
        assert made.metadata.options["layers"] == layers
        assert made.predicted_seconds == pytest.approx(layered.ideal_seconds + 2 * layers)
        assert len(made.moves) == 0
        assert made.metadata.transform == ("recompute" if layers else None)
    with pytest.raises(CapacityError, match=r"kernel .* under recompute-only nothing leaves"):
        plan_recompute_only(layered, make_hardware(400))
