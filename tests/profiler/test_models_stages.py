"""Pipeline stages: cut from the whole model, and the same to the bit when put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.profiler.operator_log import OperatorLog
from torch import Tensor, nn

from teraio.errors import InputError
from teraio.profiler.models import MODELS, build_model, build_stage, make_batch
from teraio.profiler.models.layers import next_token_loss
from teraio.profiler.models.stages import Stage

DECODERS = ["tiny-llama", "tiny-gpt2", "tiny-moe"]


def build_chain(name: str, stages: int, **overrides: Any) -> tuple[nn.Module, list[nn.Module]]:
    """A model and its stages with the same weights."""
    torch.manual_seed(0)
    whole = build_model(name, **overrides)
    chain = [build_stage(name, stage, stages, **overrides) for stage in range(stages)]
    for stage in chain:
        weights = whole.state_dict()
        stage.load_state_dict({key: weights[key] for key in stage.state_dict()})
    return whole, chain


def run_chain(chain: list[nn.Module], tokens: Tensor, targets: Tensor) -> Tensor:
    """The loss, as a schedule would take it from the last stage."""
    x = tokens
    for stage in chain:
        x = stage(x)
    return next_token_loss(x, targets)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_a_chain_of_stages_is_the_whole_model(name: str, stages: int, *, tied: bool) -> None:
    """Loss and gradients to the bit; a tied weight's gradient is that of its two copies."""
    whole, chain = build_chain(name, stages, tied=tied)
    batch = make_batch(whole)
    losses = []
    for run in (whole, lambda *given: run_chain(chain, *given)):
        torch.manual_seed(1)  # Dropout.
        losses.append(run(*batch))
        losses[-1].backward()
    assert torch.equal(*losses)
    gradients = {
        key: parameter.grad for stage in chain for key, parameter in stage.named_parameters()
    }
    for key, parameter in whole.named_parameters():
        found = gradients[key]
        assert found is not None
        if tied and stages > 1 and key == "embedding.weight":
            copy = gradients["head.weight"]
            assert copy is not None
            torch.testing.assert_close(parameter.grad, found + copy)
        else:
            assert torch.equal(parameter.grad, found), key  # type: ignore[arg-type]


@pytest.mark.parametrize("name", DECODERS)
def test_parameters_are_named_as_in_the_whole_model(name: str) -> None:
    """Each exactly once, so a plan or a checkpoint of one fits the other."""
    whole, chain = build_chain(name, 2)
    names = [key for stage in chain for key in stage.state_dict()]
    assert sorted(names) == sorted(whole.state_dict())
    last = MODELS[name].config.layers - 1
    assert any(key.startswith(f"blocks.{last}.") for key in chain[-1].state_dict())


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
def test_stages_recompute_like_the_whole_model(mode: str) -> None:
    """Checkpointing inside a stage, where the first block's input is not a leaf."""
    whole, chain = build_chain("tiny-llama", 3, checkpoint=mode)
    batch = make_batch(whole)
    first, second = whole(*batch), run_chain(chain, *batch)
    assert torch.equal(first, second)
    second.backward()
    assert all(p.grad is not None for stage in chain for p in stage.parameters())


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2"])
def test_stages_run_the_operators_of_their_blocks(name: str) -> None:
    """What the whole model runs, in its order; only the rotation is computed in every stage."""
    whole, chain = build_chain(name, 3)
    tokens, targets = make_batch(whole)
    with OperatorLog() as expected:
        whole(tokens, targets)
    with OperatorLog() as log:
        run_chain(chain, tokens, targets)
    rotation = []
    if name == "tiny-llama":
        rotation = expected.calls[: expected.names.index("embedding")]
    found = log.calls
    for _ in rotation and chain[1:]:
        start = next(i for i in range(1, len(found)) if found[i:][: len(rotation)] == rotation)
        found = found[:start] + found[start + len(rotation) :]
    assert found == expected.calls


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [(4, 2, [2, 2]), (7, 3, [3, 2, 2]), (5, 5, [1] * 5), (80, 3, [27, 27, 26])],
)
def test_layers_are_shared_out(layers: int, stages: int, expected: list[int]) -> None:
    """Equally and in order; the first stages take what remains."""
    parts = [Stage(stage, stages).layers(layers) for stage in range(stages)]
    assert [len(part) for part in parts] == expected
    assert [layer for part in parts for layer in part] == list(range(layers))


def test_a_stage_of_a_model_that_fits_nowhere() -> None:
    """Built without memory, with half of the layers and one of the embeddings."""
    with torch.device("meta"):
        stage = build_stage("llama3-70b", 1, 2)
        logits = stage(torch.empty(1, 16, 8192))
    assert logits.shape == (1, 16, 128256)
    block = 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192
    expected = 40 * block + 8192 + 128256 * 8192
    assert sum(p.numel() for p in stage.parameters()) == expected


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build_stage("tiny-t5", 0, 2), "stages: T5Config has none, only LlamaStage"),
        (lambda: build_stage("tiny-llama", 0, 4), "stages: 4 are more than the model's 3 layers"),
        (lambda: build_stage("tiny-llama", 2, 2), "stage: must be in 0..1, got 2"),
        (lambda: build_stage("tiny-llama", 0, 0), "stages: must be at least 1, got 0"),
    ],
)
def test_mistakes_are_named(call: Callable[[], Any], message: str) -> None:
    """One line that names the argument and its limits."""
    with pytest.raises(InputError, match=message):
        call()
