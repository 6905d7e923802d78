"""Parallel training in one process: the trace of any rank is that of a real process group's rank.

Run as a script, this file is one rank of a real group: it records and saves its trace.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import distributed

from teraio.errors import InputError, OffloadWarning
from teraio.profiler.fake.recording import record
from teraio.profiler.recorder import Recorder
from teraio.profiler.trace_building import build_trace
from teraio.profiler.training import TrainingSetup, build_training
from teraio.traces.trace import Trace

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="needs torch.distributed")

TINY: dict[str, Any] = {
    "model": "tiny-llama",
    "sequence": 16,
    "micro_batch_size": 2,
    "attention": "sdpa",
}
SOURCE = Path(__file__).resolve().parents[2] / "src"
GLOO_KERNELS = 16
"""Gloo's own thread lets go of what a collective used a few kernels later, as it happens."""
ATTEMPTS = 3


def record_fake(**options: Any) -> Trace:
    return record(TrainingSetup(**TINY | options))


def record_real(folder: Path, ranks: list[dict[str, Any]]) -> list[Trace]:
    """The traces of all ranks of a real group, each of them a process."""
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    setups = [TrainingSetup(**TINY | options) for options in ranks]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder), json.dumps(TINY | options)], env=environment
        )
        for options in ranks
    ]
    try:
        assert [process.wait(timeout=240) for process in processes] == [0] * len(processes)
    finally:
        for process in processes:
            process.kill()
    return [Trace.load(folder / f"{setup.rank}.trace") for setup in setups]


def main(folder: str, options: str) -> None:
    """One rank of a real group."""
    setup = TrainingSetup(**json.loads(options))
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=setup.rank,
        world_size=setup.world_size,
    )
    training = build_training(setup, "cpu")
    recorder = Recorder(device_type="cpu")
    recorder.recording.give_up_workspace()
    recorder.names.add_model(training.model)
    recorder.names.add_optimizer(training.optimizer)
    with recorder:
        for micro_batches in (setup.stages, setup.micro_batches, setup.micro_batches):
            training.run_iteration(micro_batches)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadWarning)
        build_trace(recorder).save(Path(folder) / f"{setup.rank}.trace")
    distributed.destroy_process_group()


def storages_of(trace: Trace, kept: Any) -> tuple[Counter[Any], dict[Any, list[int]]]:
    """All storages by what is known of them, with the kernel after which they die; of those that
    collectives use, that kernel apart.

    ``kept``: bool (K,); other kernels are as if they were not there.
    """
    number = np.cumsum(kept) - 1
    shared = set(trace.kernels.kernel[trace.kernels.group != ""].tolist())
    uses: dict[int, list[int]] = {}
    for kernel, storage in zip(
        trace.accesses.kernel.tolist(), trace.accesses.storage.tolist(), strict=True
    ):
        uses.setdefault(storage, []).append(kernel)
    exact: Counter[Any] = Counter()
    late: dict[Any, list[int]] = {}
    columns = ("birth", "death", "nbytes", "kind", "name", "dtype")
    rows = zip(*(getattr(trace.storages, name).tolist() for name in columns), strict=True)
    for storage, (birth, death, *facts) in enumerate(rows):
        kernels = uses.get(storage, [])
        if kernels and not kept[kernels].any():
            continue
        birth, death = (int(number[k]) if k >= 0 else k for k in (birth, death))
        if death >= 0 and not shared.isdisjoint(kernels):
            late.setdefault((birth, *facts), []).append(death)
        else:
            exact[birth, death, *facts] += 1
    return exact, late


