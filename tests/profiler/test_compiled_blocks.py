"""Compiled blocks over fake tensors: regions take, return and keep what TorchInductor's do."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.profiler.test_fake_recorder import assert_same, births, record_real
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode

from teraio.errors import InputError
from teraio.profiler.costs.regions import REGION
from teraio.profiler.fake import compiled_regions
from teraio.profiler.fake.compiled_blocks import compile_blocks, find_blocks
from teraio.profiler.fake.fake_mode import fake_tensors
from teraio.profiler.fake.fake_recorder import FakeRecorder
from teraio.profiler.fake.recording import record
from teraio.profiler.fake.region_outputs import OutputLayout
from teraio.profiler.models import build_model, model_config
from teraio.profiler.recorder import Recorder
from teraio.profiler.trace_building import build_trace
from teraio.profiler.training import TrainingSetup, build_training
from teraio.traces.trace import Trace

pytestmark = [  # What torch says of itself while it compiles.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

SETUPS: dict[str, dict[str, Any]] = {
    "llama, bf16": {"dtype": "bf16", "micro_batches": 2},
    "gpt2": {"model": "tiny-gpt2"},
    "t5": {"model": "tiny-t5"},
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Compiled regions of one test are not those of another."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def without_codegen() -> Iterator[None]:
    """TorchInductor compiles regions into calls of PyTorch's own operators: quick, no C++."""
    with inductor_config.patch(fallback_by_default=True, fx_graph_cache=False):
        yield


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Two blocks in bf16."""
    return record(compiled_setup(dtype="bf16", attention="auto", micro_batches=2))


def compiled_setup(model: str = "tiny-llama", **options: Any) -> TrainingSetup:
    config = model_config(model, layers=2)
    given = {"attention": "sdpa", "sequence": 32, "micro_batch_size": 2, **options}
    return TrainingSetup(model=config, compile_blocks=True, **given)


def regions(trace: Trace) -> list[tuple[str, str, int]]:
    """Module, phase and micro-batch of every compiled region, in order."""
    kernels = trace.kernels
    columns = (kernels.module, kernels.phase, kernels.micro_batch)
    rows = zip(kernels.op, zip(*(c.tolist() for c in columns), strict=True), strict=True)
    return [row for op, row in rows if op == REGION]


@pytest.mark.parametrize("name", SETUPS)
def test_fake_regions_equal_those_of_inductor(name: str, without_codegen: None) -> None:
    setup = compiled_setup(**SETUPS[name])
    fake, real = record(setup), record_real(setup)
    assert fake.kernels.op.tolist() == real.kernels.op.tolist()
    assert fake.kernels.module.tolist() == real.kernels.module.tolist()
    assert (fake.kernels.signature == real.kernels.signature).all()
    assert births(fake) == births(real)


@pytest.mark.slow
def test_a_fake_trace_equals_the_real_one_of_generated_code() -> None:
    for options in ({"micro_batches": 2}, {"checkpoint": "non-reentrant"}):
        setup = compiled_setup(**options)
        assert_same(record(setup), record_real(setup))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_fake_trace_equals_the_one_of_a_gpu() -> None:
    """Measured for all of Llama 3.2 3B on an H200; here two of its blocks."""
    sizes = model_config("llama3.2-3b", layers=2, vocabulary=4096)
    options: dict[str, Any] = {"sequence": 2048, "micro_batch_size": 2, "dtype": "bf16"}
    setup = TrainingSetup(model=sizes, attention="auto", compile_blocks=True, **options)
    fake = record(setup)
    training = build_training(setup, "cuda")
    recorder = Recorder(device_type="cuda")
    recorder.names.add_model(training.model)
    with recorder:
        for _ in range(6):
            training.run_iteration()
    real = build_trace(recorder)
    assert fake.kernels.op.tolist() == real.kernels.op.tolist()
    assert (fake.kernels.signature == real.kernels.signature).all()
    # What libraries hold for good is seen on a GPU alone.
    assert births(fake) == [row for row in births(real) if "untracked" not in row]


def test_a_block_is_one_kernel_forwards_and_one_backwards(trace: Trace) -> None:
    names = ["blocks.0", "blocks.1"]
    assert regions(trace) == [
        row
        for micro_batch in range(2)
        for row in (
            *((name, "forward", micro_batch) for name in names),
            *((name, "backward", micro_batch) for name in reversed(names)),
        )
    ]
    # Beside them, gradients are added where they meet those of the micro-batch before.
    inside = trace.kernels.module.astype(str)
    is_other = [m.startswith("blocks.") and m not in names for m in inside]
    assert set(trace.kernels.op[is_other]) == {"aten.add_.Tensor"}


def test_regions_bring_their_graph_and_its_work(trace: Trace) -> None:
    rows = [i for i, op in enumerate(trace.calls.op) if op == REGION]
    assert len(rows) == 2, "all blocks are alike: one call forwards, one backwards"
    forward, backward = (json.loads(trace.calls.arguments[row])["args"][0] for row in rows)
    assert "aten._scaled_dot_product_cudnn_attention.default" in json.dumps(forward)
    assert "aten._scaled_dot_product_cudnn_attention_backward.default" in json.dumps(backward)
    flops = trace.calls.flops[rows]
    assert 2 * flops[0] <= flops[1] <= 2.5 * flops[0]


def test_blocks_keep_their_names_and_are_all_found() -> None:
    with fake_tensors():
        model = build_model("tiny-t5", layers=2)
        names = list(model.state_dict())
        assert compile_blocks(model) == 4
    assert list(model.state_dict()) == names
    assert [name for name, _ in find_blocks(model)] == [
        "encoder.blocks.0",
        "encoder.blocks.1",
        "decoder.blocks.0",
        "decoder.blocks.1",
    ]


def test_modes_come_and_go_without_compiling_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    make_region = compiled_regions._make_region

    def count(*args: Any, **kwargs: Any) -> Any:
        made.append(args)
        return make_region(*args, **kwargs)

    monkeypatch.setattr(compiled_regions, "_make_region", count)
    with fake_tensors():
        training = build_training(replace(compiled_setup(), model=model_config("tiny-llama")))
        for _ in range(3):
            training.run_iteration()
            with FakeRecorder():
                training.run_iteration()
    assert len(made) == 2, "three blocks, one graph forwards, one backwards"


def test_models_of_one_class_do_not_use_up_each_others_variants() -> None:
    with torch._dynamo.config.patch(recompile_limit=1):
        short, long = (record(compiled_setup(sequence=length)) for length in (16, 32))
    assert regions(short) == regions(long)
    assert short.kernels.op.tolist() == long.kernels.op.tolist()


def test_a_block_with_inputs_of_too_many_shapes_is_named() -> None:
    with fake_tensors(), torch._dynamo.config.patch(recompile_limit=1):
        model = nn.Module()
        model.blocks = nn.ModuleList([nn.Linear(4, 4)])
        compile_blocks(model)
        model.blocks[0](torch.ones(2, 4))
        with pytest.raises(InputError, match=r"^blocks.0: was called with inputs of too many"):
            model.blocks[0](torch.ones(3, 4))


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(InputError, match="Linear keeps no blocks"):
        compile_blocks(nn.Linear(2, 2))


class Block(nn.Module):
    """Goes where the data tell."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_a_block_that_looks_at_its_data_is_named() -> None:
    """The compiler's front end finds it."""
    model = nn.Module()
    model.blocks = nn.ModuleDict({"first": nn.Linear(4, 4), "second": Block()})
    compile_blocks(model)
    with pytest.raises(InputError, match=r"^blocks.second: cannot be compiled .* [Dd]ata-dep"):
        model.blocks["second"](torch.ones(4))


