"""ZeRO-Offload and ZeRO-Infinity: what crosses the link, and what the host's step waits for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.planner.layered import HIDDEN, OUTPUT, PARAMETER, layered_trace

from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Plan
from teraio.contracts.timeline import channel_name
from teraio.errors import CapacityError, InputError
from teraio.planner import verify
from teraio.planner.policies.zero_infinity import PERSISTENT_ELEMENTS, plan_zero_infinity
from teraio.planner.policies.zero_offload import plan_zero_offload
from teraio.simulator import simulate
from teraio.traces.trace import Trace
from teraio.traces.transforms import trace_of_plan

MakeHardware = Callable[..., Hardware]
LAYERS, BATCHES = 3, 2
MODEL = LAYERS * PARAMETER


@pytest.fixture(scope="module")
def layered() -> Trace:
    """Three layers, two micro-batches."""
    return layered_trace(LAYERS, BATCHES)


@pytest.fixture
def small_parameters_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty bytes are few enough to stay by DeepSpeed's default."""
    monkeypatch.setattr("teraio.planner.policies.zero_infinity.PERSISTENT_ELEMENTS", 1)


def moves_of(trace: Trace, plan: Plan, letter: str) -> np.ndarray:
    """Rows of the moves of storages whose name begins so."""
    changed = trace_of_plan(trace, plan)
    return np.array(
        [
            row
            for row, storage in enumerate(plan.moves.storage)
            if changed.storages.name[storage].startswith(letter)
        ],
        dtype=np.int64,
    )


def host_kernels(trace: Trace, plan: Plan) -> np.ndarray:
    """Kernels of the host's step; one per layer, in order."""
    return np.flatnonzero([op.startswith("host::") for op in trace_of_plan(trace, plan).kernels.op])


def check(trace: Trace, plan: Plan) -> None:
    """Valid and fitting."""
    verification = verify(trace, plan)
    assert verification.valid, verification.violations
    assert verification.fits, verification.violations


def test_offload_moves_gradients_out_and_parameters_back(
    layered: Trace, make_hardware: MakeHardware
) -> None:
    """Per iteration: each gradient out twice and back once between; each parameter back once."""
    made = plan_zero_offload(layered, make_hardware(900))
    check(layered, made)
    assert made.metadata.options["recompute_layers"] == 0
    moved = simulate(layered, made).metadata.channel_bytes
    assert moved[channel_name("host", is_write=True)] == BATCHES * MODEL
    assert moved[channel_name("host", is_write=False)] == (BATCHES - 1) * MODEL + MODEL
    # Gradients and parameters have slots, optimizer state lies beside them.
    assert made.metadata.peak_host_bytes >= 3 * MODEL
    assert made.metadata.ssd_bytes_written == {}


def test_the_step_waits_for_gradients_and_parameters_for_the_step(
    layered: Trace, make_hardware: MakeHardware
) -> None:
    """A gradient has left before its host kernel; a parameter's memory is taken after its own."""
    for made in (
        plan_zero_offload(layered, make_hardware(900)),
        plan_zero_infinity(layered, make_hardware(900)),
    ):
        step, num_kernels = host_kernels(layered, made), len(made.kernels)
        assert len(step) == LAYERS
        changed = trace_of_plan(layered, made)
        tails = [r for r in moves_of(layered, made, "g") if made.moves.before_kernel[r] < 0]
        assert len(tails) == LAYERS
        for row in tails:
            layer = int(changed.storages.name[made.moves.storage[row]][1:])
            assert made.moves.free_by[row] <= step[layer]
        unrolled = made.moves.unrolled(num_kernels)
        returned = set()
        for row in moves_of(layered, made, "w"):
            layer = int(changed.storages.name[made.moves.storage[row]][1:])
            if unrolled.after_kernel[row] < step[layer] < unrolled.before_kernel[row]:
                assert unrolled.prefetch_start[row] > step[layer]
                returned.add(layer)
        assert returned == set(range(LAYERS))


def test_offload_is_as_slow_as_a_slow_link(layered: Trace, make_hardware: MakeHardware) -> None:
    """At 1 B/s, 240 bytes each way take 240 s; the iteration cannot be faster than either."""
    slow = plan_zero_offload(layered, make_hardware(900, host_rate=1.0))
    assert slow.predicted_seconds > 240
    fast = plan_zero_offload(layered, make_hardware(900, host_rate=1e6))
    # The host's step takes next to no time at its 109 GB/s, where the GPU's took a second a layer.
    assert fast.predicted_seconds == pytest.approx(layered.ideal_seconds - LAYERS, abs=0.01)


def test_offload_recomputes_where_activations_do_not_fit(
    layered: Trace, make_hardware: MakeHardware
) -> None:
    """Parameters 120, two gradients in flight, and at the loss 300 of h: one layer is dropped."""
    made = plan_zero_offload(layered, make_hardware(430))
    check(layered, made)
    assert made.metadata.options["recompute_layers"] == 1
    assert made.metadata.transform_options["recompute_layers"] == 1
    with pytest.raises(CapacityError, match=r"kernel .* under zero-offload parameters and saved"):
        plan_zero_offload(layered, make_hardware(430), activations="stay")
    with pytest.raises(CapacityError, match=r"optimizer state takes 120 bytes \(120 B\) of host"):
        plan_zero_offload(layered, make_hardware(900, host_bytes=100))
    with pytest.raises(InputError, match="activations: must be recompute or stay"):
        plan_zero_offload(layered, make_hardware(900), activations="burn")  # type: ignore[arg-type]