def assert_same(fakes: list[Trace], folder: Path, ranks: list[dict[str, Any]]) -> None:
    """Fake traces of all ranks are those of real processes, which are run again if gloo's threads
    were late: what is late every time was freed too early in the fake.
    """
    latest: dict[Any, int] = {}
    for attempt in range(ATTEMPTS):
        (folder / str(attempt)).mkdir()
        found: dict[Any, int] = {}
        for fake, real in zip(fakes, record_real(folder / str(attempt), ranks), strict=True):
            found |= num_kernels_late(fake, real)
        latest = {key: min(late, latest.get(key, late)) for key, late in found.items()}
        if max(latest.values()) <= GLOO_KERNELS:
            return
    assert {key: late for key, late in latest.items() if late > GLOO_KERNELS} == {}


def num_kernels_late(fake: Trace, real: Trace) -> dict[Any, int]:
    """By how many kernels the storages that collectives use die later than in the fake; all else
    is the same, but for what gloo does where a GPU's library does not.

    It copies the result of a reduce-scatter, as a kernel of its own.
    """
    ops = real.kernels.op
    kept = np.ones(len(ops), dtype=bool)
    for kernel in np.flatnonzero(ops == "c10d._reduce_scatter_base_.default"):
        assert ops[kernel + 1] == "aten.copy_.default"
        kept[kernel + 1] = False
    for column in ("op", "module", "phase", "micro_batch", "signature", "group", "peer_rank"):
        pair = getattr(fake.kernels, column), getattr(real.kernels, column)[kept]
        assert pair[0].tolist() == pair[1].tolist(), column
    assert (fake.metadata.rank, fake.metadata.world_size) == (
        real.metadata.rank,
        real.metadata.world_size,
    )
    exact, late = storages_of(fake, np.ones(len(fake.kernels), dtype=bool))
    real_exact, real_late = storages_of(real, kept)
    assert exact == real_exact
    assert late.keys() == real_late.keys()
    return {
        # Into the next iteration, as it may happen.
        (fake.metadata.rank, *facts, number): (real_death - death) % len(fake.kernels)
        for facts, deaths in late.items()
        for number, (death, real_death) in enumerate(
            zip(sorted(deaths), sorted(real_late[facts]), strict=True)
        )
    }


def test_pipeline_equals_two_real_processes(tmp_path: Path) -> None:
    ranks = [{"stages": 2, "stage": stage, "micro_batches": 4} for stage in range(2)]
    assert_same([record_fake(**options) for options in ranks], tmp_path, ranks)


@pytest.mark.parametrize("parallel", ["tensor_parallel", "data_parallel"])
def test_shards_equal_two_real_processes(parallel: str, tmp_path: Path) -> None:
    ranks = [{parallel: 2, f"{parallel}_rank": rank, "micro_batches": 2} for rank in range(2)]
    fakes = [record_fake(**options) for options in ranks]
    assert_same(fakes, tmp_path, ranks)
    for fake in fakes:
        assert np.count_nonzero(fake.storages.kind == "parameter") == 30


@pytest.mark.parametrize("stage", range(4))
def test_every_micro_batch_of_a_pipeline_has_its_kernels(stage: int) -> None:
    count = 6
    trace = record_fake(stages=4, stage=stage, micro_batches=count, model=four_layers())
    kernels = trace.kernels
    assert (trace.metadata.rank, trace.metadata.world_size) == (stage, 4)
    assert trace.metadata.micro_batches == count
    forward, backward = (
        np.bincount(kernels.micro_batch[kernels.phase == phase], minlength=count)
        for phase in ("forward", "backward")
    )
    assert (forward == forward[0]).all()
    # Gradients are born with micro-batch 0; the others add to them.
    parameters = np.count_nonzero(trace.storages.kind == "parameter")
    assert (backward[1:] == backward[0] + parameters).all()
    assert passes(trace) == one_forward_one_backward(stages=4, stage=stage, count=count)
    assert transfers(trace) == expected_transfers(stages=4, stage=stage, count=count)


def four_layers() -> Any:
    from teraio.profiler.models import model_config

    return model_config("tiny-llama", layers=4)


