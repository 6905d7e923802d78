"""Models of one's own: the contract of their function, their traces, what is refused."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import teraio
from teraio.errors import InputError, MissingDependencyError
from teraio.profiler.fake.recording import record
from teraio.profiler.models import attention
from teraio.profiler.profiling import profile
from teraio.profiler.training import TrainingSetup, build_training
from teraio.profiler.training.model_sources import model_label, resolve_model
from teraio.traces.trace import Trace

VOCABULARY, WIDTH = 32, 16

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


class Net(nn.Module):
    """Attention with dropout: what PyTorch dispatches by device."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.encoder(self.embedding(tokens)))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Classifier(nn.Module):
    """Takes images and labels, returns whatever ``wrap`` makes of the loss."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.wrap = wrap
        self.convolution = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, 5)

    def forward(self, images: Tensor, labels: Tensor) -> Any:
        features = self.convolution(images).mean((2, 3))
        return self.wrap(functional.cross_entropy(self.head(features), labels))


def make_images(micro_batch_size: int, sequence: int) -> tuple[Tensor, Tensor]:
    images = torch.randn(micro_batch_size, 3, sequence, sequence)
    return images, torch.randint(5, (micro_batch_size,))


def make_named_images(micro_batch_size: int, sequence: int) -> dict[str, Tensor]:
    images, labels = make_images(micro_batch_size, sequence)
    return {"labels": labels, "images": images}


def classify(
    wrap: Callable[[Tensor], Any] = lambda loss: loss, make_batch: Any = make_images
) -> Callable[[], Any]:
    return lambda: (Classifier(wrap), make_batch)


class Recurrent(Net):
    """PyTorch runs it by an operator that only CPUs have."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.embedding(tokens))
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def setup_of(model: Any, **options: Any) -> TrainingSetup:
    return TrainingSetup(model=model, sequence=8, micro_batch_size=2, **options)


def profile_setup(setup: TrainingSetup) -> Trace:
    """The trace of the same training on real tensors."""
    training = build_training(setup)
    with profile(training.model, training.optimizer) as session:
        for _ in range(8):
            training.run_iteration()
    return session.trace


@pytest.mark.parametrize("make_batch", [make_images, make_named_images])
@pytest.mark.parametrize(
    "wrap",
    [lambda loss: loss, lambda loss: (loss, 1), lambda loss: SimpleNamespace(loss=loss)],
    ids=["tensor", "tuple", "object"],
)
def test_a_fake_trace_of_ones_own_model_equals_the_real_one(
    wrap: Callable[[Tensor], Any], make_batch: Any
) -> None:
    setup = setup_of(classify(wrap, make_batch), micro_batches=2)
    fake, real = record(setup), profile_setup(setup)
    assert fake.kernels.op.tolist() == real.kernels.op.tolist()
    assert fake.kernels.signature.tolist() == real.kernels.signature.tolist()
    assert fake.kernels.module.tolist() == real.kernels.module.tolist()
    assert fake.peak_live_bytes == pytest.approx(real.peak_live_bytes, abs=256)


def test_a_model_of_tokens_needs_no_batches() -> None:
    trace = record(setup_of(Net))
    assert trace.metadata.model == f"{Net.__module__}:Net"
    sizes = trace.storages.nbytes[trace.storages.name == "embedding.weight"]
    assert sizes.tolist() == [VOCABULARY * WIDTH * 4]


def test_attention_and_dropout_are_those_of_a_gpu() -> None:
    operators = set(record(setup_of(Net)).kernels.op)
    assert "aten._scaled_dot_product_efficient_attention.default" in operators
    assert "aten._scaled_dot_product_efficient_attention_backward.default" in operators
    assert "aten.native_dropout.default" in operators
    assert not any("for_cpu" in operator or "bernoulli" in operator for operator in operators)


def test_attention_may_be_that_of_the_cpu() -> None:
    model = lambda: Grouped(torch.float32, masked=True)  # noqa: E731
    operators = set(record(setup_of(model, attention="sdpa")).kernels.op)
    assert "aten._scaled_dot_product_flash_attention_for_cpu.default" in operators


class Grouped(nn.Module):
    """Attention of eight heads over two heads of keys, or with a mask."""

    def __init__(self, dtype: torch.dtype = torch.float32, masked: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 64, dtype=dtype)
        self.masked = masked

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        query = x.view(*x.shape[:2], 8, 8).transpose(1, 2)
        key = query if self.masked else query[:, :2]
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() if self.masked else None
        out = functional.scaled_dot_product_attention(
            query, key, key, mask, is_causal=not self.masked, enable_gqa=not self.masked
        )
        return out.float().mean()


