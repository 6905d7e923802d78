"""Reference models: small, plain PyTorch, each ``model(tokens, targets)`` returns its loss.

Sizes are data: another published model is one more entry in :mod:`teraio.profiler.models.sizes`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from teraio.errors import InputError
from teraio.profiler.models.arithmetic import num_parameters, training_flops
from teraio.profiler.models.bert import Bert, BertConfig
from teraio.profiler.models.gpt2 import Gpt2, Gpt2Config, Gpt2Stage
from teraio.profiler.models.llama import Llama, LlamaConfig, LlamaStage
from teraio.profiler.models.moe import Moe, MoeConfig, MoeStage
from teraio.profiler.models.sizes import MODELS, ModelConfig, ModelSpec
from teraio.profiler.models.stages import Stage
from teraio.profiler.models.t5 import T5, T5Config

_CLASSES: dict[type[Any], type[nn.Module]] = {
    LlamaConfig: Llama,
    MoeConfig: Moe,
    Gpt2Config: Gpt2,
    T5Config: T5,
    BertConfig: Bert,
}

_STAGES: dict[type[Any], type[nn.Module]] = {
    LlamaConfig: LlamaStage,
    MoeConfig: MoeStage,
    Gpt2Config: Gpt2Stage,
}


def build_model(name_or_config: str | ModelConfig, **overrides: Any) -> nn.Module:
    """A model with freshly drawn weights, on PyTorch's default device and dtype.

    ``overrides`` replace fields of the config (``layers=2``, ``attention="math"``). Raises
    InputError for an unknown model or field.
    """
    config = model_config(name_or_config, **overrides)
    return _CLASSES[type(config)](config)


def build_stage(
    name_or_config: str | ModelConfig, stage: int, stages: int, **overrides: Any
) -> nn.Module:
    """One stage of a pipeline over the model: ``stage(x)`` returns the next one's input.

    The first reads tokens, the last returns logits, whose loss the pipeline's schedule takes.
    Layers are shared out equally, a remainder one each to the first stages, and parameters are
    named as in the whole model. A tied weight exists in the first and in the last stage. Raises
    InputError for an encoder, an unknown model or field, or more stages than layers.
    """
    config = model_config(name_or_config, **overrides)
    if type(config) not in _STAGES:
        known = ", ".join(kind.__name__ for kind in _STAGES.values())
        raise InputError(f"stages: {type(config).__name__} has none, only {known}; use 1 stage")
    return _STAGES[type(config)](config, Stage(stage, stages))


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
    """The batch of the registered model of this size, else of its class and the next width."""
    same = [spec for spec in MODELS.values() if type(spec.config) is type(config)]
    for spec in same:
        if spec.config == config:
            return spec
    wider = [spec for spec in same if spec.config.hidden >= config.hidden]
    return min(wider, key=lambda spec: spec.config.hidden) if wider else same[-1]


def _config_and_device(model: str | ModelConfig | nn.Module) -> tuple[ModelConfig, torch.device]:
    if isinstance(model, nn.Module):
        config: ModelConfig = model.config  # type: ignore[assignment]
        return config, next(model.parameters()).device
    return model_config(model), torch.get_default_device()


__all__ = [
    "MODELS",
    "BertConfig",
    "Gpt2Config",
    "LlamaConfig",
    "ModelConfig",
    "ModelSpec",
    "MoeConfig",
    "T5Config",
    "build_model",
    "build_stage",
    "make_batch",
    "model_config",
    "num_parameters",
    "training_flops",
]
