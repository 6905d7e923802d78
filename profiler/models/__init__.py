"""Reference models: small, plain PyTorch, each ``model(tokens, targets)`` returns its loss.

Sizes are data: another published model is one more line in :data:`MODELS`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from teraio.errors import InputError
from teraio.profiler.models.gpt2 import Gpt2, Gpt2Config
from teraio.profiler.models.llama import Llama, LlamaConfig
from teraio.profiler.models.moe import Moe, MoeConfig
from teraio.profiler.models.t5 import T5, T5Config

ModelConfig: TypeAlias = LlamaConfig | MoeConfig | Gpt2Config | T5Config

_CLASSES: dict[type[Any], type[nn.Module]] = {
    LlamaConfig: Llama,
    MoeConfig: Moe,
    Gpt2Config: Gpt2,
    T5Config: T5,
}


@dataclass(frozen=True)
class ModelSpec:
    """A model by name: its sizes, and the batch that it trains on by default."""

    config: ModelConfig
    batch: int
    sequence: int


MODELS: dict[str, ModelSpec] = {
    "tiny-llama": ModelSpec(
        LlamaConfig(
            vocabulary=512, hidden=96, intermediate=256, layers=3, heads=4, key_value_heads=2
        ),
        batch=2,
        sequence=32,
    ),
    "tiny-gpt2": ModelSpec(
        Gpt2Config(vocabulary=512, positions=64, hidden=96, layers=3, heads=4), batch=2, sequence=32
    ),
    "tiny-t5": ModelSpec(
        T5Config(vocabulary=512, hidden=64, head=16, intermediate=192, layers=2, heads=4),
        batch=2,
        sequence=32,
    ),
    "tiny-moe": ModelSpec(
        MoeConfig(
            vocabulary=512,
            hidden=64,
            intermediate=128,
            layers=2,
            heads=4,
            key_value_heads=2,
            experts=4,
        ),
        batch=2,
        sequence=32,
    ),
    "bench-0.7b": ModelSpec(
        LlamaConfig(vocabulary=32000, hidden=2048, intermediate=5504, layers=12, heads=16),
        batch=4,
        sequence=2048,
    ),
    "bench-3.4b": ModelSpec(
        LlamaConfig(vocabulary=32000, hidden=3072, intermediate=8192, layers=28, heads=24),
        batch=3,
        sequence=2048,
    ),
}


def build_model(name_or_config: str | ModelConfig, **overrides: Any) -> nn.Module:
    """A model with freshly drawn weights, on PyTorch's default device and dtype.

    ``overrides`` replace fields of the config (``layers=2``, ``attention="math"``). Raises
    InputError for an unknown model or field.
    """
    config = model_config(name_or_config, **overrides)
    return _CLASSES[type(config)](config)


def model_config(name_or_config: str | ModelConfig, **overrides: Any) -> ModelConfig:
    """The sizes of a model, some of them replaced. Raises InputError, naming what is unknown."""
    config = _spec(name_or_config).config if isinstance(name_or_config, str) else name_or_config
    for name in overrides:
        if name not in config.__dataclass_fields__:
            known = ", ".join(config.__dataclass_fields__)
            raise InputError(f"model option {name}: unknown; this model has {known}")
    result: ModelConfig = replace(config, **overrides)
    return result


def make_batch(
    model: str | ModelConfig | nn.Module,
    batch: int | None = None,
    sequence: int | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Random tokens and targets, int64 (batch, sequence) each, for ``model(*batch)``.

    Drawn on the CPU, with ``generator`` or the default one, so that they are the same everywhere;
    then moved to the model's device (a name or config: to PyTorch's default device).
    """
    config, device = _config_and_device(model)
    spec = _spec(model) if isinstance(model, str) else _spec_of_size(config)
    longest = getattr(config, "positions", None)
    sequence = min(spec.sequence, longest or spec.sequence) if sequence is None else sequence
    shape = (spec.batch if batch is None else batch, sequence)
    if min(shape) < 1 or (longest is not None and sequence > longest):
        raise InputError(f"batch: {shape[0]} x {sequence} tokens do not suit {config}")
    tokens, targets = (
        torch.randint(config.vocabulary, shape, generator=generator, device="cpu").to(device)
        for _ in range(2)
    )
    return tokens, targets


def _spec(name: str) -> ModelSpec:
    if name not in MODELS:
        raise InputError(f"model {name!r} is not one of {', '.join(MODELS)}")
    return MODELS[name]


def _spec_of_size(config: ModelConfig) -> ModelSpec:
    """The batch of the registered model with the same class and the next larger width."""
    same = [spec for spec in MODELS.values() if type(spec.config) is type(config)]
    wider = [spec for spec in same if spec.config.hidden >= config.hidden]
    return min(wider, key=lambda spec: spec.config.hidden) if wider else same[-1]


def _config_and_device(model: str | ModelConfig | nn.Module) -> tuple[ModelConfig, torch.device]:
    if isinstance(model, nn.Module):
        config: ModelConfig = model.config  # type: ignore[assignment]
        return config, next(model.parameters()).device
    return model_config(model), torch.get_default_device()


__all__ = [
    "MODELS",
    "Gpt2Config",
    "LlamaConfig",
    "ModelConfig",
    "ModelSpec",
    "MoeConfig",
    "T5Config",
    "build_model",
    "make_batch",
    "model_config",
]
