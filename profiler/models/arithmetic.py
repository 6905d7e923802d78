"""What a reference model holds and computes, in closed form: a check on models and traces.

Floating-point operations are those of matrix products, two per multiplication, as usual in the
literature (Kaplan et al. 2020; Chowdhery et al. 2022, appendix B): norms, activations, softmax,
rotations and the optimizer are left out. A weight that multiplies is used three times per token,
forward and in backward for the gradients of its input and of itself: 6 operations. Embeddings are
looked up, which multiplies nothing; the head counts, tied or not. Nothing is counted twice for
checkpointing: these are the operations of the model, not of one way to train it.
"""

from __future__ import annotations

from dataclasses import dataclass

from teraio.profiler.models.bert import BertConfig
from teraio.profiler.models.gpt2 import Gpt2Config
from teraio.profiler.models.llama import LlamaConfig
from teraio.profiler.models.moe import MoeConfig
from teraio.profiler.models.sizes import ModelConfig
from teraio.profiler.models.t5 import T5Config

EXPLICIT_PRODUCTS = 6
"""Products of (queries x keys x head) that attention takes: scores and mixture forward, and the
gradients of queries, keys, scores and values."""

FUSED_PRODUCTS = 7
"""The same for a fused kernel, which computes the scores again in backward."""


@dataclass(frozen=True)
class Count:
    """Parameters of a part of a model.

    ``weights`` multiply, once per token; ``served_weights`` of them serve a token (all, but for
    experts); ``others`` are biases, norms and what is looked up.
    """

    weights: int
    others: int
    served_weights: int


def num_parameters(config: ModelConfig) -> int:
    """Parameters of the model, a tied weight once."""
    count = _count(config)
    tied = getattr(config, "tied", True)
    return count.weights + count.others - (config.vocabulary * config.hidden if tied else 0)


def training_flops(config: ModelConfig, micro_batch_size: int, sequence: int) -> int:
    """Floating-point operations of a micro-batch's forward and backward.

    6 x weights x tokens, and those of attention. That counts every pair of a query and a key, also
    those that a causal mask hides, as torch's counter does, and unless the kernel is ``math`` the
    scores that a fused kernel computes again.
    """
    tokens = micro_batch_size * sequence
    products = EXPLICIT_PRODUCTS if config.attention == "math" else FUSED_PRODUCTS
    attention = 2 * products * micro_batch_size * sequence**2 * _attention_width(config)
    per_sequence = 0
    if isinstance(config, BertConfig):
        per_sequence = 6 * micro_batch_size * (config.hidden**2 + 2 * config.hidden)
    return 6 * _count(config).served_weights * tokens + attention + per_sequence


def _attention_width(config: ModelConfig) -> int:
    """Heads times their width, added up over all attentions."""
    if isinstance(config, T5Config):
        return 3 * config.layers * config.heads * config.head
    return config.layers * config.hidden


def _count(config: ModelConfig) -> Count:
    if isinstance(config, LlamaConfig):
        return _count_llama(config)
    if isinstance(config, Gpt2Config):
        return _count_gpt2(config)
    if isinstance(config, BertConfig):
        return _count_bert(config)
    return _count_t5(config)


def _count_llama(c: LlamaConfig) -> Count:
    key_value_width = c.num_key_value_heads * c.head
    attention = 2 * c.hidden**2 + 2 * c.hidden * key_value_width
    expert = 3 * c.hidden * c.intermediate
    feed_forward = served = expert
    experts = 1
    if isinstance(c, MoeConfig):
        router = c.hidden * c.experts
        experts = c.experts
        feed_forward = experts * expert + router
        served = c.experts_per_token * expert + router
    biases = 2 * c.hidden + 2 * key_value_width + experts * (2 * c.intermediate + c.hidden)
    head = c.vocabulary * c.hidden
    others = 2 * c.hidden + (biases if c.biased else 0)
    return Count(
        weights=c.layers * (attention + feed_forward) + head,
        others=c.vocabulary * c.hidden + c.layers * others + c.hidden,
        served_weights=c.layers * (attention + served) + head,
    )


def _count_gpt2(c: Gpt2Config) -> Count:
    weights = c.layers * 12 * c.hidden**2 + c.vocabulary * c.hidden
    biases_and_norms = c.layers * 13 * c.hidden + 2 * c.hidden
    looked_up = (c.vocabulary + c.positions) * c.hidden
    return Count(weights, biases_and_norms + looked_up, served_weights=weights)


def _count_bert(c: BertConfig) -> Count:
    """``others`` holds the pooler and the second head too, which see one token of a sequence."""
    weights = c.layers * 12 * c.hidden**2 + c.hidden**2 + c.vocabulary * c.hidden
    biases_and_norms = c.layers * 13 * c.hidden + 2 * c.hidden + 3 * c.hidden + c.vocabulary
    looked_up = (c.vocabulary + c.positions + c.token_types) * c.hidden
    sentences = c.hidden**2 + c.hidden + 2 * c.hidden + 2
    return Count(weights, biases_and_norms + looked_up + sentences, served_weights=weights)


def _count_t5(c: T5Config) -> Count:
    """A token of a sequence passes the encoder once and the decoder once."""
    attention = 4 * c.hidden * c.heads * c.head
    feed_forward = (3 if c.gated else 2) * c.hidden * c.intermediate
    weights = c.layers * (3 * attention + 2 * feed_forward) + c.vocabulary * c.hidden
    norms = 5 * c.layers * c.hidden + 2 * c.hidden
    looked_up = c.vocabulary * c.hidden + 2 * c.buckets * c.heads
    return Count(weights, norms + looked_up, served_weights=weights)
