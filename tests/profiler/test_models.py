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
    Gpt2Config,
    LlamaConfig,
    ModelConfig,
    MoeConfig,
    T5Config,
    build_model,
    make_batch,
    model_config,
)
from teraio.profiler.models.layers import attend

TINY = ["tiny-llama", "tiny-gpt2", "tiny-t5", "tiny-moe"]


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
    """The loss is a scalar near that of a uniform guess (T5's tied head starts off repeating)."""
    loss, _ = loss_and_gradients(name)
    assert loss.shape == ()
    assert float(loss) == pytest.approx(math.log(512), rel=0.35 if name == "tiny-t5" else 0.03)


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


def test_attention_with_bias_and_scale() -> None:
    """Both kernels add the bias to scaled scores."""
    query, key, value = torch.randn(3, 2, 4, 5, 8)
    bias = torch.randn(1, 4, 5, 5)
    results = [attend(query, key, value, k, bias=bias, scale=0.5) for k in ("sdpa", "math")]
    expected = torch.softmax(query @ key.mT * 0.5 + bias, dim=-1) @ value
    for result in results:
        torch.testing.assert_close(result, expected)


def count_llama(c: LlamaConfig, feed_forward: int) -> int:
    """Projections, norms and feed-forward of each layer; embedding and head."""
    attention = 2 * c.hidden**2 + 2 * c.hidden * c.num_key_value_heads * c.head
    embeddings = (1 if c.tied else 2) * c.vocabulary * c.hidden
    return embeddings + c.hidden + c.layers * (attention + feed_forward + 2 * c.hidden)


def count(c: ModelConfig) -> int:
    """Parameters in closed form."""
    if isinstance(c, MoeConfig):
        return count_llama(c, c.experts * (3 * c.hidden * c.intermediate + c.hidden))
    if isinstance(c, LlamaConfig):
        return count_llama(c, 3 * c.hidden * c.intermediate)
    if isinstance(c, Gpt2Config):
        layer = 12 * c.hidden**2 + 13 * c.hidden
        embeddings = (c.vocabulary + c.positions) * c.hidden
        return embeddings + c.layers * layer + 2 * c.hidden
    attention = 4 * c.hidden * c.heads * c.head + c.hidden
    feed_forward = (3 if c.gated else 2) * c.hidden * c.intermediate + c.hidden
    stacks = c.layers * (3 * attention + 2 * feed_forward) + 2 * (c.buckets * c.heads + c.hidden)
    return (1 if c.tied else 2) * c.vocabulary * c.hidden + stacks


def count_built(config: str | ModelConfig, **overrides: Any) -> int:
    """Parameters of the built model, tied ones once, without their memory."""
    with torch.device("meta"):
        return sum(p.numel() for p in build_model(config, **overrides).parameters())


@pytest.mark.parametrize("name", MODELS)
def test_parameter_counts_in_closed_form(name: str) -> None:
    """Nothing is missing and nothing is there twice."""
    assert count_built(name) == count(MODELS[name].config)


def test_options_change_the_count() -> None:
    """Tied and gated variants."""
    for name, option in (("tiny-llama", "tied"), ("tiny-t5", "gated")):
        config = model_config(name, **{option: True})
        assert count_built(config) == count(config) != count(MODELS[name].config)


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (
            LlamaConfig(
                vocabulary=128256,
                hidden=4096,
                intermediate=14336,
                layers=32,
                heads=32,
                key_value_heads=8,
            ),
            8_030_261_248,
        ),
        (
            Gpt2Config(vocabulary=50257, positions=1024, hidden=768, layers=12, heads=12),
            124_439_808,
        ),
        (
            T5Config(vocabulary=32128, hidden=512, head=64, intermediate=2048, layers=6, heads=8),
            60_506_624,
        ),
        (
            MoeConfig(
                vocabulary=32000,
                hidden=4096,
                intermediate=14336,
                layers=32,
                heads=32,
                key_value_heads=8,
            ),
            46_702_792_704,
        ),
    ],
    ids=["llama3-8b", "gpt2", "t5-small", "mixtral-8x7b"],
)
def test_published_sizes_are_only_data(config: ModelConfig, published: int) -> None:
    """The architectures have the published numbers of parameters at the published sizes."""
    assert count_built(config) == published


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
    ],
)
def test_mistakes_are_named(call: Callable[[], Any], message: str) -> None:
    """One line that names the argument and what there is."""
    with pytest.raises(InputError, match=message):
        call()
