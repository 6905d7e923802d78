"""Kernels that take raw pointers: what they touch is there, and what they write is not lost."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch

import teraio
from teraio.contracts.plan import Moves
from teraio.errors import CapacityError, InputError, OffloadWarning
from teraio.executor.raw_pointers import guard
from teraio.planner import evict_everything
from teraio.planner.plan_building import build_plan
from teraio.traces.trace import UNTRACKED

FACTOR = 0.75


def scale_raw(tensor: torch.Tensor, factor: float) -> None:
    """Multiply float32 values through the tensor's pointer, which no dispatcher sees."""
    pointer = ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_float))
    values = np.ctypeslib.as_array(pointer, shape=(tensor.numel(),))
    np.multiply(values, np.float32(factor), out=values)


guarded_scale = guard(scale_raw)


def train_with(scale: Callable[[torch.Tensor, float], Any], batch: Any) -> Callable[..., float]:
    """A step in which activations, gradients and weights all go through ``scale``."""

    class Scaled(torch.autograd.Function):
        """Scales in forward and, by its saved output's pointer too, in backward."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            y = x.clone()
            scale(y, FACTOR)
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            (y,) = ctx.saved_tensors
            gradient = gradients[0].clone()
            scale(gradient, FACTOR)
            sample = ctypes.cast(y.data_ptr(), ctypes.POINTER(ctypes.c_float))[0]
            return gradient + float(sample) * 1e-3

    def step(model: Any, optimizer: Any, number: int) -> float:
        optimizer.zero_grad()
        x = batch(number)
        for layer in model.layers:
            x = Scaled.apply(torch.relu(layer(x)))  # type: ignore[no-untyped-call]
        loss = x.pow(2).mean()
        loss.backward()
        for parameter in model.parameters():
            scale(parameter.grad, FACTOR)
        optimizer.step()
        # Between steps nothing else has written them: a clean copy would hide this.
        for parameter in model.parameters():
            scale(parameter.data, 0.999)
        return float(loss.detach())

    return step


@pytest.fixture
def check_evicted(machine: Any) -> Callable[[Any], None]:
    """Compare a loop whose every storage leaves wherever it can with the plain one.

    Without a tight budget: what gives pointers away for good needs its room.
    """

    def check(training: Any) -> None:
        plan = evict_everything(training.trace(), machine(), tiers="both")
        (losses, tensors), _ = training.run()
        (executed, found), _ = training.run(plan=plan)
        assert losses == executed
        for name, tensor in tensors.items():
            assert torch.equal(tensor, found[name]), name

    return check


def test_pointers_of_ctypes_keep_what_they_point_to(
    check_evicted: Any, loop: Any, batch: Any
) -> None:
    check_evicted(loop(train_with(scale_raw, batch)))


def test_too_many_pointers_given_away_are_refused(loop: Any, batch: Any, machine: Any) -> None:
    """Neither wrong numbers nor a hang: a budget that they do not fit ends the run."""
    training = loop(train_with(scale_raw, batch))
    trace = training.trace()
    tight = machine(gpu_memory=trace.peak_allocated_bytes // 2)
    plan = build_plan(trace, Moves.empty(), tight, planner="on-demand")
    with (
        pytest.warns(OffloadWarning, match="does not fit"),
        pytest.raises(CapacityError, match="pinned down by NumPy, pointers"),
    ):
        training.run(plan=plan)


def test_guarded_functions_are_kernels(survives: Any, loop: Any, batch: Any, machine: Any) -> None:
    training = loop(train_with(guarded_scale, batch))
    report = survives(training)
    assert report.drift == 0, report.first_drift
    trace = training.trace()
    rows = np.flatnonzero(trace.kernels.op == "extension.scale_raw")
    assert len(rows) == 3 + 3 + 6 + 6
    touched = trace.accesses.take(np.isin(trace.accesses.kernel, rows))
    assert touched.reads.sum() == touched.writes.sum() == len(rows)


def test_guarded_functions_pin_nothing_down(loop: Any, batch: Any, machine: Any) -> None:
    """A pointer that ends with the call lets its storage leave; one given away does not."""
    fixed = {}
    for scale in (scale_raw, guarded_scale):
        training = loop(train_with(scale, batch))
        plan = evict_everything(training.trace(), machine(), tiers="host")
        model, optimizer = training.made()
        with teraio.execute(plan, model, optimizer) as run:
            for number in range(3):
                training.step(model, optimizer, number)
            assert run._mode is not None
            states = [run._mode.registry.find(parameter) for parameter in model.parameters()]
            fixed[scale] = [state for state in states if state and state.attachment.is_fixed]
    assert len(fixed[scale_raw]) == 6
    assert fixed[guarded_scale] == []


def test_guard_takes_modules_and_nothing_else() -> None:
    module = types.ModuleType("kernels")
    module.scale = scale_raw  # type: ignore[attr-defined]
    module.limit = 3  # type: ignore[attr-defined]
    assert guard(module) is module
    assert module.scale is not scale_raw
    assert guard(module.scale) is module.scale
    assert module.limit == 3
    x = torch.ones(4)
    module.scale(x, 2.0)
    assert x.tolist() == [2.0] * 4
    with pytest.raises(InputError, match="guard: expected a function or module, got int"):
        guard(3)


def test_numba_reads_and_writes_through_numpy(check_evicted: Any, loop: Any, batch: Any) -> None:
    @numba.njit
    def scale_values(values: Any, factor: float) -> None:
        for index in range(values.size):
            values[index] *= np.float32(factor)

    def scale(tensor: torch.Tensor, factor: float) -> None:
        scale_values(tensor.detach().view(-1).numpy(), factor)

    check_evicted(loop(train_with(scale, batch)))


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    """A library of custom operators that is gone after the test."""
    made = torch.library.Library("raw_pointer_test", "DEF")
    yield made
    made._destroy()


@pytest.mark.parametrize(
    "schema",
    [
        "scale_(Tensor(a!) x, float factor) -> ()",
        "scale_(Tensor x, float factor) -> ()",
        "scale_(Tensor _0, float _1) -> int",
    ],
    ids=["declared", "returns nothing", "from a C++ signature"],
)
def test_custom_operators_that_write_raw(
    schema: str, library: Any, survives: Any, loop: Any, batch: Any
) -> None:
    """Written too is what only the schema's looks give away."""

    def implementation(x: torch.Tensor, factor: float) -> int | None:
        scale_raw(x, factor)
        return 0 if schema.endswith("int") else None

    library.define(schema)
    library.impl("scale_", implementation, "CPU")

    def scale(tensor: torch.Tensor, factor: float) -> None:
        torch.ops.raw_pointer_test.scale_(tensor.detach(), factor)

    report = survives(loop(train_with(scale, batch)))
    assert report.drift == 0, report.first_drift