@pytest.mark.parametrize(
    ("dtype", "masked", "operator"),
    [
        (torch.bfloat16, False, "aten._scaled_dot_product_cudnn_attention.default"),
        (torch.float32, False, "aten._safe_softmax.default"),  # PyTorch's own fallback
        (torch.float32, True, "aten._scaled_dot_product_efficient_attention.default"),
    ],
)
def test_shared_heads_and_masks_take_the_kernels_that_can(
    dtype: torch.dtype, masked: bool, operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    trace = record(setup_of(lambda: Grouped(dtype, masked)))
    assert operator in set(trace.kernels.op)


def test_autocast_is_that_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It narrows products and attention, and widens norms and softmax, which a CPU's does not."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    # Before torch 2.12 attention with this dropout is cuDNN's.
    monkeypatch.setattr(attention, "CUDNN_ROUNDS_DROPOUT", True)
    trace = record(setup_of(Net, dtype="bf16"))
    of_operator = dict(zip(trace.kernels.op, trace.kernels.call, strict=True))
    texts = {op: trace.calls.arguments[call] for op, call in of_operator.items()}
    assert "bfloat16" in texts["aten._scaled_dot_product_flash_attention.default"]
    assert "bfloat16" in texts["aten.addmm.default"]
    for op in ("aten.native_layer_norm.default", "aten._log_softmax.default"):
        assert "bfloat16" not in texts[op]
        assert "float32" in texts[op]


def test_a_model_may_be_converted_and_initialised_as_usual() -> None:
    def make() -> nn.Module:
        model = Net()
        nn.init.trunc_normal_(model.head.weight)
        return model.cpu().to(torch.bfloat16)

    trace = record(setup_of(make))
    parameters = trace.storages.kind == "parameter"
    assert set(trace.storages.dtype[parameters]) == {"bfloat16"}
    assert trace.storages.nbytes[trace.storages.name == "head.weight"].tolist() == [
        VOCABULARY * WIDTH * 2
    ]


class Alternating(nn.Module):
    """Does more in every second micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.calls = 0

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        x = self.embedding(tokens)
        loss: Tensor = (x.relu() if self.calls % 2 else x).mean()
        return loss


def test_micro_batches_that_differ_are_all_traced() -> None:
    told: list[str] = []
    trace = teraio.trace(Alternating, sequence=4, micro_batches=6, progress=told.append)
    assert (trace.kernels.op == "aten.relu.default").sum() == 3
    assert trace.metadata.traced_micro_batches == 0
    assert "tracing every micro-batch, because they differ" in told


def test_micro_batches_that_are_alike_are_unrolled() -> None:
    trace = teraio.trace(Grouped, sequence=4, micro_batches=6)
    assert trace.metadata.micro_batches == 6
    assert 0 < trace.metadata.traced_micro_batches < 6


# Functions by name --------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, whose modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


OWN = """
import torch
from torch import nn
CONSTANT = torch.ones(2)
class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.embedding = nn.Embedding(16, width)
    def forward(self, tokens, targets):
        return self.embedding(tokens).mean()
class Made:
    @staticmethod
    def small(): return Net(4)
def make(): return Net()
def widths(width): return Net(width)
existing = Net()
number = 3
def nothing(): return None
def no_parameters(): return nn.ReLU()
def no_tokens(): return nn.Linear(2, 2)
def odd_batch(): return Net(), 3
def wrong_batch(): return Net(), lambda size, sequence: "text"
class Logits(Net):
    def forward(self, tokens, targets): return self.embedding(tokens)
class Constant(Net):
    def forward(self, tokens, targets): return self.embedding(tokens).mean().detach()
"""


def test_a_function_is_found_in_the_current_directory(here: Path) -> None:
    (here / "my_models.py").write_text(OWN)
    trace = record(setup_of("my_models:make"))
    assert trace.metadata.model == "my_models:make"
    constant = sys.modules["my_models"].CONSTANT
    assert type(constant) is Tensor, "the module was imported among fake tensors"
    assert record(setup_of("my_models:Made.small")).num_kernels == trace.num_kernels


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tiny-lama", "model tiny-lama: unknown; there are tiny-llama"),
        ("missing_models:make", "there is no module missing_models here or installed"),
        ("my_models:other", "my_models has no 'other'"),
        ("my_models.py:make", "without .py: my_models"),
        ("my_models:widths", "missing a required argument: 'width'; give a function"),
        ("my_models:existing", "is a Net, not a function"),
        ("my_models:number", "is a int, not a function"),
        ("my_models:nothing", "returned None; it must return a torch.nn.Module"),
        ("my_models:no_parameters", "has no parameters to train"),
        ("my_models:no_tokens", "has no nn.Embedding, so it takes no tokens"),
        ("my_models:odd_batch", "make_batch is a int, not a function"),
        ("my_models:wrong_batch", "make_batch returned a str"),
        ("my_models:Logits", "returned a tensor of shape \\(2, 8, 8\\); it must return the loss"),
        ("my_models:Constant", "it must return the loss"),
        (":make", "'' is no module name"),
    ],
)
def test_a_function_without_sense_is_refused(here: Path, text: str, message: str) -> None:
    (here / "my_models.py").write_text(OWN)
    with pytest.raises(InputError, match=message) as caught:
        record(setup_of(text))
    assert "\n" not in str(caught.value)


def test_a_module_that_cannot_be_imported_says_so_itself(here: Path) -> None:
    (here / "needy_models.py").write_text("import a_library_that_nobody_has")
    with pytest.raises(ModuleNotFoundError, match="a_library_that_nobody_has"):
        resolve_model("needy_models:make")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2), "a Linear that exists already"),
        (3, "a int is no model"),
    ],
)
def test_what_is_no_source_is_refused(model: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        record(setup_of(model))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 2, "micro_batches": 2}, "stages: only reference models can be cut"),
        ({"tensor_parallel": 2}, "tensor_parallel: only reference models can be cut"),
        ({"checkpoint": "reentrant"}, "checkpoint: .* decides itself"),
        ({"attention": "flash"}, "attention: only reference models take 'flash'"),
    ],
)
def test_options_of_reference_models_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        record(setup_of(Net, **options))


def test_a_sequence_beyond_the_positions_is_refused() -> None:
    setup = TrainingSetup(model="tiny-gpt2", sequence=65, micro_batch_size=1)
    with pytest.raises(InputError, match="sequence: tiny-gpt2 knows 64 positions, got 65"):
        record(setup)


def test_experts_serve_equally_many_tokens() -> None:
    trace = teraio.trace("tiny-moe")
    assert trace.metadata.model == "tiny-moe"
    assert "every expert serves equally many tokens" in trace.metadata.known_differences


def test_labels_of_models() -> None:
    assert model_label("tiny-llama") == "tiny-llama"
    assert model_label(Net) == f"{Net.__module__}:Net"
    assert model_label(resolve_model(Net)) == model_label(Net)


# transformers -------------------------------------------------------------------------------


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is not None, reason="transformers is installed"
)
def test_without_transformers_it_says_how_to_install_it() -> None:
    with pytest.raises(MissingDependencyError, match="pip install transformers"):
        resolve_model("transformers:llama")


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "torch_dtype": "bfloat16",
        "architectures": ["LlamaForCausalLM"],
    },
    "gpt2": {
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 128,
        "n_positions": 64,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    },
    "bert": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 128,
        "architectures": ["BertForMaskedLM"],
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    },
    "t5": {
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 96,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
    },
}


@pytest.fixture
def config_file(tmp_path: Path) -> Callable[[str], str]:
    def write(name: str) -> str:
        file = tmp_path / name / "config.json"
        file.parent.mkdir()
        file.write_text(json.dumps({"model_type": name, **CONFIGS[name]}))
        return f"transformers:{file}"

    return write


@needs_transformers
@pytest.mark.parametrize("name", CONFIGS)
def test_a_fake_trace_of_transformers_equals_the_real_one(
    name: str, config_file: Callable[[str], str]
) -> None:
    setup = setup_of(config_file(name), micro_batches=2, attention="sdpa")
    fake, real = record(setup), profile_setup(setup)
    assert fake.kernels.op.tolist() == real.kernels.op.tolist()
    assert fake.kernels.signature.tolist() == real.kernels.signature.tolist()
    assert fake.peak_live_bytes == pytest.approx(real.peak_live_bytes, abs=256)
    parameters = fake.storages.kind == "parameter"
    assert set(fake.storages.dtype[parameters]) == {"float32"}


@needs_transformers
@pytest.mark.parametrize("checkpoint", ["reentrant", "non-reentrant"])
def test_transformers_recompute(checkpoint: Any, config_file: Callable[[str], str]) -> None:
    setup = TrainingSetup(model=config_file("llama"), sequence=64, micro_batch_size=8)
    plain, saving = record(setup), record(replace(setup, checkpoint=checkpoint))
    assert saving.num_kernels > plain.num_kernels
    assert saving.peak_live_bytes < plain.peak_live_bytes


@needs_transformers
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no-such-type", "no such model type or class"),
        ("missing/config.json", "missing/config.json: cannot be read"),
        ("AutoConfig", "is no model class"),
        ("vit", "no language model that returns its loss"),
    ],
)
def test_what_transformers_does_not_know_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve_model(f"transformers:{text}")


@needs_transformers
def test_positions_of_transformers_end(config_file: Callable[[str], str]) -> None:
    setup = TrainingSetup(model=config_file("gpt2"), sequence=65, micro_batch_size=1)
    with pytest.raises(InputError, match="knows 64 positions, got 65"):
        record(setup)


def test_an_operator_that_no_gpu_has_is_told() -> None:
    made = record(setup_of(Recurrent))
    notes = [note for note in made.metadata.known_differences if "is the CPU's" in note]
    operators = sorted(note.split(".")[1] for note in notes)
    assert operators == ["mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"]
    assert set(notes).isdisjoint(record(setup_of(Net)).metadata.known_differences)
