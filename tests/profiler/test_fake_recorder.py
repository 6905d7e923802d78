"""A trace of fake tensors equals the trace of real ones: kernels, storages, accesses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from teraio.errors import InputError
from teraio.profiler.clocks import dispatch_overhead_seconds
from teraio.profiler.fake.recording import record
from teraio.profiler.models import model_config, training_flops
from teraio.profiler.recorder import Recorder
from teraio.profiler.trace_building import build_trace
from teraio.profiler.training import TrainingSetup, build_training, reference_setup
from teraio.traces.trace import Trace

SMALL_BYTES = 64
"""Storages of this size or less may be born in another order within a run of such."""

LOOPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two micro-batches": {"micro_batches": 2},
    "foreach and clipping": {"optimizer_implementation": "foreach", "clip_norm": 1.0},
    "for-loop and clipping": {"optimizer_implementation": "for-loop", "clip_norm": 1.0},
    "checkpoint": {"checkpoint": "non-reentrant"},
    "checkpoint, reentrant": {"checkpoint": "reentrant", "micro_batches": 2},
    "bf16": {"dtype": "bf16"},
    "math attention": {"attention": "math"},
}


def both(name: str, **options: Any) -> tuple[Trace, Trace]:
    """The fake trace and the real one of the same loop on the CPU."""
    options = {"attention": "sdpa", **options}
    setup = reference_setup(name, options=options)
    return record(setup), record_real(setup)


def record_real(setup: TrainingSetup) -> Trace:
    training = build_training(setup)
    recorder = Recorder(device_type="cpu", describe_calls=True)
    recorder.recording.give_up_workspace()
    recorder.names.add_model(training.model)
    with recorder:
        for _ in range(3):
            training.run_iteration()
    return build_trace(recorder)


def assert_same(fake: Trace, real: Trace) -> None:
    assert fake.kernels.op.tolist() == real.kernels.op.tolist()
    for column in ("module", "phase", "micro_batch", "signature"):
        same = getattr(fake.kernels, column) == getattr(real.kernels, column)
        assert same.all(), (column, fake.kernels.op[~same][:5])
    assert births(fake) == births(real)
    assert accesses(fake) == accesses(real)
    assert fake.peak_live_bytes == pytest.approx(real.peak_live_bytes, abs=256)


def births(trace: Trace) -> list[Any]:
    """Every storage with all that is known of it: persistent ones, which are not born, by name, the
    others in order of birth, runs of tiny ones sorted.
    """
    storages = trace.storages
    names = ("birth", "death", "nbytes", "kind", "name", "dtype", "resizable")
    rows = list(zip(*(getattr(storages, name).tolist() for name in names), strict=True))
    result = sorted((row for row in rows if row[0] < 0), key=str)
    tiny: list[Any] = []
    for row in rows:
        if row[0] < 0:
            continue
        if row[2] <= SMALL_BYTES:
            tiny.append(row)
            continue
        result += [*sorted(tiny, key=str), row]
        tiny = []
    return result + sorted(tiny, key=str)


def accesses(trace: Trace) -> list[Any]:
    """Accesses by kernel, storages told by birth and size."""
    table, storages = trace.accesses, trace.storages
    owner = table.storage
    columns = (
        table.kernel,
        storages.birth[owner],
        storages.nbytes[owner],
        storages.name[owner],
        table.reads,
        table.writes,
    )
    return sorted(zip(*(c.tolist() for c in columns), strict=True))


@pytest.mark.parametrize("loop", LOOPS)
def test_a_fake_trace_of_a_llama_equals_the_real_one(loop: str) -> None:
    assert_same(*both("tiny-llama", **LOOPS[loop]))


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-t5"])
@pytest.mark.parametrize("loop", ["two micro-batches", "bf16"])
def test_a_fake_trace_of_another_model_equals_the_real_one(name: str, loop: str) -> None:
    assert_same(*both(name, **LOOPS[loop]))


def test_a_fake_trace_says_that_it_is_one() -> None:
    trace = record(reference_setup("tiny-llama", options={}))
    assert trace.metadata.source == "fake"
    assert trace.metadata.device == "cuda"
    assert trace.metadata.allocator_rounding_bytes == 512
    assert (trace.storages.allocated_bytes % 512 == 0).all()
    assert any("without a GPU" in text for text in trace.metadata.known_differences)


def test_every_kernel_has_its_call_and_every_call_a_kernel() -> None:
    trace = record(reference_setup("tiny-llama", options={"micro_batches": 2}))
    assert np.array_equal(np.unique(trace.kernels.call), np.arange(len(trace.calls)))
    assert (trace.calls.op[trace.kernels.call] == trace.kernels.op).all()
    assert len(trace.calls) < trace.num_kernels / 4


def test_what_never_ran_takes_no_time_and_times_nothing_for_later_recordings() -> None:
    dispatch_overhead_seconds.cache_clear()
    trace = record(reference_setup("tiny-llama", options={}))
    assert not trace.kernels.duration_seconds.any()
    assert not trace.kernels.gap_before_seconds.any()
    assert dispatch_overhead_seconds.cache_info().currsize == 0


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2", "tiny-t5", "tiny-bert"])
def test_a_traces_flops_are_those_of_the_closed_form(name: str) -> None:
    setup = reference_setup(name, options={"micro_batches": 2, "attention": "math"})
    trace = record(setup)
    traced = int(trace.calls.flops[trace.kernels.call].sum())
    config = model_config(name, attention="math")
    expected = 2 * training_flops(config, setup.micro_batch_size, setup.sequence)
    assert traced == pytest.approx(expected, rel=0.01)


def test_calls_survive_saving(tmp_path: Any) -> None:
    trace = record(reference_setup("tiny-gpt2", options={}))
    trace.save(tmp_path / "t.trace")
    assert Trace.load(tmp_path / "t.trace").calls.equals(trace.calls)


def test_fake_tracing_leaves_torch_as_it_was() -> None:
    precision, grad = torch.get_float32_matmul_precision(), torch.is_grad_enabled()
    record(reference_setup("tiny-llama", options={"dtype": "tf32"}))
    assert torch.get_float32_matmul_precision() == precision
    assert torch.is_grad_enabled() == grad
    assert type(torch.zeros(1)) is torch.Tensor


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "fp8"}, "dtype: 'fp8' is not one of fp32, tf32, bf16"),
        ({"stages": 2, "stage": 2}, "stage: must be in 0..1"),
        ({"micro_batches": 0}, "micro_batches: must be an integer of at least 1"),
        ({"clip_norm": -1.0}, "clip_norm: must be positive"),
        ({"sequence": 0}, "sequence: must be an integer of at least 1"),
        ({"tensor_parallel_rank": 1}, "tensor_parallel_rank: must be in 0..0"),
    ],
)
def test_a_setup_that_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    given = {"model": "tiny-llama", "sequence": 8, "micro_batch_size": 1, **options}
    with pytest.raises(InputError, match=message):
        TrainingSetup(**given)
