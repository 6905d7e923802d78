"""The commands that lead to PyTorch, with what they call replaced: what goes in and what comes out.

The parts behind them have their own tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result

from teraio.contracts.hardware import Hardware, Slowdown
from teraio.contracts.plan import Plan
from teraio.traces.trace import Trace

pytest.importorskip("torch", reason="profiler and executor need torch")

from teraio.executor import Measurements
from teraio.executor.probing.fitting import KINDS, Fit, Timing
from teraio.executor.probing.limits import Limits
from teraio.executor.probing.measurements import MeasuredPath
from teraio.executor.probing.sustained import SustainedWrites


@pytest.fixture
def calls(
    monkeypatch: pytest.MonkeyPatch, small_trace: Trace
) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """What the commands call, in order; profiler, executor and Plan.load are replaced."""
    seen: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    report = SimpleNamespace(
        steps=5,
        measured_seconds=0.25,
        peak_bytes=10**9,
        budget_bytes=2 * 10**9,
        reserved_bytes=0,
        relocated_bytes=0,
        host_lead_seconds=0.25,
        warm_up_steps=1,
        drift=2,
        first_drift="kernel 4 is aten.relu, not aten.gelu",
        moves_planned=40,
        moves_found=39,
        substituted_kernels=6,
        first_substituted="kernel 3: aten.flash instead of aten.efficient",
        demand_fetches=3,
        demand_fetch_bytes=10**6,
        evictions=0,
        eviction_bytes=0,
        ssd_files=(),
        verified_reads=0,
        timeline=None,
    )
    answers = {
        "teraio.profiler.profile_script": small_trace,
        "teraio.profiler.profile_model": small_trace,
        "teraio.executor.run_script": report,
        "teraio.executor.measure_machine": measured_h200(),
    }

    def replacement(name: str, answer: Any) -> Callable[..., Any]:
        def call(*positional: Any, **named: Any) -> Any:
            print("the script says hello")
            seen.append((name.rpartition(".")[2], positional, named))
            return answer

        return call

    for name, answer in answers.items():
        monkeypatch.setattr(name, replacement(name, answer), raising=False)
    monkeypatch.setattr(
        Plan, "load", lambda path: SimpleNamespace(predicted_seconds=0.2, kernels=[0] * 7)
    )
    return seen


def test_profile_passes_script_and_its_arguments_on(
    folder: Path, calls: list[Any], teraio_json: Callable[..., Any]
) -> None:
    result = teraio_json("profile", "-o", "t.trace", "--json", "train.py", "--json", "-o", "mine")
    assert result["kernels"] == 7
    ((name, positional, _),) = calls
    assert (name, positional[0], list(positional[1])) == (
        "profile_script",
        Path("train.py"),
        ["--json", "-o", "mine", "--json"],
    )
    assert Trace.load(folder / "t.trace").num_kernels == 7


def test_profile_of_a_reference_model(
    folder: Path, calls: list[Any], teraio: Callable[..., Result]
) -> None:
    result = teraio("profile", "-o", "t.trace", "--model", "bench-0.7b", "--steps", "3")
    assert result.exit_code == 0, result.output
    assert calls == [("profile_model", ("bench-0.7b",), {"steps": 3, "progress": None})]
    assert "ideal iteration" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "either a SCRIPT or --model NAME"),
        (("--model", "gpt2", "train.py"), "either a SCRIPT or --model NAME"),
        (("--steps", "3", "train.py"), "--steps goes with --model"),
    ],
)
def test_profile_wants_one_thing_to_record(
    words: tuple[str, ...], message: str, folder: Path, teraio: Callable[..., Result]
) -> None:
    result = teraio("profile", "-o", "t.trace", *words)
    assert result.exit_code == 2
    assert message in result.stderr


def test_run_passes_budgets_script_and_arguments_on(
    folder: Path, calls: list[Any], teraio: Callable[..., Result]
) -> None:
    options = ("--gpu-memory", "8GB", "--ssd-path", "/mnt", "--on-drift", "stop")
    result = teraio("run", *options, "p.plan", "train.py", "--gpu-memory", "1GB")
    assert result.exit_code == 0, result.output
    ((name, (_, script, arguments), named),) = calls
    assert (name, script, list(arguments)) == (
        "run_script",
        Path("train.py"),
        ["--gpu-memory", "1GB"],
    )
    assert named == {
        "gpu_memory": 8 * 10**9,
        "host_memory": None,
        "ssd_path": (Path("/mnt"),),
        "ssd_backend": "auto",
        "verify_transfers": False,
        "on_drift": "stop",
        "device": None,
    }
    assert "the script says hello" in result.stdout
    for text in ("predicted iteration", "1.00 GB of 2.00 GB", "kernel 4 is aten.relu", "39 of 40"):
        assert text in result.stdout


def test_run_with_json_keeps_the_output_of_the_script_away(
    folder: Path, calls: list[Any], teraio: Callable[..., Result]
) -> None:
    result = teraio("run", "--json", "p.plan", "train.py")
    assert "hello" not in result.stdout
    assert "the script says hello" in result.stderr


def test_run_reports_what_was_promised(
    folder: Path, calls: list[Any], teraio: Callable[..., Result]
) -> None:
    data = json.loads(teraio("run", "--json", "p.plan", "train.py").stdout)
    assert (data["steps"], data["measured_seconds"], data["peak_bytes"]) == (5, 0.25, 10**9)
    assert (data["drift"], data["demand_fetches"], data["predicted_seconds"]) == (2, 3, 0.2)
    found = data["moves_planned"], data["moves_found"], data["substituted_kernels"]
    assert found == (40, 39, 6)
    assert data["host_lead_seconds"] == 0.25


def measured_h200() -> Measurements:
    """A probe that found the preset's rates, with 1 MiB copies slower than fitted."""
    timings = [Timing(kind, 2**20, 2**20 / 31e9) for kind in KINDS]
    fit = Fit(55e9, 55e9, 49e9, 49e9, 10e-6)
    return Measurements(
        hardware=Hardware.preset("h200"),
        paths=(MeasuredPath("host", "memory", 0, tuple(timings), fit),),
        slowdowns={"bf16 matmul": Slowdown(read=1.03, both=1.04)},
        sustained=(
            SustainedWrites("ssd", (1.0, 2.0, 6.0), (4 * 10**9, 8 * 10**9, 10**10), steady_from=2),
        ),
        together=None,
        limits=Limits(10**11, 2 * 10**11, 10**11, 8 * 2**20),
        notes=("ssd is warm.",),
    )


