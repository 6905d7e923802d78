"""Reference models: their losses, gradients and sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from teraio.errors import InputError
from teraio.profiler.models import (
    MODELS,
    ModelConfig,
    build_model,
    make_batch,
)

TINY = ["tiny-llama", "tiny-gpt2", "tiny-t5", "tiny-bert", "tiny-moe"]


def loss_and_gradients(name: str, **overrides: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """One backward pass from a fixed seed."""
    torch.manual_seed(0)
    model = build_model(name, **overrides)
    loss = model(*make_batch(name))
    loss.backward()
    gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(model.parameters()))
    return loss.detach(), gradients


def assert_close(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    """The same gradients but for rounding."""
    assert first.keys() == second.keys()
    for key, gradient in first.items():
        torch.testing.assert_close(gradient, second[key], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", TINY)
def test_an_untrained_model_guesses(name: str) -> None:
    """The loss is a scalar near that of a uniform guess.

    T5's tied head starts off repeating; BERT guesses whether a sentence follows as well.
    """
    loss, _ = loss_and_gradients(name)
    assert loss.shape == ()
    expected = math.log(512) + (math.log(2) if name == "tiny-bert" else 0)
    assert float(loss) == pytest.approx(expected, rel=0.35 if name == "tiny-t5" else 0.03)


@pytest.mark.parametrize("name", TINY)
def test_every_parameter_learns(name: str) -> None:
    """Each has a finite gradient that is not zero."""
    for key, gradient in loss_and_gradients(name)[1].items():
        assert bool(torch.isfinite(gradient).all()), key
        assert bool((gradient != 0).any()), key


@pytest.mark.parametrize("name", TINY)
def test_a_seed_fixes_everything(name: str) -> None:
    """Weights, batch, dropout and gradients, to the bit."""
    first, second = loss_and_gradients(name), loss_and_gradients(name)
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(first[1][key], second[1][key]) for key in first[1])


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
def test_checkpointing_changes_nothing(name: str, mode: str) -> None:
    """Recomputed activations, dropout included: the same loss; gradients but for order of sums."""
    plain, recomputed = loss_and_gradients(name), loss_and_gradients(name, checkpoint=mode)
    assert torch.equal(plain[0], recomputed[0])
    assert_close(plain[1], recomputed[1])


@pytest.mark.parametrize("name", TINY)
def test_attention_kernels_agree(name: str) -> None:
    """The explicit softmax computes what the fused kernel does."""
    options = {"dropout": 0.0} if hasattr(MODELS[name].config, "dropout") else {}
    fused = loss_and_gradients(name, attention="sdpa", **options)
    explicit = loss_and_gradients(name, attention="math", **options)
    torch.testing.assert_close(fused[0], explicit[0])
    assert_close(fused[1], explicit[1])


def test_training_lowers_the_loss() -> None:
    """A few steps on one batch: the targets are learnt."""
    for name in TINY:
        torch.manual_seed(0)
        model, batch = build_model(name), make_batch(name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses = []
        for _ in range(12):
            optimizer.zero_grad()
            loss = model(*batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0] - 1, name


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2", "tiny-moe"])
def test_decoders_do_not_see_the_future(name: str) -> None:
    """A change of the last token leaves the loss of all earlier positions as it was."""
    model = build_model(name).eval()
    tokens, targets = make_batch(model, 1, 16)
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 512
    logits: list[torch.Tensor] = []
    head = model.get_submodule("head")
    head.register_forward_hook(lambda module, inputs, output: logits.append(output))
    model(tokens, targets)
    model(changed, targets)
    torch.testing.assert_close(logits[0][:, :-1], logits[1][:, :-1])
    assert not torch.allclose(logits[0][:, -1], logits[1][:, -1])


def test_t5_decoder_sees_the_encoder_and_the_past() -> None:
    """Its first prediction depends on the encoder's tokens, not on the targets."""
    model = build_model("tiny-t5").eval()
    tokens, targets = make_batch(model, 1, 16)
    logits: list[torch.Tensor] = []
    head = model.get_submodule("head")
    head.register_forward_hook(lambda module, inputs, output: logits.append(output))
    model(tokens, targets)
    model(tokens, (targets + 1) % 512)
    model((tokens + 1) % 512, targets)
    torch.testing.assert_close(logits[0][:, 0], logits[1][:, 0])
    assert not torch.allclose(logits[0][:, 1:], logits[1][:, 1:])
    assert not torch.allclose(logits[0][:, 0], logits[2][:, 0])