def passes(trace: Trace) -> list[tuple[str, int]]:
    """(phase, micro-batch) of every run of kernels inside modules."""
    kernels = trace.kernels
    result: list[tuple[str, int]] = []
    for phase, micro_batch, module in zip(
        kernels.phase.tolist(), kernels.micro_batch.tolist(), kernels.module.tolist(), strict=True
    ):
        if module and phase in ("forward", "backward") and result[-1:] != [(phase, micro_batch)]:
            result.append((phase, micro_batch))
    return result


def one_forward_one_backward(stages: int, stage: int, count: int) -> list[tuple[str, int]]:
    warmup = min(count, stages - stage)
    order = [("forward", chunk) for chunk in range(warmup)]
    for chunk in range(count):
        order.append(("backward", chunk))
        if warmup + chunk < count:
            order.append(("forward", warmup + chunk))
    return order


def transfers(trace: Trace) -> Counter[tuple[str, str, int, int]]:
    """How often each (operator, phase, micro-batch, peer) sends or receives."""
    kernels = trace.kernels
    return Counter(
        (
            str(kernels.op[kernel]).split(".")[1],
            str(kernels.phase[kernel]),
            int(kernels.micro_batch[kernel]),
            int(kernels.peer_rank[kernel]),
        )
        for kernel in np.flatnonzero(kernels.group != "")
    )


def expected_transfers(stages: int, stage: int, count: int) -> Counter[tuple[str, str, int, int]]:
    expected: Counter[tuple[str, str, int, int]] = Counter()
    for chunk in range(count):
        if stage > 0:
            expected["recv_", "forward", chunk, stage - 1] += 1
            expected["send", "backward", chunk, stage - 1] += 1
        if stage < stages - 1:
            expected["send", "forward", chunk, stage + 1] += 1
            expected["recv_", "backward", chunk, stage + 1] += 1
    return expected


def test_all_kinds_of_parallelism_go_together() -> None:
    together = {"stages": 2, "tensor_parallel": 2, "data_parallel": 2}
    trace = record_fake(**together, stage=1, data_parallel_rank=1, micro_batches=2, dtype="bf16")
    assert (trace.metadata.rank, trace.metadata.world_size) == (6, 8)
    whole = record_fake(stages=2, stage=1, micro_batches=2, dtype="bf16")
    sizes = [t.storages.nbytes[t.storages.kind == "parameter"].sum() for t in (trace, whole)]
    # Cut in two twice, but for the norms, which tensor parallelism leaves whole.
    assert sizes[1] / 4 < sizes[0] < sizes[1] / 3.9


def test_each_rank_talks_to_its_own_groups_after_another_was_traced() -> None:
    """PyTorch takes the meshes of two ranks for equal, and remembers what it did with the first."""
    report_uncaught = sys.excepthook
    together = {"tensor_parallel": 2, "data_parallel": 2}
    traces = [record_fake(**together, data_parallel_rank=rank) for rank in range(2)]
    ops = [trace.kernels.op.tolist() for trace in traces]
    assert any("all_reduce" in op for op in ops[0])
    assert ops[0] == ops[1]
    assert sys.excepthook is report_uncaught


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 2, "micro_batches": 1}, "micro_batches: 1F1B needs at least as many"),
        ({"tensor_parallel": 3}, "tensor_parallel: 3 ranks cannot share 4 heads equally"),
        ({"tensor_parallel": 2, "model": "tiny-gpt2"}, "tensor_parallel: only a Llama"),
    ],
)
def test_what_cannot_be_cut_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        record_fake(**options)
    assert not distributed.is_initialized()


def test_a_group_in_use_is_left_alone(tmp_path: Path) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        with pytest.raises(InputError, match="initialised already"):
            record_fake(stages=2, micro_batches=2)
        assert distributed.is_initialized()
        with pytest.raises(InputError, match="the setup is rank 0 of 2"):
            build_training(TrainingSetup(**TINY, stages=2, micro_batches=2))
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