def test_guarded_calls_inside_operators_hold_what_they_capture(
    library: Any, survives: Any, loop: Any, batch: Any
) -> None:
    """A table that the operator's schema does not show is away when it is called."""
    table = torch.linspace(1.0, 2.0, 4096)

    def implementation(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        add_first(table, y)
        return y + x

    @guard
    def add_first(source: torch.Tensor, target: torch.Tensor) -> None:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), 4 * target.numel())

    library.define("with_table(Tensor x) -> Tensor")
    library.impl("with_table", implementation, "CPU")

    def step(model: Any, optimizer: Any, number: int) -> float:
        optimizer.zero_grad()
        x = model(batch(number))
        loss = (x * torch.ops.raw_pointer_test.with_table(x.detach())).mean() + table.sum() * 0
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    survives(loop(step), is_counted_late=True)


# Not torch/extension.h, which takes the compiler most of a minute.
SOURCE = """
#include <cstring>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
void scale_raw(at::Tensor x, double factor) {
  float* values = (float*)x.data_ptr();
  for (int64_t i = 0; i < x.numel(); i++) values[i] *= (float)factor;
}
at::Tensor scaled(at::Tensor x, double factor) {
  at::Tensor y = at::empty_like(x);
  memcpy(y.data_ptr(), x.data_ptr(), x.nbytes());
  scale_raw(y, factor);
  return y;
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("scale_raw", torch::wrap_pybind_function(scale_raw));
  module.def("scaled", torch::wrap_pybind_function(scaled));
}
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_functions_of_cpp_extensions_are_kernels(
    tmp_path: Path, survives: Any, loop: Any, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Built for this test: no registered operator, so no dispatcher sees it."""
    from torch.utils import cpp_extension

    if not cpp_extension.is_ninja_available():
        pytest.skip("needs ninja to build an extension")
    source = tmp_path / "kernels.cpp"
    source.write_text(SOURCE)
    extension = cpp_extension.load(
        "teraio_raw_test", sources=[str(source)], build_directory=str(tmp_path)
    )
    monkeypatch.setitem(sys.modules, "teraio_raw_test", extension)
    original = extension.scale_raw
    report = survives(loop(train_with(lambda t, f: extension.scale_raw(t, f), batch)))
    assert report.drift == 0, report.first_drift
    assert extension.scale_raw is not original

    def step(model: Any, optimizer: Any, number: int) -> float:
        optimizer.zero_grad()
        x = model(batch(number))
        loss = (x * extension.scaled(x.detach(), FACTOR)).mean()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    report = survives(loop(step))
    assert report.drift == 0, report.first_drift


