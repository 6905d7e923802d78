"""Transform recompute: what runs again computes what it computed, and memory is what is said."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.planner.layered import layered_trace

from teraio.contracts.plan import Accesses
from teraio.errors import InputError
from teraio.traces.lifetimes import live_bytes
from teraio.traces.trace import Kernels, Storages, Trace, TraceMetadata
from teraio.traces.transforms import transform_trace
from teraio.traces.transforms.recompute import fewest_layers, num_layers


@pytest.fixture(scope="module")
def layered() -> Trace:
    """Three layers, two micro-batches."""
    return layered_trace(layers=3, micro_batches=2)


def values_read(trace: Trace) -> dict[int, list[Any]]:
    """What each kernel reads, by signature in order of execution: values are what made them."""
    accesses, storages = trace.accesses, trace.storages
    held: dict[int, Any] = {
        s: storages.name[s] for s in np.flatnonzero(trace.is_persistent).tolist()
    }
    result: dict[int, list[Any]] = {}
    bounds = np.searchsorted(accesses.kernel, np.arange(trace.num_kernels + 1))
    for kernel in range(trace.num_kernels):
        rows = range(bounds[kernel], bounds[kernel + 1])
        read = sorted(hash(held[int(accesses.storage[r])]) for r in rows if accesses.reads[r])
        signature = int(trace.kernels.signature[kernel])
        result.setdefault(signature, []).append(read)
        for row in rows:
            storage = int(accesses.storage[row])
            if accesses.writes[row]:
                ordinal = int(storages.birth_ordinal[storage])
                held[storage] = hash((trace.kernels.op[kernel], tuple(read), ordinal))
    return result


def random_layers(seed: int) -> Trace:
    """Two micro-batches of three layers whose kernels read and overwrite at random."""
    chance = random.Random(seed)
    kernels: list[tuple[Any, ...]] = []
    storages: list[list[Any]] = []
    accesses: list[tuple[int, int, bool, bool]] = []

    def run(
        module: str, phase: str, batch: int, touched: dict[int, str], outputs: int
    ) -> list[int]:
        kernel = len(kernels)
        row = (kernel, f"op{kernel}", module, phase, batch, 1.0, 0.0, 0, kernel, 0, None, None)
        kernels.append((*row, None))
        made = list(range(len(storages), len(storages) + outputs))
        storages.extend([chance.randint(1, 9), "activation", "", kernel, kernel] for _ in made)
        for storage, how in {**touched, **dict.fromkeys(made, "w")}.items():
            accesses.append((kernel, storage, "r" in how, "w" in how))
            if storages[storage][3] is not None:
                storages[storage][4] = kernel
        return made

    weights = list(range(3))
    storages.extend([5, "parameter", f"w{i}", None, None] for i in weights)
    for batch in range(2):
        (stream,) = run("", "forward", batch, {}, 1)
        made_in: list[list[int]] = []
        for layer in range(3):
            inside = [stream]
            for _ in range(chance.randint(1, 5)):
                picks = chance.sample(inside, chance.randint(1, min(3, len(inside))))
                ways = ["r", "r", "r", "r", "rw", ""]
                touched = {storage: chance.choice(ways) for storage in picks}
                if chance.random() < 0.5:
                    touched[weights[layer]] = "r"
                inside += run(f"blocks.{layer}", "forward", batch, touched, chance.randint(1, 2))
            made_in.append(inside)
            stream = inside[-1]
        run("head", "forward", batch, {stream: "r"}, 1)
        for layer in reversed(range(3)):
            for _ in range(chance.randint(1, 3)):
                inside = made_in[layer]
                picks = chance.sample(inside, chance.randint(1, min(3, len(inside))))
                run(f"blocks.{layer}", "backward", batch, dict.fromkeys(picks, "r"), 1)
    run("", "optimizer", 0, dict.fromkeys(weights, "rw"), 0)
    rows = [
        (i, size, size, kind, name, birth, None if birth is None else i, death, "int8", True)
        for i, (size, kind, name, birth, death) in enumerate(storages)
    ]
    return Trace(
        kernels=Kernels.from_rows(kernels),
        storages=Storages.from_rows(rows),
        accesses=Accesses.from_rows(sorted(accesses)),
        metadata=TraceMetadata(source="fake", micro_batches=2),
    )


@pytest.mark.parametrize("seed", range(120))
def test_every_kernel_reads_what_it_read(seed: int) -> None:
    """Run symbolically: first and repeated runs of a kernel, and all that follow, see the same."""
    trace = random_layers(seed)
    try:
        changed = transform_trace(trace, "recompute", {"layers": 3})
    except InputError:
        return  # Nothing that could be dropped; the next test counts these.
    before, after = values_read(trace), values_read(changed)
    assert set(after) == set(before)
    for signature, reads in after.items():
        for read in reads:
            assert read == before[signature][0], f"kernel {signature}"
    backward = changed.kernels.phase == "backward"
    assert np.array_equal(np.sort(trace.kernels.signature), np.unique(changed.kernels.signature))
    assert (
        changed.kernels.phase[~backward] == trace.kernels.phase[trace.kernels.phase != "backward"]
    ).all()


def test_the_random_programs_are_recomputed_often_enough() -> None:
    """Most seeds drop something, or the test above would prove nothing."""
    grown = 0
    for seed in range(50):
        try:
            trace = random_layers(seed)
            grown += transform_trace(trace, "recompute").num_kernels > trace.num_kernels
        except InputError:
            continue
    assert grown >= 30


def test_a_layer_keeps_its_input_and_makes_the_rest_again(layered: Trace) -> None:
    """Of ``linear`` and ``act`` only the first is needed for h; x is the next layer's input.

    Three layers and two micro-batches of one second each: six seconds more. Three h of 100 bytes
    were alive at the loss; none is now, and one at a time when its layer's backward pass begins.
    """
    changed = transform_trace(layered, "recompute")
    assert num_layers(layered) == 3
    again = changed.kernels.op[changed.kernels.phase == "backward"]
    assert (again == "linear").sum() == 6
    assert changed.ideal_seconds == layered.ideal_seconds + 6
    rows = np.flatnonzero(changed.kernels.op == "act_backward")
    assert (changed.kernels.op[rows - 1] == "linear").all()
    loss = int(np.argmax(changed.kernels.op == "loss"))
    assert (
        live_bytes(layered)[np.argmax(layered.kernels.op == "loss")] - live_bytes(changed)[loss]
        == 300
    )
    # Both peaks in the second micro-batch, with 240 of parameters and state and 120 of gradients:
    # at loss_backward four x, three h, l and d3; now at act_backward of blocks.2 three x, one h,
    # d3 and t2.
    assert layered.peak_allocated_bytes == 240 + 120 + 40 + 300 + 1 + 10
    assert changed.peak_allocated_bytes == 240 + 120 + 30 + 100 + 10 + 10


def test_only_the_first_layers_are_recomputed(layered: Trace) -> None:
    """With layers = 1, blocks.0 alone; with 0, nothing at all."""
    changed = transform_trace(layered, "recompute", {"layers": 1})
    again = (changed.kernels.phase == "backward") & (changed.kernels.op == "linear")
    assert set(changed.kernels.module[again]) == {"blocks.0.up"}
    assert transform_trace(layered, "recompute", {"layers": 0}).kernels.equals(layered.kernels)


def test_without_modules_runs_of_kernels_take_the_place_of_layers(layered: Trace) -> None:
    """Eight forward kernels make two runs of four, per micro-batch."""
    nameless = replace(layered.kernels, module=np.full(layered.num_kernels, "", dtype=object))
    trace = replace(layered, kernels=nameless)
    assert num_layers(trace) == 2
    changed = transform_trace(trace, "recompute")
    assert changed.num_kernels > trace.num_kernels
    assert values_read(changed).keys() == values_read(trace).keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": -1}, "layers must be an integer from 0, got -1"),
        ({"layers": True}, "layers must be an integer"),
        ({"depth": 3}, "option 'depth' is not known"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str, layered: Trace) -> None:
    """Each error names the option."""
    with pytest.raises(InputError, match=message):
        transform_trace(layered, "recompute", options)


def test_nothing_to_recompute_is_an_error(layered: Trace) -> None:
    """A trace of a forward pass has no backward kernels."""
    phase = np.where(layered.kernels.phase == "backward", "forward", layered.kernels.phase)
    forward = replace(layered, kernels=replace(layered.kernels, phase=phase))
    with pytest.raises(InputError, match="nothing to recompute"):
        transform_trace(forward, "recompute")


@pytest.mark.parametrize("least", range(7))
def test_the_fewest_layers_are_found(least: int) -> None:
    """By bisection; if not even all are enough, all."""
    assert fewest_layers(6, lambda count: count >= least) == least
    assert fewest_layers(6, lambda _: False) == 6
