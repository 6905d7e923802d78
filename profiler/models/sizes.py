"""Sizes of the reference models by name, and the batch that each trains on by default.

Published sizes are those of the ``config.json`` beside the published weights (Hugging Face), unless
said otherwise. Models with rotary positions have no longest sequence; what stretches the rotation
to long contexts (Llama 3.1 and later) changes the numbers in one buffer, and is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from teraio.profiler.models.bert import BertConfig
from teraio.profiler.models.gpt2 import Gpt2Config
from teraio.profiler.models.llama import LlamaConfig
from teraio.profiler.models.moe import MoeConfig
from teraio.profiler.models.t5 import T5Config

ModelConfig: TypeAlias = LlamaConfig | MoeConfig | Gpt2Config | T5Config | BertConfig


@dataclass(frozen=True)
class ModelSpec:
    """A model by name: its sizes, and the batch that it trains on by default."""

    config: ModelConfig
    batch: int
    sequence: int


_TINY: dict[str, ModelSpec] = {
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
    "tiny-bert": ModelSpec(
        BertConfig(vocabulary=512, positions=64, hidden=96, layers=3, heads=4), batch=2, sequence=32
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
}

_BENCHMARKS: dict[str, ModelSpec] = {
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

_LLAMA: dict[str, ModelSpec] = {
    # meta-llama/Meta-Llama-3-8B and -70B.
    "llama3-8b": ModelSpec(
        LlamaConfig(
            vocabulary=128256,
            hidden=4096,
            intermediate=14336,
            layers=32,
            heads=32,
            key_value_heads=8,
            rope_base=500000.0,
        ),
        batch=2,
        sequence=4096,
    ),
    "llama3-70b": ModelSpec(
        LlamaConfig(
            vocabulary=128256,
            hidden=8192,
            intermediate=28672,
            layers=80,
            heads=64,
            key_value_heads=8,
            rope_base=500000.0,
        ),
        batch=4,
        sequence=2048,
    ),
    # meta-llama/Llama-3.2-1B and -3B.
    "llama3.2-1b": ModelSpec(
        LlamaConfig(
            vocabulary=128256,
            hidden=2048,
            intermediate=8192,
            layers=16,
            heads=32,
            key_value_heads=8,
            tied=True,
            rope_base=500000.0,
        ),
        batch=4,
        sequence=2048,
    ),
    "llama3.2-3b": ModelSpec(
        LlamaConfig(
            vocabulary=128256,
            hidden=3072,
            intermediate=8192,
            layers=28,
            heads=24,
            key_value_heads=8,
            tied=True,
            rope_base=500000.0,
        ),
        batch=2,
        sequence=2048,
    ),
    # ibm-granite/granite-8b-code-base (the first, of 4,096 tokens of context): a Llama with biases.
    "granite-code-8b": ModelSpec(
        LlamaConfig(
            vocabulary=49152,
            hidden=4096,
            intermediate=14336,
            layers=36,
            heads=32,
            key_value_heads=8,
            tied=True,
            biased=True,
            attention_dropout=0.1,
        ),
        batch=2,
        sequence=4096,
    ),
    # mistralai/Mixtral-8x7B-v0.1.
    "mixtral-8x7b": ModelSpec(
        MoeConfig(
            vocabulary=32000,
            hidden=4096,
            intermediate=14336,
            layers=32,
            heads=32,
            key_value_heads=8,
            rope_base=1e6,
            experts=8,
            experts_per_token=2,
            routing="balanced",
        ),
        batch=1,
        sequence=4096,
    ),
}


def _gpt2(hidden: int, layers: int, heads: int, batch: int) -> ModelSpec:
    """A GPT-2 with OpenAI's vocabulary and longest sequence."""
    config = Gpt2Config(vocabulary=50257, positions=1024, hidden=hidden, layers=layers, heads=heads)
    return ModelSpec(config, batch, sequence=1024)


_GPT2: dict[str, ModelSpec] = {
    # openai-community/gpt2, -medium, -large and -xl.
    "gpt2": _gpt2(hidden=768, layers=12, heads=12, batch=8),
    "gpt2-medium": _gpt2(hidden=1024, layers=24, heads=16, batch=8),
    "gpt2-large": _gpt2(hidden=1280, layers=36, heads=20, batch=4),
    "gpt2-xl": _gpt2(hidden=1600, layers=48, heads=25, batch=4),
    # Of its GPT-2 of 40 billion parameters the paper gives only the number. This is the published
    # GPT shape next to it, the 39.1 billion of Narayanan et al., "Efficient Large-Scale Language
    # Model Training on GPU Clusters Using Megatron-LM" (2021), table 1.
    "gpt2-40b": _gpt2(hidden=8192, layers=48, heads=64, batch=2),
}


def _t5(
    hidden: int, head: int, intermediate: int, layers: int, heads: int, batch: int
) -> ModelSpec:
    """A T5 1.0, with the vocabulary as it is padded in the weights, and its longest sequence."""
    config = T5Config(
        vocabulary=32128,
        hidden=hidden,
        head=head,
        intermediate=intermediate,
        layers=layers,
        heads=heads,
    )
    return ModelSpec(config, batch, sequence=512)


_T5: dict[str, ModelSpec] = {
    # google-t5/t5-small, -base, -large, -3b and -11b.
    "t5-small": _t5(hidden=512, head=64, intermediate=2048, layers=6, heads=8, batch=16),
    "t5-base": _t5(hidden=768, head=64, intermediate=3072, layers=12, heads=12, batch=16),
    "t5-large": _t5(hidden=1024, head=64, intermediate=4096, layers=24, heads=16, batch=8),
    "t5-3b": _t5(hidden=1024, head=128, intermediate=16384, layers=24, heads=32, batch=4),
    "t5-11b": _t5(hidden=1024, head=128, intermediate=65536, layers=24, heads=128, batch=2),
}


def _bert(hidden: int, layers: int, heads: int, batch: int) -> ModelSpec:
    """A BERT with the uncased English vocabulary, and its longest sequence."""
    config = BertConfig(vocabulary=30522, positions=512, hidden=hidden, layers=layers, heads=heads)
    return ModelSpec(config, batch, sequence=512)


_BERT: dict[str, ModelSpec] = {
    # google-bert/bert-base-uncased and bert-large-uncased.
    "bert-base": _bert(hidden=768, layers=12, heads=12, batch=16),
    "bert-large": _bert(hidden=1024, layers=24, heads=16, batch=8),
}

MODELS: dict[str, ModelSpec] = _TINY | _BENCHMARKS | _LLAMA | _GPT2 | _T5 | _BERT