def test_a_block_whose_sizes_depend_on_data_is_named() -> None:
    """The compiler's back end finds it."""
    with fake_tensors():
        model = build_model("tiny-moe", layers=1, routing="data")
        compile_blocks(model)
        tokens = torch.zeros(2, 8, dtype=torch.long)
        with pytest.raises(InputError, match=r"^blocks.0: cannot be compiled .* data-dependent"):
            model(tokens, tokens)


def test_a_compiler_that_teraio_does_not_know_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "teraio.profiler.fake.compiled_regions", None)
    with fake_tensors():
        model = build_model("tiny-llama", layers=1)
        with pytest.raises(InputError, match=r"^compile_blocks: teraio knows the compiler of"):
            compile_blocks(model)


def test_compiled_blocks_would_hide_collectives_of_tensor_parallelism() -> None:
    with pytest.raises(InputError, match=r"^compile_blocks: .*tensor-parallel"):
        compiled_setup(tensor_parallel=2)


def test_outputs_lie_where_the_graph_put_them() -> None:
    with FakeTensorMode():
        x, y = torch.empty(4, 6), torch.empty(3, dtype=torch.bfloat16)

        def run(x: Tensor, y: Tensor) -> list[Any]:
            new = x + 1
            return [new.t(), x, None, x[1:], new, y.float(), 7, y]

        layout = OutputLayout([x, y], run(x, y))
        other_x, other_y = torch.empty_like(x), torch.empty_like(y)
        made, expected = layout.make([other_x, other_y]), run(other_x, other_y)
        assert layout.new_bytes == 4 * 6 * 4 + 3 * 4
        assert [type(value) for value in made] == [type(value) for value in expected]
        assert [look(v) for v in made] == [look(v) for v in expected]
        assert made[1] is other_x
        assert made[7] is other_y
        assert made[3].untyped_storage()._cdata == other_x.untyped_storage()._cdata
        assert made[0].untyped_storage()._cdata == made[4].untyped_storage()._cdata


def look(value: Any) -> Any:
    """What can be told of a tensor without its values; anything else itself."""
    if not isinstance(value, Tensor):
        return value
    return value.dtype, value.shape, value.stride(), value.storage_offset()
