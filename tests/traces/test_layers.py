"""Layers of a model, from module names, and the visits that an iteration pays them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.planner.layered import layered_trace

from teraio.traces.layers import is_numbered, layer_of_module, layer_visits, layers_of_kernels


@pytest.mark.parametrize(
    ("module", "layer", "numbered"),
    [
        ("blocks.15.attention.query", "blocks.15", True),
        ("model.layers.3", "model.layers.3", True),
        ("encoder.block.0.layer.1.DenseReluDense", "encoder.block.0", True),
        ("layer1.0.conv1", "layer1.0", True),
        ("0.weight", "0", True),
        ("transformer.wte", "transformer", False),
        ("lm_head", "lm_head", False),
        ("layer1x", "layer1x", False),
        ("", "", False),
    ],
)
def test_a_layer_is_named_up_to_its_first_number(module: str, layer: str, numbered: bool) -> None:
    """Names as common libraries give them."""
    assert layer_of_module(module) == layer
    assert is_numbered(layer) == numbered


def test_visits_are_runs_of_one_layer_phase_and_micro_batch() -> None:
    """One micro-batch of two layers: both forward, the loss, both backward, then the optimizer.

    ``data`` has no module and joins the first layer; the two optimizer kernels have none either,
    and no neighbour of their phase to join.
    """
    visits = layer_visits(layered_trace(layers=2, micro_batches=1))
    assert visits.first_kernel.tolist() == [0, 3, 5, 6, 7, 10, 13, 15]
    assert visits.of(np.array([0, 2, 3, 15, 18])).tolist() == [0, 0, 1, 7, 8]
    assert visits.start(np.array([1, 6, 7, 8])).tolist() == [3, 13, 15, 18]


def test_kernels_without_a_module_join_their_neighbours() -> None:
    """The one before in the same phase and micro-batch, else the one after."""
    trace = layered_trace(layers=2, micro_batches=1)
    module = trace.kernels.module.copy()
    module[[4, 6]] = ""
    visits = layer_visits(replace(trace, kernels=replace(trace.kernels, module=module)))
    assert visits.first_kernel.tolist() == [0, 3, 5, 6, 10, 13, 15]
    assert layers_of_kernels(trace)[[0, 1, 5]].tolist() == ["", "blocks.0", "head"]