INTERPRETED = """
import triton, triton.language as tl
@triton.jit
def scale_kernel(x, n, factor, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + place, tl.load(x + place, place < n) * factor, place < n)
"""


@pytest.fixture
def triton_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``scale`` as a Triton kernel; interpreted where there is no GPU."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton")
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    (tmp_path / "scale_kernels.py").write_text(INTERPRETED)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("scale_kernels", None)
    kernel = importlib.import_module("scale_kernels").scale_kernel

    def scale(tensor: torch.Tensor, factor: float) -> None:
        kernel[(-(-tensor.numel() // 1024),)](tensor, tensor.numel(), factor, BLOCK=1024)

    return scale


def test_triton_kernels_are_kernels(
    triton_scale: Any, survives: Any, loop: Any, batch: Any
) -> None:
    if torch.cuda.is_available():
        pytest.skip("Triton is compiled here; see the test on the GPU")
    training = loop(train_with(triton_scale, batch))
    report = survives(training)
    assert report.drift == 0, report.first_drift
    assert "triton.scale_kernel" in set(training.trace().kernels.op.tolist())


def check_on_gpu(scale: Callable[[torch.Tensor, float], None], kernel: str | None) -> None:
    """Layers on a GPU whose every storage leaves in every gap, to the bit of plain training."""

    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(512, 512) for _ in range(3)]
        model = torch.nn.Sequential(*layers).cuda()
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
        generator = torch.Generator().manual_seed(number)
        optimizer.zero_grad()
        x = model(torch.randn(256, 512, generator=generator).cuda())
        scale(x.detach(), FACTOR)
        loss = x.pow(2).mean()
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            scale(parameter.grad, FACTOR)
        optimizer.step()
        for parameter in model.parameters():
            scale(parameter.data, 0.999)
        return float(loss.detach())

    model, optimizer = made()
    plain = [step(model, optimizer, number) for number in range(5)]
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    model, optimizer = made()
    with teraio.profile(model, optimizer) as profile:
        while not profile.done:
            step(model, optimizer, 0)
    trace = profile.trace
    assert kernel is None or kernel in set(trace.kernels.op.tolist())
    hardware = teraio.Hardware.preset("h200").with_budgets(gpu_memory="2GB", host_memory="1GB")
    kept = int(trace.storages.allocated_bytes[trace.storages.name == UNTRACKED].sum())
    moving = trace.peak_allocated_bytes - kept
    on_demand = hardware.with_budgets(gpu_memory=kept + int(0.7 * moving))
    for plan in (
        evict_everything(trace, hardware, tiers="host"),
        build_plan(trace, Moves.empty(), on_demand, planner="on-demand"),
    ):
        del model, optimizer  # Of a budget as small as this they would take a large part.
        gc.collect()
        model, optimizer = made()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OffloadWarning)
            with teraio.execute(plan, model, optimizer):
                losses = [step(model, optimizer, number) for number in range(5)]
        assert losses == plain
        for parameter, wanted in zip(model.parameters(), expected, strict=True):
            assert torch.equal(parameter, wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_triton_kernels_on_a_gpu(triton_scale: Any) -> None:
    check_on_gpu(triton_scale, "triton.scale_kernel")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cupy_kernels_on_a_gpu() -> None:
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    kernel = cupy.RawKernel(
        'extern "C" __global__ void scale(float* x, int n, float f) {'
        " int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) x[i] *= f; }",
        "scale",
    )

    def scale(tensor: torch.Tensor, factor: float) -> None:
        stream = cupy.cuda.Stream.from_external(torch.cuda.current_stream())
        with stream:
            values = cupy.asarray(tensor.detach())
            count = tensor.numel()
            kernel((-(-count // 256),), (256,), (values, np.int32(count), np.float32(factor)))

    check_on_gpu(scale, None)
    check_on_gpu(guard(scale), "extension.test_cupy_kernels_on_a_gpu.<locals>.scale")