def test_probe_writes_a_file_that_hardware_takes(
    folder: Path, calls: list[Any], teraio_json: Callable[..., Any]
) -> None:
    data = teraio_json("probe", "-o", "hardware.toml", "--quick")
    assert data["gpu"][0]["memory_bytes"] == 141 * 10**9
    assert calls[0][2]["quick"] is True
    assert Hardware.load(folder / "hardware.toml") == Hardware.preset("h200")
    assert len(data["rates"]["rows"]) == 4
    assert data["notes"] == ["ssd is warm."]


def test_probe_passes_its_options_on(
    folder: Path, calls: list[Any], teraio_json: Callable[..., Any]
) -> None:
    directories = ("--directory", str(folder), "--directory", str(folder.parent), "--stripe")
    others = ("--sizes", "1MiB,64MB", "--sustained", "5", "--host-memory", "16GB")
    teraio_json("probe", "--device", "cuda", *directories, *others, "--plot", "p.png")
    assert calls[0][2] == {
        "device": "cuda",
        "directory": (folder, folder.parent),
        "stripe": True,
        "quick": False,
        "sizes": (2**20, 64 * 10**6),
        "sustained": 5.0,
        "host_memory": 16 * 10**9,
        "progress": None,
    }
    assert (folder / "p.png").stat().st_size > 0


def test_probe_refuses_sizes_that_are_none(folder: Path, teraio: Callable[..., Result]) -> None:
    result = teraio("probe", "--sizes", "1MiB,small")
    assert result.exit_code == 2
    assert "small" in result.stderr


def test_probe_for_people(folder: Path, calls: list[Any], teraio: Callable[..., Result]) -> None:
    result = teraio("probe")
    assert result.exit_code == 0
    assert "55.0 GB/s / 55.0 GB/s" in result.stdout
    assert "not saved (no -o)" in result.stdout
    for text in (
        "host, through memory: latency + bytes / rate is off by 10.6 %",
        "at most 14.1 % (read, 1.05 MB)",
        "31.0 GB/s / 31.0 GB/s",
        "x 1.030",
        "ssd written for 6 s (10.0 GB)",
        "500 MB/s in the long run",
        "locked memory (ulimit -l): 8.39 MB",
        "ssd is warm.",
    ):
        assert text in result.stdout
