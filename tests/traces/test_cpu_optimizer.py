"""Transform cpu-optimizer: what the host's step costs, and what is left on the GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.planner.layered import PARAMETER, layered_trace

from teraio.errors import InputError
from teraio.traces.trace import Trace
from teraio.traces.transforms import transform_trace

RATE = {"host_rate": 100.0}


@pytest.fixture(scope="module")
def layered() -> Trace:
    """Two layers, two micro-batches; the last two kernels are the optimizer's."""
    return layered_trace(layers=2, micro_batches=2)


def test_the_step_takes_what_its_bytes_take(layered: Trace) -> None:
    """Per layer 40 B each of parameter and state, read and written, and 40 B of gradient, read:
    200 B at 100 B/s are 2 s, where the GPU took 1 s. Nothing else changes its time.
    """
    changed = transform_trace(layered, "cpu-optimizer", RATE)
    assert changed.num_kernels == layered.num_kernels
    assert changed.kernels.op[-2:].tolist() == ["host::adamw"] * 2
    assert changed.kernels.duration_seconds[-2:].tolist() == [5 * PARAMETER / 100.0] * 2
    assert changed.ideal_seconds == layered.ideal_seconds + 2


def test_optimizer_state_is_gone_and_the_rest_is_untouched_by_the_step(layered: Trace) -> None:
    """Parameters and gradients stay storages of the GPU; host kernels access none of them."""
    changed = transform_trace(layered, "cpu-optimizer", RATE)
    kinds = changed.storages.kind
    assert "optimizer_state" not in kinds
    for kind in ("parameter", "gradient", "activation", "temporary"):
        assert (kinds == kind).sum() == (layered.storages.kind == kind).sum()
    assert changed.accesses.kernel.max() < changed.num_kernels - 2
    on_gpu = layered.accesses.take(layered.accesses.kernel < layered.num_kernels - 2)
    assert np.array_equal(
        changed.storages.name[changed.accesses.storage], layered.storages.name[on_gpu.storage]
    )


def test_what_is_streamed_sets_the_time_if_the_disk_is_slower(layered: Trace) -> None:
    """State, parameter and gradient from an SSD: 120 B read at 20 B/s (6 s), 80 B written."""
    options: dict[str, Any] = RATE | {
        "streamed": ["optimizer_state", "parameter", "gradient"],
        "stream_read_rate": 20.0,
        "stream_write_rate": 10.0,
    }
    changed = transform_trace(layered, "cpu-optimizer", options)
    assert changed.kernels.duration_seconds[-2:].tolist() == [8.0, 8.0]
    options["stream_write_rate"] = 1000.0
    changed = transform_trace(layered, "cpu-optimizer", options)
    assert changed.kernels.duration_seconds[-2:].tolist() == [6.0, 6.0]


def test_several_kernels_of_one_step_are_one_pass(layered: Trace) -> None:
    """An optimizer of two kernels per parameter costs what a fused one does, in its last kernel.

    Here the kernel before is made to belong to the step too: scaling of a gradient.
    """
    kernels = layered.kernels
    phase, op = kernels.phase.copy(), kernels.op.copy()
    scaling = layered.num_kernels - 3
    phase[scaling], op[scaling] = "other", "div_"
    accesses = layered.accesses
    gradient = int(np.flatnonzero(layered.storages.name == "g0")[0])
    rows = accesses.kernel == scaling
    storage = accesses.storage.copy()
    storage[np.flatnonzero(rows)[0]] = gradient
    order = np.lexsort((storage, accesses.kernel))
    trace = replace(
        layered,
        kernels=replace(kernels, phase=phase, op=op),
        accesses=replace(accesses, storage=storage).take(order),
    )
    changed = transform_trace(trace, "cpu-optimizer", RATE)
    assert changed.kernels.op[scaling] == "host::div_"
    assert changed.kernels.duration_seconds[scaling] < 1.0
    assert changed.kernels.duration_seconds[-2:].tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "the planners zero-offload and zero-infinity apply it"),
        ({"host_rate": 0}, "host_rate must be above 0 bytes/s, got 0"),
        ({"host_rate": "fast"}, "host_rate must be above 0"),
        (RATE | {"speed": 1}, "option 'speed' is not known"),
        (RATE | {"streamed": ["parameter"]}, "stream_read_rate must be above 0"),
        (
            RATE | {"streamed": ["input"], "stream_read_rate": 1.0, "stream_write_rate": 1.0},
            "not 'input'",
        ),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str, layered: Trace) -> None:
    """Each error names the option and what it may be."""
    with pytest.raises(InputError, match=message):
        transform_trace(layered, "cpu-optimizer", options)


def test_a_trace_without_an_optimizer_is_refused(layered: Trace) -> None:
    """There is nothing that a host could step."""
    phase = np.where(layered.kernels.phase == "optimizer", "other", "forward")
    accesses = layered.accesses.take(layered.accesses.kernel < layered.num_kernels - 2)
    trace = replace(layered, kernels=replace(layered.kernels, phase=phase), accesses=accesses)
    with pytest.raises(InputError, match="no kernels of phase optimizer"):
        transform_trace(trace, "cpu-optimizer", RATE)
