"""Kernels, storages and accesses of a two-layer perceptron, checked by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from teraio.profiler import profile
from teraio.traces.trace import Trace

BATCH, INPUTS, HIDDEN, OUTPUTS = 3, 5, 7, 2


class Perceptron(nn.Module):
    """linear -> batch norm -> relu -> linear, mean of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, HIDDEN)
        self.norm = nn.BatchNorm1d(HIDDEN)
        self.second = nn.Linear(HIDDEN, OUTPUTS)
        self.unused = nn.Parameter(torch.zeros(11))

    def forward(self, x: Any) -> Any:
        return self.second(torch.relu(self.norm(self.first(x)))).square().mean()


@pytest.fixture(scope="module")
def trace() -> Trace:
    torch.manual_seed(0)
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    with profile(model, optimizer) as session:
        while not session.done:
            model(torch.randn(BATCH, INPUTS)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return session.trace


@pytest.fixture(scope="module")
def kernels(trace: Trace) -> pd.DataFrame:
    return trace.kernels.to_pandas()


@pytest.fixture(scope="module")
def storages(trace: Trace) -> pd.DataFrame:
    return trace.storages.to_pandas()


def test_kernels_phases_and_modules(kernels: pd.DataFrame) -> None:
    """Backward kernels bear the module of their forward."""
    seen = list(zip(kernels.op.str.split(".").str[1], kernels.phase, kernels.module, strict=True))
    assert seen[:15] == [
        ("randn", "other", ""),
        ("addmm", "forward", "first"),
        ("add_", "forward", "norm"),
        ("empty", "forward", "norm"),
        ("native_batch_norm", "forward", "norm"),
        ("relu", "forward", ""),
        ("addmm", "forward", "second"),
        ("pow", "forward", ""),
        ("mean", "forward", ""),
        ("ones_like", "forward", ""),
        ("div", "backward", ""),
        ("pow", "backward", ""),
        ("mul", "backward", ""),
        ("mul", "backward", ""),
        ("mm", "backward", "second"),
    ]
    backward = kernels[kernels.phase == "backward"]
    assert set(backward.module) == {"", "first", "norm", "second"}
    after = kernels[kernels.kernel > backward.kernel.max()]
    assert set(after.phase) == {"optimizer"}
    assert after.micro_batch.isna().all()
    assert (kernels.micro_batch[kernels.phase != "optimizer"].dropna() == 0).all()


def test_names_and_kinds_of_persistent_storages(storages: pd.DataFrame) -> None:
    persistent = storages[storages.birth.isna()]
    by_kind = persistent.groupby("kind").name.apply(set).to_dict()
    trained = [f"{m}.{p}" for m in ("first", "norm", "second") for p in ("weight", "bias")]
    running = ("running_mean", "running_var", "num_batches_tracked")
    assert by_kind == {
        "parameter": {*trained, "unused"},
        "buffer": {f"norm.{name}" for name in running},
        "optimizer_state": {
            f"{name}.{key}" for name in trained for key in ("step", "exp_avg", "exp_avg_sq")
        },
    }
    assert persistent.set_index("name").nbytes["first.weight"] == INPUTS * HIDDEN * 4
    assert persistent.set_index("name").dtype["norm.num_batches_tracked"] == "int64"


def test_kinds_of_short_lived_storages(kernels: pd.DataFrame, storages: pd.DataFrame) -> None:
    born = storages[storages.birth.notna()]
    op = kernels.op.str.split(".").str[1].to_numpy()[born.birth.to_numpy(dtype=int)]
    phase = kernels.phase.to_numpy()[born.birth.to_numpy(dtype=int)]
    kind = born.kind.to_numpy()
    assert set(kind[op == "randn"]) == {"input"}
    assert set(kind[(phase == "forward") & (op == "relu")]) == {"activation"}
    assert "activation" not in set(kind[phase != "forward"])
    assert set(kind[phase == "optimizer"]) == {"temporary"}
    gradients = born[born.kind == "gradient"]
    assert set(gradients.name) == {
        f"{m}.{p}.grad" for m in ("first", "norm", "second") for p in ("weight", "bias")
    }
    assert (gradients.death == len(kernels) - 1).all()


def test_accesses_say_who_reads_and_writes(trace: Trace) -> None:
    names = trace.storages.name
    accesses = trace.accesses
    relu = int(np.flatnonzero(trace.kernels.op == "aten.relu.default")[0])
    rows = accesses.take(accesses.kernel == relu)
    assert rows.reads.tolist() == [True, False]
    assert rows.writes.tolist() == [False, True]
    first = accesses.take(accesses.kernel == 1)
    flags = {
        names[s]: (r, w) for s, r, w in zip(first.storage, first.reads, first.writes, strict=True)
    }
    assert flags["first.bias"] == (True, False)
    assert flags["first.weight"] == (True, False)  # through its transposed view
    (add,) = np.flatnonzero(trace.kernels.op == "aten.add_.Tensor")
    counter = accesses.take(accesses.kernel == add)
    assert names[counter.storage[0]] == "norm.num_batches_tracked"
    assert counter.reads[0]
    assert counter.writes[0]


def test_rows_of_a_kernel_stand_in_the_order_of_its_arguments(trace: Trace) -> None:
    """A view taken since the last kernel comes first, then arguments, then what is born."""
    first = trace.accesses.take(trace.accesses.kernel == 1)
    names = trace.storages.name[first.storage].tolist()
    assert names[:2] == ["first.weight", "first.bias"]
    assert trace.storages.birth[first.storage].tolist() == [-1, -1, 0, 1]


def test_what_nobody_uses_is_there_all_the_same(trace: Trace) -> None:
    (unused,) = np.flatnonzero(trace.storages.name == "unused")
    assert trace.is_persistent[unused]
    assert not (trace.accesses.storage == unused).any()


def test_metadata(trace: Trace) -> None:
    metadata = trace.metadata
    assert (metadata.source, metadata.device, metadata.model) == ("measured", "cpu", "Perceptron")
    assert (metadata.optimizer, metadata.optimizer_implementation) == ("AdamW", "foreach")
    assert (metadata.optimizer_steps, metadata.micro_batches, metadata.world_size) == (1, 1, 1)
    assert metadata.torch_version == torch.__version__


def test_unnamed_persistent_storages_are_named_by_their_first_access() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch, target = torch.randn(2, 4), torch.randn(2, 4)
    with profile(model, optimizer) as session:
        while not session.done:
            (model(batch) - target).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    trace = session.trace
    inputs = np.flatnonzero(trace.storages.kind == "input")
    assert trace.is_persistent[inputs].all()
    for row in inputs:
        kernel = int(trace.accesses.kernel[trace.accesses.storage == row].min())
        position = trace.accesses.storage[trace.accesses.kernel == kernel].tolist().index(row)
        assert trace.storages.name[row] == f"unnamed:{kernel}.{position}"


def test_workspace_is_what_an_operator_allocates_beyond_its_outputs() -> None:
    """Sorting needs a line of scratch per element of the sorted dimension; adding needs none."""
    model = nn.Embedding(64, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(64, (128,))
    with profile(model, optimizer) as session:
        while not session.done:
            values, _ = torch.sort(model(tokens), dim=0)
            (values + values).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    kernels = session.trace.kernels
    workspace = dict(zip(kernels.op.tolist(), kernels.workspace_bytes.tolist(), strict=True))
    assert workspace["aten.add.Tensor"] == 0
    assert 128 <= workspace["aten.sort.default"] <= 128 * 64


def test_times_are_positive_and_add_up() -> None:
    model = nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with profile(model, optimizer) as session:
        while not session.done:
            model(torch.randn(512, 256)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    kernels = session.trace.kernels
    by_op = dict(zip(kernels.op.tolist(), kernels.duration_seconds.tolist(), strict=True))
    assert by_op["aten.addmm.default"] > by_op["aten.ones_like.default"] > 0
    assert 0 < session.trace.ideal_seconds < 1
