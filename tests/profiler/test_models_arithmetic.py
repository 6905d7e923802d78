"""Numbers of parameters and of floating-point operations, in closed form."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from teraio.profiler.models import (
    MODELS,
    ModelConfig,
    build_model,
    make_batch,
    model_config,
    num_parameters,
    training_flops,
)

PUBLISHED = {
    # Parameters of the published checkpoints, tied weights once: the total that Hugging Face's API
    # gives for the safetensors, or for older ones (GPT-2, T5) the sum over transformers' model.
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mixtral-8x7b": 46_702_792_704,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    # The checkpoints hold both heads of pre-training: 109,482,240 (335,141,888) without them.
    "bert-base": 110_106_428,
    "bert-large": 336_226_108,
}

ROUNDED = {
    # "8B": 8.05 with the fields of the checkpoint's config.json; untied it would be 8.26.
    "granite-code-8b": (8.05e9, 0.05e9),
    # Narayanan et al. 2021, table 1, with a vocabulary of 51,200 and 2,048 positions: 39.1 billion.
    "gpt2-40b": (39.1e9, 0.05e9),
}


def count_built(config: str | ModelConfig, **overrides: object) -> int:
    """Parameters of the built model, tied ones once, without their memory."""
    with torch.device("meta"):
        return sum(p.numel() for p in build_model(config, **overrides).parameters())


@pytest.mark.parametrize("name", MODELS)
def test_parameters_in_closed_form(name: str) -> None:
    """Nothing is missing and nothing is there twice; and the number is the published one."""
    assert count_built(name) == num_parameters(MODELS[name].config)
    if name in PUBLISHED:
        assert count_built(name) == PUBLISHED[name]
    elif name in ROUNDED:
        assert count_built(name) == pytest.approx(ROUNDED[name][0], abs=ROUNDED[name][1])
    else:
        assert name.startswith(("tiny-", "bench-")), "a published model without its number"


@pytest.mark.parametrize(
    ("name", "option"),
    [("tiny-llama", "tied"), ("tiny-llama", "biased"), ("tiny-t5", "gated"), ("tiny-moe", "tied")],
)
def test_options_change_the_count(name: str, option: str) -> None:
    """Tied, biased and gated variants."""
    config = model_config(name, **{option: True})
    assert count_built(config) == num_parameters(config) != num_parameters(MODELS[name].config)


def test_untied_t5_and_gpt2_have_a_head_of_their_own() -> None:
    """The other way round: these are tied unless told otherwise."""
    for name in ("tiny-t5", "tiny-gpt2"):
        config = model_config(name, tied=False)
        head = config.vocabulary * config.hidden
        assert count_built(config) == num_parameters(config)
        assert num_parameters(config) - head == num_parameters(MODELS[name].config)


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("tiny-")])
@pytest.mark.parametrize("shape", [(2, 32), (4, 16)])
def test_operations_in_closed_form(name: str, shape: tuple[int, int]) -> None:
    """As torch counts them while the model runs, to the last one."""
    config = model_config(name, attention="math")
    model = build_model(config)
    with FlopCounterMode(display=False) as counter:
        model(*make_batch(model, *shape)).backward()
    assert counter.get_total_flops() == training_flops(config, *shape)


@pytest.mark.parametrize("kernel", ["efficient", "flash", "cudnn"])
def test_fused_kernels_compute_the_scores_twice(kernel: str) -> None:
    """As torch counts the kernels of CUDA, here on fake tensors."""
    config = model_config("tiny-llama", attention=kernel)
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        model = build_model(config)
        batch = make_batch(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=kernel != "efficient"):
            loss = model(*batch)
        loss.backward()
    assert counter.get_total_flops() == training_flops(config, 2, 32)


def test_operations_of_llama3_8b() -> None:
    """Six per weight and token, the head's included; attention 14 per pair of tokens and width."""
    config = MODELS["llama3-8b"].config
    weights = num_parameters(config) - 128256 * 4096 - (2 * 32 + 1) * 4096
    tokens = 2 * 4096
    attention = 14 * 32 * 2 * 4096**2 * 4096
    assert training_flops(config, 2, 4096) == 6 * weights * tokens + attention
    explicit = replace(config, attention="math")
    assert training_flops(explicit, 2, 4096) == 6 * weights * tokens + attention * 12 // 14
