"""Timing every call of a trace once: on the CPU here, with what a GPU adds where there is one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from teraio.errors import InputError, OffloadWarning
from teraio.profiler import time_kernels
from teraio.profiler.costs import kernel_timing
from teraio.profiler.costs.calls import describe_arguments
from teraio.profiler.costs.kernel_timing import default_precision, time_calls
from teraio.profiler.costs.measuring import Measured, num_copies
from teraio.profiler.costs.pricing import price
from teraio.profiler.costs.remaking import MadeCall, make_call
from teraio.profiler.costs.sustained import HeavyCall, plays_of, spread
from teraio.profiler.costs.timed_machine import describe_machine
from teraio.profiler.costs.timings import Timings
from teraio.profiler.fake.recording import record
from teraio.profiler.product_precision import product_precision_of
from teraio.profiler.training import TrainingSetup
from teraio.profiler.training.setup import Precision
from teraio.traces.trace import Calls, Trace

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PRODUCT = describe_arguments((torch.randn(64, 64), torch.randn(64, 64)), {})
LARGE = describe_arguments((torch.randn(256, 256), torch.randn(256, 256)), {})
HANDLE = '{"args":[{"opaque":"ProcessGroup"}],"kwargs":{}}'


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of a busy machine wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def table(*rows: tuple[str, str, int]) -> Calls:
    """Calls of operator, arguments and FLOPs."""
    return Calls.from_rows(
        [(i, op, text, flops, 64, 64) for i, (op, text, flops) in enumerate(rows)]
    )


@pytest.fixture(scope="module")
def tiny_trace() -> Trace:
    """A tiny Llama's iteration, traced without a GPU; the CPU's own attention."""
    return record(
        TrainingSetup(model="tiny-llama", sequence=16, micro_batch_size=2, attention="sdpa")
    )


def test_every_call_of_a_trace_is_timed_and_prices_it(tiny_trace: Trace) -> None:
    timings = time_kernels(tiny_trace, device="cpu")
    assert timings.machine == describe_machine("cpu")
    rows = zip(tiny_trace.calls.op, tiny_trace.calls.arguments, strict=True)
    found = [timings.find(op, text, "fp32") for op, text in rows]
    assert all(timing is not None and 0 < timing.seconds < 10 for timing in found)
    priced = price(tiny_trace, gpu="h200", precision="fp32", timings=timings)
    assert "roofline" not in priced.metadata.known_differences[-1]
    assert priced.ideal_seconds > 0


def test_what_is_known_is_not_timed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = time_calls(table(("aten.mm.default", PRODUCT, 9)), device="cpu", precision="fp32")
    first.save(tmp_path / "x.timings")
    made: list[str] = []

    def noted(op: str, arguments: str, device: str) -> MadeCall:
        made.append(op)
        return make_call(op, arguments, device)

    monkeypatch.setattr(kernel_timing, "make_call", noted)
    both = table(("aten.mm.default", PRODUCT, 9), ("aten.add.Tensor", PRODUCT, 0))
    second = time_calls(
        both, device="cpu", precision="fp32", known=Timings.load(tmp_path / "x.timings")
    )
    assert set(made) == {"aten.add.Tensor"}
    assert second.entries[0] == first.entries[0]
    assert len(second) == 2


def test_equal_calls_of_a_table_are_timed_once() -> None:
    scaled = [describe_arguments((torch.randn(8), value), {}) for value in (0.5, 0.25)]
    calls = table(("aten.mul.Tensor", scaled[0], 0), ("aten.mul.Tensor", scaled[1], 0))
    assert len(time_calls(calls, device="cpu", precision="fp32")) == 1


def test_a_larger_product_takes_longer() -> None:
    calls = table(("aten.mm.default", PRODUCT, 1), ("aten.mm.default", LARGE, 64))
    timings = time_calls(calls, device="cpu", precision="fp32")
    small, large = (timings.find("aten.mm.default", t, "fp32") for t in (PRODUCT, LARGE))
    assert small is not None
    assert large is not None
    assert large.seconds > 3 * small.seconds


def test_one_warning_names_all_that_could_not_be_timed() -> None:
    cuda_only = describe_arguments(tuple(torch.randn(1, 1, 8, 8) for _ in range(3)), {})
    calls = table(
        ("c10d.barrier.default", HANDLE, 0),
        ("aten._scaled_dot_product_flash_attention.default", cuda_only, 9),
        ("aten.mm.default", PRODUCT, 9),
    )
    with pytest.warns(OffloadWarning, match=r"could not be timed.*c10d\.barrier") as caught:
        timings = time_calls(calls, device="cpu", precision="fp32")
    assert "flash_attention" in str(caught[0].message)
    assert [entry.op for entry in timings.entries] == ["aten.mm.default"]


def test_the_users_settings_and_random_numbers_are_as_before() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    before = torch.get_float32_matmul_precision()
    time_calls(table(("aten.mm.default", PRODUCT, 9)), device="cpu", precision="tf32")
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_float32_matmul_precision() == before
    assert torch.is_grad_enabled()
    with product_precision_of("tf32"):
        assert torch.get_float32_matmul_precision() == "high"


def test_progress_is_told_as_fractions_and_operators() -> None:
    told: list[float | str] = []
    calls = table(("aten.mm.default", PRODUCT, 9), ("aten.add.Tensor", PRODUCT, 0))
    time_calls(calls, device="cpu", precision="fp32", progress=told.append)
    # The product comes last: by then a GPU is warm.
    assert told == [0.0, "aten.add.Tensor", 0.5, "aten.mm.default"]


def test_requests_that_make_no_sense_are_refused(small_trace: Trace) -> None:
    calls = table(("aten.mm.default", PRODUCT, 9))
    with pytest.raises(InputError, match="describes no calls"):
        time_kernels(small_trace, device="cpu")
    with pytest.raises(InputError, match="precision: 'int8'"):
        time_calls(calls, device="cpu", precision="int8")
    with pytest.raises(InputError, match="device: 'tpu'"):
        time_calls(calls, device="tpu", precision="fp32")
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="no CUDA GPU"):
            time_calls(calls, device="cuda", precision="fp32")


def test_timings_of_another_machine_are_not_added_to() -> None:
    calls = table(("aten.mm.default", PRODUCT, 9))
    timings = time_calls(calls, device="cpu", precision="fp32")
    elsewhere = Timings(
        type(timings.machine)(gpu="NVIDIA H200", torch_version=torch.__version__), timings.entries
    )
    with pytest.raises(InputError, match="was timed on NVIDIA H200"):
        time_calls(calls, device="cpu", precision="fp32", known=elsewhere)


def test_precision_is_read_off_the_products() -> None:
    half = PRODUCT.replace("float32", "bfloat16")
    assert default_precision(table(("aten.mm.default", PRODUCT, 9))) == "fp32"
    assert default_precision(table(("aten.add.Tensor", half, 0))) == "fp32"
    assert default_precision(table(("aten.mm.default", half, 9))) == "bf16"


MB = 2**20


@pytest.mark.parametrize(
    ("moved_bytes", "copies"), [(0, 1), (MB, 1), (8 * MB, 8), (64 * MB, 2), (200 * MB, 1)]
)
def test_inputs_rotate_where_the_cache_would_hold_them_as_training_would_not(
    moved_bytes: int, copies: int
) -> None:
    assert num_copies(moved_bytes) == copies


def heavy(count: int, seconds: float) -> HeavyCall:
    """A call that is never made."""
    return HeavyCall(lambda: MadeCall(None, (), {}), count, seconds)


def test_calls_are_played_as_often_as_they_occur() -> None:
    # An iteration takes 3 s, half of it in heavy calls; three seconds are played.
    calls = [heavy(1000, 1e-3), heavy(250, 2e-3)]
    assert plays_of(calls, light_share=0.5) == [1000, 250]
    assert plays_of([heavy(1, 1.0)], light_share=0.0) == [3]


def test_short_calls_are_repeated_between_two_events() -> None:
    assert [heavy(1, seconds).repeats for seconds in (5e-5, 1e-3, 0.0)] == [10, 1, 5000]
    calls = [heavy(1000, 5e-5), heavy(1000, 1e-3)]
    few, many = plays_of(calls, light_share=0.0)
    assert few * 10 == pytest.approx(many, rel=0.01)


def test_plays_are_spread_evenly() -> None:
    assert spread([4, 2]) == [0, 1, 0, 0, 1, 0]
    order = spread([100, 10, 1])
    assert np.bincount(order).tolist() == [100, 10, 1]
    assert np.diff(np.flatnonzero(np.array(order) == 1)).max() <= 12


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", ["fp32", "tf32", "bf16"])
def test_on_a_gpu_every_kernel_is_timed_with_its_launch(dtype: Precision) -> None:
    setup = TrainingSetup(model="tiny-llama", sequence=64, micro_batch_size=2, dtype=dtype)
    trace = record(setup)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        timings = time_kernels(trace, device="cuda", precision=dtype)
    assert timings.machine.host_seconds_per_kernel > 1e-6
    for entry in timings.entries:
        assert 0 < entry.host_seconds < 1e-2, entry.op
        assert 0 <= entry.seconds < 1e-2, entry.op
    priced = price(trace, gpu="h200", precision=dtype, timings=timings)
    # A tiny model waits for its host.
    assert priced.kernels.gap_before_seconds.sum() > 0.5 * priced.ideal_seconds


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_a_product_runs_at_a_credible_rate() -> None:
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    text = describe_arguments((x, x.clone()), {})
    flops = 2 * 4096**3
    calls = Calls.from_rows([(0, "aten.mm.default", text, flops, 2**26, 2**25)])
    (entry,) = time_calls(calls, device="cuda", precision="bf16").entries
    assert 2e13 < flops / entry.seconds < 3e15


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_scratch_memory_is_measured() -> None:
    from teraio.profiler.costs.measuring import CudaMeter

    values = torch.randn(2**20, device="cuda")
    call = MadeCall(torch.ops.aten.sort.default, (values,), {})
    measured = CudaMeter().measure(lambda: call, 2**24, is_heavy=False)
    assert isinstance(measured, Measured)
    assert measured.workspace_bytes >= values.nbytes
