"""``teraio time``: what it writes, what it says, and that a second run has nothing left to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from teraio.contracts.table import MISSING
from teraio.traces.trace import Calls, Trace

pytest.importorskip("torch", reason="timing needs torch")

TENSOR = '{"tensor":["float32",[32,32],[32,1],%d]}'
PRODUCT = '{"args":[' + TENSOR % 0 + "," + TENSOR % 1 + '],"kwargs":{}}'


@pytest.fixture
def trace_file(small_trace: Trace, tmp_path: Path) -> Path:
    """The small trace with two calls that a CPU can run and one that nobody can."""
    calls = Calls.from_rows(
        [
            (0, "aten.mm.default", PRODUCT, 2 * 32**3, 8192, 4096),
            (1, "aten.add.Tensor", PRODUCT, 0, 8192, 4096),
            (2, "c10d.barrier.default", '{"args":[{"opaque":"Group"}],"kwargs":{}}', 0, 0, 0),
        ]
    )
    call = np.array([0, 1, 2, MISSING, 0, 1, 1])
    op = np.where(call == MISSING, small_trace.kernels.op, calls.op[call])
    path = tmp_path / "small.trace"
    kernels = replace(small_trace.kernels, call=call, op=op)
    replace(small_trace, kernels=kernels, calls=calls).save(path)
    return path


untimed_is_told = pytest.mark.filterwarnings("default::teraio.errors.OffloadWarning")


@untimed_is_told
def test_every_call_is_timed_once(
    teraio_json: Callable[..., Any], trace_file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "cpu.timings"
    command = ("time", str(trace_file), "--device", "cpu", "-o", str(output))
    first = teraio_json(*command)
    assert first["seconds"] > 0
    assert first["file"] == str(output)
    assert first["precision"] == "fp32"
    expected = {"signatures": 3, "timed": 2, "reused": 0, "failed": 1}
    assert {name: first[name] for name in expected} == expected
    before = json.loads(output.read_text())["entries"]
    second = teraio_json(*command)
    assert (second["timed"], second["reused"], second["failed"]) == (0, 2, 1)
    assert json.loads(output.read_text())["entries"] == before


@untimed_is_told
def test_what_was_not_timed_is_told(
    teraio: Callable[..., Result], trace_file: Path, tmp_path: Path
) -> None:
    result = teraio("time", str(trace_file), "--device", "cpu", "-o", str(tmp_path / "x.timings"))
    assert "c10d.barrier.default" in result.stderr
    assert "distinct calls" in result.stdout


def test_faults_are_named_before_anything_is_timed(
    teraio: Callable[..., Result], trace_file: Path, tmp_path: Path, small_trace: Trace
) -> None:
    output = tmp_path / "x.timings"
    plain = tmp_path / "plain.trace"
    small_trace.save(plain)
    foreign = tmp_path / "notes.txt"
    foreign.write_text("mine")
    for arguments, message in (
        ((plain, "-o", output, "--device", "cpu"), "describes no calls"),
        ((trace_file, "-o", output, "--device", "tpu"), "device: 'tpu'"),
        ((trace_file, "-o", output, "--device", "cpu", "--precision", "int8"), "precision: 'int8'"),
        ((trace_file, "-o", foreign, "--device", "cpu"), "was not written by teraio"),
    ):
        result = teraio("time", *map(str, arguments))
        assert result.exit_code == 2
        assert message in result.stderr
    assert not output.exists()
    assert foreign.read_text() == "mine"
