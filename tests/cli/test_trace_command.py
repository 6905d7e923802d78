"""``teraio trace``: what it writes and says, and the one line that broken inputs get."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from teraio.traces.trace import Trace

pytest.importorskip("torch", reason="tracing needs torch")

Run = Callable[..., Result]

OWN = """
import sys

import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.gate = Gate()
    def forward(self, tokens, targets):
        return self.gate(self.embedding(tokens)).mean()

class Gate(nn.Module):
    def forward(self, x):
        return x * self.scale(x)
    def scale(self, x):
        return 2.0

class Asking(Gate):
    def scale(self, x):
        return x.sum().item()

class Selecting(Gate):
    def scale(self, x):
        return x[x > 0].sum()

class Failing(Gate):
    def scale(self, x):
        raise LookupError("my own mistake")

def net(gate):
    made = Net()
    made.gate = gate
    return made

def plain(): return Net()
def asking(): return net(Asking())
def selecting(): return net(Selecting())
def failing(): return net(Failing())
def leaving(): sys.exit(0)
"""


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, with ``my_nets.py`` in it."""
    (folder / "my_nets.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    yield folder
    sys.modules.pop("my_nets", None)


def test_trace_writes_a_trace_and_says_what_it_is(
    folder: Path, teraio_json: Callable[..., Any]
) -> None:
    data = teraio_json("trace", "tiny-llama", "-o", "t.trace", "--micro-batches", "2")
    saved = Trace.load(folder / "t.trace")
    assert data["kernels"] == saved.num_kernels
    assert data["storages"] == len(saved.storages)
    assert data["accesses"] == len(saved.accesses)
    assert data["ideal_seconds"] == pytest.approx(saved.ideal_seconds)
    assert data["peak_live_bytes"] == saved.peak_live_bytes
    assert data["file"] == "t.trace"
    assert data["notes"] == saved.metadata.known_differences
    assert any("without a GPU" in note for note in data["notes"])
    assert any(note.startswith("times: ") for note in data["notes"])
    assert saved.metadata.precision == "fp32"
    assert saved.metadata.micro_batches == 2


def test_trace_for_people_shows_the_notes(folder: Path, teraio: Run) -> None:
    result = teraio("trace", "tiny-gpt2", "-o", "t.trace", "--sequence", "16")
    assert result.exit_code == 0, result.output
    assert "ideal iteration" in result.stdout
    assert "traced without a GPU" in result.stdout
    assert "roofline of h100-nvl" in " ".join(result.stdout.split())


def test_ones_own_model_of_this_directory(here: Path, teraio_json: Callable[..., Any]) -> None:
    words = ("--sequence", "4", "--micro-batches", "9", "-o", "own.trace")
    data = teraio_json("trace", "my_nets:plain", *words)
    saved = Trace.load(here / "own.trace")
    assert saved.metadata.model == "my_nets:plain"
    assert saved.metadata.micro_batches == 9
    assert "embedding.weight" in saved.storages.name.tolist()
    assert data["kernels"] == saved.num_kernels


def test_assumed_scalars_are_noted(here: Path, teraio_json: Callable[..., Any]) -> None:
    words = ("--sequence", "4", "-o", "own.trace", "--assume-scalars")
    notes = teraio_json("trace", "my_nets:asking", *words)["notes"]
    assert any("_local_scalar_dense.default in gate (forward, my_nets.py:" in n for n in notes)


def test_a_saved_trace_gets_the_times_of_another_gpu(
    folder: Path, teraio: Run, teraio_json: Callable[..., Any]
) -> None:
    first = teraio_json("trace", "tiny-llama", "-o", "a.trace")
    again = teraio_json("trace", "a.trace", "-o", "b.trace", "--gpu", "rtx4090", "--dtype", "tf32")
    a, b = Trace.load(folder / "a.trace"), Trace.load(folder / "b.trace")
    assert again["ideal_seconds"] > first["ideal_seconds"]
    everything = np.arange(len(a.storages) - 1)  # but what the GPU's libraries keep
    assert a.storages.take(everything).equals(b.storages.take(everything))
    assert a.kernels.op.tolist() == b.kernels.op.tolist()
    (times,) = (note for note in again["notes"] if note.startswith("times: "))
    assert "rtx4090" in times
    assert b.metadata.precision == "tf32"
    teraio_json("trace", "b.trace", "-o", "c.trace", "--gpu", "h100-nvl")
    assert Trace.load(folder / "c.trace").metadata.precision == "tf32"


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--stages", "2"), [(0, 0, 0), (1, 0, 0)]),
        (("--data-parallel", "2"), [(0, 0, 0), (0, 1, 0)]),
    ],
)
def test_every_rank_gets_a_trace(
    folder: Path,
    teraio_json: Callable[..., Any],
    options: tuple[str, ...],
    parts: list[tuple[int, int, int]],
) -> None:
    words = ("trace", "tiny-llama", "-o", "t.trace", "--micro-batches", "2", "--every-rank")
    rows = teraio_json(*words, *options)["rows"]
    names = ("stage", "data_parallel_rank", "tensor_parallel_rank")
    assert [tuple(row[name] for name in names) for row in rows] == parts
    assert not (folder / "t.trace").exists()
    for rank, row in enumerate(rows):
        saved = Trace.load(folder / f"t.rank{rank}.trace")
        assert row["rank"] == saved.metadata.rank == rank
        assert saved.metadata.world_size == len(parts)
        assert row["kernels"] == saved.num_kernels