@pytest.mark.usefixtures("small_parameters_move")
@pytest.mark.parametrize("look_ahead", [1, 2])
def test_infinity_gathers_layers_ahead_and_releases_them(
    look_ahead: int, layered: Trace, make_hardware: MakeHardware
) -> None:
    """w1 in the first forward pass: fetched when the visit so many before its own begins, gone
    when its own ends. Forward visits of blocks.0, 1, 2 begin at kernels 0, 3 and 5.
    """
    made = plan_zero_infinity(
        layered, make_hardware(10_000), look_ahead_layers=look_ahead, activations="stay"
    )
    check(layered, made)
    rows = [row for row in moves_of(layered, made, "w1") if made.moves.before_kernel[row] == 3]
    last = int(host_kernels(layered, made)[1])
    # Two visits ahead of kernel 3 lies the optimizer step of another layer, which is one visit.
    expected = 0 if look_ahead == 1 else last + 1
    assert made.moves.prefetch_start[rows].tolist() == [expected]
    released = [row for row in moves_of(layered, made, "w1") if made.moves.after_kernel[row] == 3]
    assert made.moves.free_by[released].tolist() == [5]
    assert not made.moves.writes[rows].any()


@pytest.mark.usefixtures("small_parameters_move")
def test_infinity_runs_a_model_bigger_than_the_gpu(make_hardware: MakeHardware) -> None:
    """Twelve layers in the memory of three; every class moves, and parameters are never written."""
    trace = layered_trace(layers=12, micro_batches=2)
    made = plan_zero_infinity(trace, make_hardware(3 * (2 * PARAMETER + HIDDEN + 2 * OUTPUT)))
    check(trace, made)
    changed = trace_of_plan(trace, made)
    kinds = set(changed.storages.kind[made.moves.storage])
    assert kinds == {"parameter", "gradient", "activation"}
    assert not made.moves.writes[moves_of(trace, made, "w")].any()


def test_small_parameters_stay_but_for_the_step(
    layered: Trace, make_hardware: MakeHardware
) -> None:
    """One move each: over the optimizer step."""
    assert PARAMETER <= PERSISTENT_ELEMENTS
    made = plan_zero_infinity(layered, make_hardware(900))
    assert len(moves_of(layered, made, "w")) == LAYERS


def test_infinity_fills_the_host_class_by_class(
    layered: Trace, make_hardware: MakeHardware
) -> None:
    """Activations first, then gradients, parameters, state; 512-byte slots on the host."""
    everything = plan_zero_infinity(layered, make_hardware(900))
    assert set(everything.metadata.options["tiers"].values()) == {"host"}
    assert everything.metadata.ssd_bytes_written == {}
    nothing = plan_zero_infinity(layered, make_hardware(900, host_bytes=0))
    assert set(nothing.metadata.options["tiers"].values()) == {"ssd0"}
    # Activations and gradients of two micro-batches, parameters and state after the step.
    written = int(nothing.moves.nbytes[nothing.moves.writes].sum()) + 2 * MODEL
    assert nothing.metadata.ssd_bytes_written == {"ssd0": written}
    part = plan_zero_infinity(layered, make_hardware(900, host_bytes=4 * 512 + 200))
    check(layered, part)
    # Four activations at once; three gradients are too many beside them, 120 bytes of state not.
    assert part.metadata.options["tiers"] == {
        "activation": "host",
        "gradient": "ssd0",
        "parameter": "ssd0",
        "optimizer_state": "host",
    }
    assert part.metadata.peak_host_bytes <= 4 * 512 + 200
    assert everything.predicted_seconds <= nothing.predicted_seconds


def test_infinity_with_checkpoints_moves_layer_inputs_only(
    layered: Trace, make_hardware: MakeHardware
) -> None:
    """Every h is made again, so only x and l leave."""
    made = plan_zero_infinity(layered, make_hardware(900), activations="checkpoint")
    check(layered, made)
    changed = trace_of_plan(layered, made)
    saved = changed.storages.kind[made.moves.storage] == "activation"
    assert {name[0] for name in changed.storages.name[made.moves.storage[saved]]} <= {"x", "l"}
    assert changed.num_kernels == layered.num_kernels + LAYERS * BATCHES


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"look_ahead_layers": 0}, "look_ahead_layers: must be at least 1, got 0"),
        ({"activations": "burn"}, "activations: must be one of offload, checkpoint, stay"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: dict[str, object], message: str, layered: Trace, make_hardware: MakeHardware
) -> None:
    """Each error names the argument."""
    with pytest.raises(InputError, match=message):
        plan_zero_infinity(layered, make_hardware(900), **arguments)  # type: ignore[arg-type]


def test_infinity_that_does_not_fit_says_what_stays(
    layered: Trace, make_hardware: MakeHardware
) -> None:
    """One kernel's own storages are more than 120 bytes."""
    with pytest.raises(CapacityError, match=r"kernel .* under zero-infinity all but parameters"):
        plan_zero_infinity(layered, make_hardware(120))