def test_routing_depends_on_the_data() -> None:
    """Experts see different numbers of tokens in different batches; every token is served twice."""
    torch.manual_seed(0)
    model = build_model("tiny-moe")
    rows: list[int] = []
    for expert in model.get_submodule("blocks.0.feed_forward.experts").children():
        expert.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    for _ in range(2):
        model(*make_batch(model))
    assert sum(rows[:4]) == sum(rows[4:]) == 2 * 2 * 32
    assert rows[:4] != rows[4:]


def test_bert_sees_all_and_tells_sentences_apart() -> None:
    """A word's prediction depends on words on both sides; only the first target asks for order."""
    model = build_model("tiny-bert").eval()
    tokens, targets = make_batch(model, 1, 16)
    logits: list[torch.Tensor] = []
    follows: list[torch.Tensor] = []
    model.get_submodule("head").register_forward_hook(lambda *call: logits.append(call[2]))
    model.get_submodule("next_sentence").register_forward_hook(lambda *c: follows.append(c[2]))
    losses = [model(tokens, targets)]
    changed = tokens.clone()
    changed[0, 8] = (changed[0, 8] + 1) % 512
    model(changed, targets)
    assert not torch.allclose(logits[0][:, 0], logits[1][:, 0])
    assert not torch.allclose(logits[0][:, -1], logits[1][:, -1])
    for first in (2, 3):
        asked = targets.clone()
        asked[0, 0] = first
        losses.append(model(tokens, asked))
        words = torch.nn.functional.cross_entropy(logits[0][0], asked[0])
        order = torch.nn.functional.cross_entropy(follows[0], asked[:, 0] % 2)
        torch.testing.assert_close(losses[-1], words + order)


def test_balanced_routing_is_that_of_a_fair_router() -> None:
    """Where the router happens to be fair, both routings serve every token alike."""
    torch.manual_seed(0)
    by_data = build_model("tiny-moe", layers=1).get_submodule("blocks.0.feed_forward")
    torch.manual_seed(0)
    equally = build_model("tiny-moe", layers=1, routing="balanced")
    equally = equally.get_submodule("blocks.0.feed_forward")
    # Four experts, two choices: tokens along pairs of axes, every axis as often as the others.
    pairs = torch.tensor([[0, 1], [2, 3], [0, 2], [1, 3], [3, 0], [2, 1]])
    tokens = torch.zeros(1, len(pairs), 64)
    tokens[0].scatter_(1, pairs, torch.tensor([[3.0, 2.0]]).expand(len(pairs), 2))
    for experts in (by_data, equally):
        router = experts.get_parameter("router.weight")
        with torch.no_grad():
            router.zero_()[range(4), range(4)] = 1
    torch.testing.assert_close(by_data(tokens), equally(tokens))


def test_balanced_routing_has_static_shapes() -> None:
    """Every expert serves as many tokens in every batch."""
    model = build_model("tiny-moe", routing="balanced")
    rows: list[int] = []
    for expert in model.get_submodule("blocks.0.feed_forward.experts").children():
        expert.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    for _ in range(2):
        model(*make_batch(model)).backward()
    assert rows == [2 * 2 * 32 // 4] * 8


def test_batches_are_drawn_from_the_generator() -> None:
    """By name, config or model, of the asked size, and within the vocabulary."""

    def draw(model: str | ModelConfig | nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        return make_batch(model, 3, 8, torch.Generator().manual_seed(1))

    tokens, targets = draw("tiny-llama")
    assert tokens.shape == targets.shape == (3, 8)
    assert not torch.equal(tokens, targets)
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < 512
    assert torch.equal(tokens, draw(MODELS["tiny-llama"].config)[0])
    assert torch.equal(tokens, draw(build_model("tiny-llama"))[0])
    assert make_batch(build_model("tiny-llama"))[0].shape == (2, 32)
    with torch.device("meta"):
        assert make_batch("bench-3.4b")[0].shape == (3, 2048)
        assert make_batch("bench-3.4b")[0].device.type == "meta"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build_model("llama-9000"), "model 'llama-9000' is not one of tiny-llama"),
        (lambda: build_model("tiny-gpt2", wings=2), "option wings: unknown; this model has vocab"),
        (lambda: make_batch("tiny-gpt2", 2, 65), "batch: 2 x 65 tokens do not suit"),
        (lambda: make_batch("tiny-llama", 0, 8), "batch: 0 x 8 tokens do not suit"),
        (
            lambda: build_model("tiny-moe", routing="balanced", experts=3)(*make_batch("tiny-moe")),
            "64 tokens x 2 experts per token are no multiple of 3 experts; choose another batch",
        ),
    ],
)
def test_mistakes_are_named(call: Callable[[], Any], message: str) -> None:
    """One line that names the argument and what there is."""
    with pytest.raises(InputError, match=message):
        call()