def test_every_rank_for_people(folder: Path, teraio: Run) -> None:
    result = teraio("trace", "tiny-llama", "-o", "t.trace", "--every-rank")
    assert result.exit_code == 0, result.output
    assert "t.rank0.trace" in result.stdout


# Broken inputs --------------------------------------------------------------------------------

NOT_A_REFERENCE = ("--sequence", "4")

BROKEN: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "unknown model": (("llama9",), ("model llama9: unknown", "MODULE:FUNCTION")),
    "unknown module": (("nowhere:make", *NOT_A_REFERENCE), ("no module nowhere",)),
    "unknown function": (("my_nets:other", *NOT_A_REFERENCE), ("my_nets has no 'other'",)),
    "no sequence": (("my_nets:plain",), ("sequence: is missing (--sequence)",)),
    "a value is needed": (
        ("my_nets:asking", *NOT_A_REFERENCE),
        ("aten._local_scalar_dense.default in gate (forward, my_nets.py:", "--assume-scalars"),
    ),
    "a shape depends on values": (
        ("my_nets:selecting", *NOT_A_REFERENCE, "--assume-scalars"),
        ("aten.index.Tensor in gate (forward, my_nets.py:", "teraio profile"),
    ),
    "code that ends the process": (
        ("my_nets:leaving", *NOT_A_REFERENCE),
        ("model my_nets:leaving: its code ends the process (sys.exit(0))",),
    ),
    "unknown GPU": (("tiny-llama", "--gpu", "abacus"), ("gpu: 'abacus' is not one of",)),
    "unknown precision": (("tiny-llama", "--dtype", "fp8"), ("dtype: 'fp8' is not one of",)),
    "unknown attention": (("tiny-llama", "--attention", "x"), ("attention: 'x' is not one of",)),
    "no such timings": (("tiny-llama", "--timings", "no.json"), ("no.json: cannot be read",)),
    "too long": (("tiny-gpt2", "--sequence", "65"), ("64 positions, got 65",)),
    "stage out of range": (
        ("tiny-llama", "--stages", "2", "--stage", "2"),
        ("stage: must be in 0..1",),
    ),
    "more stages than layers": (
        ("tiny-llama", "--stages", "5", "--micro-batches", "5"),
        ("stages: 5 are more than the model's 3 layers",),
    ),
    "fewer micro-batches than stages": (
        ("tiny-llama", "--stages", "2"),
        ("micro_batches: 1F1B needs at least as many",),
    ),
    "heads that cannot be shared": (
        ("tiny-llama", "--tensor-parallel", "3"),
        ("tensor_parallel: 3 ranks cannot share 4 heads",),
    ),
    "every rank and one": (
        ("tiny-llama", "--stages", "2", "--stage", "1", "--every-rank"),
        ("stage: does not go with --every-rank",),
    ),
    "missing trace": (("no.trace",), ("no.trace",)),
    "a trace without calls": (("small.trace",), ("calls are missing",)),
    "a trace and a stage": (
        ("small.trace", "--stage", "0"),
        ("stage: small.trace is recorded already",),
    ),
    "a trace in bf16": (
        ("small.trace", "--dtype", "bf16"),
        ("dtype: small.trace was recorded in fp32", "trace the model again"),
    ),
    "every rank of a trace": (("small.trace", "--every-rank"), ("recorded already",)),
}


@pytest.mark.parametrize(("words", "parts"), BROKEN.values(), ids=BROKEN)
def test_a_broken_input_gets_one_line_and_leaves_nothing(
    here: Path, teraio: Run, words: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    before = {path for path in here.rglob("*") if "__pycache__" not in path.parts}
    result = teraio("trace", *words, "-o", "new.trace")
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("teraio: error: ")
    for part in parts:
        assert part in line
    assert {path for path in here.rglob("*") if "__pycache__" not in path.parts} == before


def test_an_error_is_an_object_too(folder: Path, teraio_json: Callable[..., Any]) -> None:
    data = teraio_json("trace", "llama9", "-o", "new.trace", exit_code=2)
    assert list(data) == ["error"]


def test_a_trace_is_not_written_over_itself(folder: Path, teraio: Run) -> None:
    result = teraio("trace", "small.trace", "-o", "small.trace")
    assert result.exit_code == 2
    assert "both an input and an output" in result.stderr


def test_ones_own_mistakes_stay_as_they_are(here: Path, teraio: Run) -> None:
    result = teraio("trace", "my_nets:failing", "--sequence", "4", "-o", "new.trace")
    assert isinstance(result.exception, LookupError)
    assert str(result.exception) == "my own mistake"
    assert not (here / "new.trace").exists()
