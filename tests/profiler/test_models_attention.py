"""The kernels of CUDA: which may run, which PyTorch would pick, what they dispatch."""

from __future__ import annotations

import contextlib
import math
from typing import Any, get_args

import pytest
import torch
from tests.profiler.operator_log import Call, OperatorLog
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from teraio.errors import InputError
from teraio.profiler.models import MODELS, build_model, make_batch
from teraio.profiler.models import attention as kernels
from teraio.profiler.models.attention import AttentionInputs, attend, automatic_kernel
from teraio.profiler.models.layers import AttentionKernel

BF16, FP32 = torch.bfloat16, torch.float32
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
BACKENDS: dict[str, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
"""The kernels that exist on CUDA only."""


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, cudnn_rounds_dropout: None) -> None:
    """As on a machine without a GPU."""
    monkeypatch.setattr(kernels, "_prefers_cudnn", lambda: True)


@pytest.fixture
def cudnn_rounds_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """As from torch 2.12 on, whichever this is."""
    monkeypatch.setattr(kernels, "CUDNN_ROUNDS_DROPOUT", True)


def inputs(
    dtype: torch.dtype = BF16, head: int = 16, keys: int = 32, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values that want gradients: 2 sequences of 32, 4 heads."""

    def draw(length: int) -> Tensor:
        shape = (2, 4, length, head)
        return torch.randn(shape, dtype=dtype, device=device, requires_grad=True)

    return draw(32), draw(keys), draw(keys)


def logged(query: Tensor, key: Tensor, value: Tensor, kernel: str, **options: Any) -> list[Call]:
    """What forward and backward dispatch."""
    with OperatorLog() as log:
        attend(query, key, value, kernel, **options).sum().backward()  # type: ignore[arg-type]
    return log.calls


def test_kernels_agree_on_bias_and_scale() -> None:
    """Those of a CPU: the bias is added to scaled scores."""
    query, key, value = torch.randn(3, 2, 4, 5, 8)
    bias = torch.randn(1, 4, 5, 5)
    expected = torch.softmax(query @ key.mT * 0.5 + bias, dim=-1) @ value
    for kernel in ("auto", "sdpa", "math"):
        result = attend(query, key, value, kernel, bias=bias, scale=0.5)
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("kernel", BACKENDS)
def test_fake_tensors_run_the_kernels_of_cuda(kernel: str) -> None:
    """One operator forward and one in backward, with the results' shapes and without memory."""
    with FakeTensorMode():
        query, key, value = inputs()
        with OperatorLog() as log:
            result = attend(query, key, value, kernel, is_causal=True)  # type: ignore[arg-type]
            result.sum().backward()
    name = f"_scaled_dot_product_{kernel}_attention"
    assert [op for op in log.names if op.startswith("_scaled")] == [name, f"{name}_backward"]
    assert result.shape == query.shape
    for x in (query, key, value):
        assert x.grad is not None
        assert x.grad.shape == x.shape


@pytest.mark.parametrize("kernel", BACKENDS)
def test_the_normaliser_is_kept_only_for_backward(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without gradients the efficient and the cuDNN kernel are told so, as PyTorch tells them."""
    told: list[tuple[Any, ...]] = []
    operator = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention")
    with FakeTensorMode():
        query, key, value = inputs()
        for mode in (contextlib.nullcontext(), torch.no_grad()):
            with mode, _ArgumentLog(operator.default) as log:
                attend(query, key, value, kernel)  # type: ignore[arg-type]
            told += log.arguments
    # query, key, value, bias, compute_log_sumexp
    flags = [arguments[4] for arguments in told if kernel != "flash"]
    assert flags == ([] if kernel == "flash" else [True, False])


class _ArgumentLog(OperatorLog):
    """The arguments of one operator."""

    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.operator = operator
        self.arguments: list[tuple[Any, ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func is self.operator:
            self.arguments.append((*args, kwargs))
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_flash_pads_narrow_heads() -> None:
    """To a multiple of 8, at the scale of the heads as they were."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention.default
    with FakeTensorMode(), _ArgumentLog(operator) as log:
        result = attend(*inputs(head=20), "flash")
    assert log.names.count("constant_pad_nd") == 3
    ((*_, keywords),) = log.arguments
    assert log.arguments[0][0].shape == (2, 4, 32, 24)
    assert keywords["scale"] == 1 / math.sqrt(20)
    assert result.shape == (2, 4, 32, 20)
    with FakeTensorMode(), OperatorLog() as plain:
        attend(*inputs(head=16), "flash")
    assert "constant_pad_nd" not in plain.names


@pytest.mark.parametrize(("keys", "is_padded"), [(32, False), (30, True)])
def test_the_efficient_kernel_aligns_its_bias(keys: int, *, is_padded: bool) -> None:
    """Rows start at multiples of 8 elements, and one bias serves the whole batch."""
    operator = torch.ops.aten._scaled_dot_product_efficient_attention.default
    with FakeTensorMode(), _ArgumentLog(operator) as log:
        bias = torch.randn(1, 4, 32, keys, requires_grad=True)
        attend(*inputs(FP32, keys=keys), "efficient", bias=bias).sum().backward()
    assert ("constant_pad_nd" in log.names) is is_padded
    given = log.arguments[0][3]
    assert given.shape == (2, 4, 32, keys)
    assert given.stride() == (0, 32 * 32, 32, 1)
    assert bias.grad is not None
    assert bias.grad.shape == bias.shape


@pytest.mark.parametrize(
    ("dtype", "options", "expected"),
    [
        (BF16, {}, "cudnn"),
        (BF16, {"is_causal": True}, "cudnn"),
        (BF16, {"dropout": 0.125}, "cudnn"),
        (BF16, {"dropout": 0.1}, "flash"),
        (BF16, {"bias": False}, "cudnn"),
        (BF16, {"bias": True}, "efficient"),
        (BF16, {"head": 160}, "flash"),
        (BF16, {"head": 20}, "flash"),
        (BF16, {"head": 512}, "efficient"),
        (FP32, {}, "efficient"),
        (FP32, {"bias": True, "dropout": 0.1}, "efficient"),
        (FP32, {"head": 18}, "sdpa-math"),
        (torch.float64, {}, "sdpa-math"),
    ],
)
@pytest.mark.usefixtures("hopper")
def test_what_pytorch_picks_on_hopper(
    dtype: torch.dtype, options: dict[str, Any], expected: str
) -> None:
    """cuDNN before flash before efficient, each where it can; ``bias``: whether it learns."""
    options = dict(options)
    with FakeTensorMode():
        query, key, value = inputs(dtype, options.pop("head", 16))
        if "bias" in options:
            options["bias"] = torch.zeros(1, 4, 32, 32, dtype=dtype, requires_grad=options["bias"])
        assert automatic_kernel(AttentionInputs(query, key, value, **options)) == expected
        calls = logged(query, key, value, "auto", **options)
    names = {name for name, _ in calls if name.startswith("_scaled")}
    stem = f"_scaled_dot_product_{expected}_attention"
    assert names == (set() if expected == "sdpa-math" else {stem, f"{stem}_backward"})


def test_what_pytorch_picks_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other GPUs do not prefer cuDNN; kernels that are switched off are left out."""
    monkeypatch.setattr(kernels, "_prefers_cudnn", lambda: False)
    with FakeTensorMode():
        given = AttentionInputs(*inputs())
        assert automatic_kernel(given) == "flash"
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            assert automatic_kernel(given) == "efficient"
        with sdpa_kernel(SDPBackend.MATH):
            assert automatic_kernel(given) == "sdpa-math"


@pytest.mark.usefixtures("hopper")
def test_cudnn_is_not_picked_where_it_must_be_deterministic() -> None:
    """As PyTorch decides."""
    with FakeTensorMode():
        given = AttentionInputs(*inputs())
        torch.use_deterministic_algorithms(True)
        try:
            assert automatic_kernel(given) == "flash"
        finally:
            torch.use_deterministic_algorithms(False)
        assert automatic_kernel(given) == "cudnn"


def test_real_tensors_run_what_pytorch_picks() -> None:
    """On a CPU ``auto`` is ``sdpa``, to the bit, in forward and backward."""
    query, key, value = inputs(FP32)
    results = []
    for kernel in ("auto", "sdpa"):
        result = attend(query, key, value, kernel, is_causal=True)
        results.append((result, *torch.autograd.grad(result.sum(), (query, key, value))))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("kernel", "options", "message"),
    [
        ("flash", {"dtype": FP32}, "'flash': it takes float16 and bfloat16, not torch.float32"),
        ("flash", {"bias": torch.zeros(32, 32)}, "takes no bias and no mask; choose another"),
        ("flash", {"head": 264}, "a head of 264 is wider than 256"),
        ("flash", {"keys": 16, "is_causal": True}, "as many keys as queries"),
        ("cudnn", {"dtype": FP32}, "'cudnn': it takes float16 and bfloat16, not torch.float32"),
        ("cudnn", {"head": 12}, "a head of 12 is no multiple of 8 up to 128"),
        ("cudnn", {"dropout": 0.1}, "a dropout of 0.1 is no multiple of 1/16"),
        ("cudnn", {"keys": 1}, "more than one key"),
        ("efficient", {"dtype": torch.float64}, "float16, bfloat16 and float32, not torch.float64"),
        ("efficient", {"dtype": FP32, "head": 6}, "a head of 6 is no multiple of 4"),
    ],
)
@pytest.mark.usefixtures("cudnn_rounds_dropout")
def test_a_kernel_that_cannot_says_why(
    kernel: AttentionKernel, options: dict[str, Any], message: str
) -> None:
    """A fake kernel would have taken anything."""
    shape = {name: options[name] for name in ("dtype", "head", "keys") if name in options}
    rest = {name: value for name, value in options.items() if name not in shape}
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(InputError, match=message):
        attend(*inputs(**shape), kernel, **rest)


@pytest.mark.parametrize("kernel", BACKENDS)
def test_real_tensors_on_a_cpu_have_no_such_kernel(kernel: AttentionKernel) -> None:
    """Said before PyTorch would."""
    with pytest.raises(InputError, match=f"attention '{kernel}': it runs on CUDA, not on cpu"):
        attend(*inputs(), kernel)


WIDE = {
    "native_layer_norm",
    "rsqrt",
    "_softmax",
    "_log_softmax",
    "nll_loss_forward",
    "mean",
}
"""What autocast computes in float32 on CUDA, of all that the models call."""


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2", "tiny-t5", "tiny-bert", "tiny-moe"])
@pytest.mark.parametrize("kernel", ["auto", "math"])
def test_a_cpus_autocast_runs_what_cudas_would(name: str, kernel: str) -> None:
    """Whatever CUDA's widens is float32 already; matrix products and attention are narrow."""
    options = {"routing": "balanced"} if name == "tiny-moe" else {}
    with FakeTensorMode(), OperatorLog() as log:
        model = build_model(name, attention=kernel, **options)
        with torch.autocast("cpu", BF16):
            loss = model(*make_batch(model))
        loss.backward()
    products = {"mm", "addmm", "bmm"}
    seen: set[str] = set()
    for operator, tensors in log.calls:
        dtypes = {dtype for _, dtype in tensors if dtype.is_floating_point}
        if operator in WIDE:
            assert dtypes == {FP32}, operator
            seen.add("wide")
        if operator in products:
            assert dtypes == {BF16}, operator
            seen.add("narrow")
    assert seen == {"wide", "narrow"}


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_one_kernel(*, training: bool) -> None:
    """In training; in evaluation there is none."""
    model = build_model("tiny-gpt2", attention="math").train(training)
    with OperatorLog() as log:
        model(*make_batch(model))
    dropped = 1 + 3 * MODELS["tiny-gpt2"].config.layers
    assert log.names.count("native_dropout") == (dropped if training else 0)
    assert not {"bernoulli_", "div_"} & set(log.names)


def test_every_kernel_is_tested() -> None:
    """A kernel with a new name needs a row in the tables above."""
    assert set(get_args(AttentionKernel)) == {*BACKENDS, "auto", "sdpa", "math"}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kernel", BACKENDS)
@pytest.mark.parametrize("head", [16, 20, 64])
@pytest.mark.parametrize("is_causal", [True, False])
def test_the_gpu_runs_what_pytorch_dispatches(
    kernel: AttentionKernel, head: int, *, is_causal: bool
) -> None:
    """Operator for operator, shape for shape, and on fake tensors too."""
    given = AttentionInputs(*inputs(head=head, device="cuda"), is_causal=is_causal)
    if kernels.obstacles(kernel, given):
        pytest.skip("heads that this kernel does not take")
    query, key, value = given.query, given.key, given.value
    with OperatorLog() as log, sdpa_kernel(BACKENDS[kernel]):
        result = functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
        result.sum().backward()
    # Gradients that exist already would be added to.
    fresh = inputs(head=head, device="cuda")
    assert logged(*fresh, kernel, is_causal=is_causal) == log.calls
    with FakeTensorMode():
        assert logged(*inputs(head=head), kernel, is_causal=is_causal) == log.calls


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("keys", [32, 30])
def test_the_gpu_aligns_a_bias_as_here(keys: int) -> None:
    """Padded, sliced and expanded in the same order."""

    def make(device: str) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        bias = torch.randn(1, 4, 32, keys, device=device, requires_grad=True)
        return inputs(FP32, keys=keys, device=device), bias

    given, bias = make("cuda")
    with OperatorLog() as log, sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        functional.scaled_dot_product_attention(*given, attn_mask=bias).sum().backward()
    given, bias = make("cuda")
    assert logged(*given, "efficient", bias=bias) == log.calls
    with FakeTensorMode():
        given, bias = make("cpu")
        assert logged(*given, "efficient", bias=bias) == log.calls


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2", "tiny-t5", "tiny-bert", "tiny-moe"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_fake_models_run_the_operators_of_the_gpu(name: str, dtype: torch.dtype) -> None:
    """A whole micro-batch: attention, dropout and autocast included."""
    options = {"routing": "balanced"} if name == "tiny-moe" else {}

    def run(device: str) -> list[Call]:
        with torch.device(device):
            model = build_model(name, **options)
            batch = make_batch(model)
        with OperatorLog() as log:
            with torch.autocast(device, BF16, enabled=dtype == BF16):
                loss = model(*batch)
            loss.backward()
        return log.calls

    real = run("cuda")
    with FakeTensorMode():
        fake = run("cpu")
    assert fake == real
