"""Traces and plans of several ranks on the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from teraio.contracts.plan import Plan
from teraio.traces.trace import Trace


@pytest.fixture
def ranks(folder: Path, small_trace: Trace) -> list[str]:
    """Names of the traces of two ranks."""
    names = []
    for rank in range(2):
        metadata = replace(small_trace.metadata, rank=rank, world_size=2)
        replace(small_trace, metadata=metadata).save(folder / f"t.rank{rank}.trace")
        names.append(f"t.rank{rank}.trace")
    return names


def test_plan_writes_one_plan_for_each_rank(
    folder: Path, ranks: list[str], teraio_json: Callable[..., Any]
) -> None:
    options = ("--hardware", "h200", "--planner", "greedy", "--gpu-memory", "120MB")
    data = teraio_json("plan", *ranks, *options, "--host-memory", "1GB", "-o", "p.plan")
    assert [(row["rank"], row["file"]) for row in data["rows"]] == [
        (0, "p.rank0.plan"),
        (1, "p.rank1.plan"),
    ]
    assert data["predicted_seconds"] == max(row["predicted_seconds"] for row in data["rows"])
    for rank in range(2):
        metadata = Plan.load(folder / f"p.rank{rank}.plan").metadata
        assert (metadata.rank, metadata.world_size) == (rank, 2)
        assert metadata.host_memory_bytes == 500_000_000 // 512 * 512
    teraio_json("plan", *ranks, *options, "-o", "p.{rank}.plan")
    assert (folder / "p.1.plan").is_dir()


def test_plan_shows_a_table_of_ranks(ranks: list[str], teraio: Callable[..., Result]) -> None:
    result = teraio("plan", *ranks, "--hardware", "h200", "--planner", "greedy")
    assert result.exit_code == 0, result.output
    assert "not saved" in result.output
    assert "plans of ranks" in result.output


def test_plan_refuses_to_replace_one_of_its_traces(
    ranks: list[str], teraio: Callable[..., Result]
) -> None:
    result = teraio("plan", *ranks, "--hardware", "h200", "-o", "t.trace")
    assert result.exit_code == 2
    assert "t.rank0.trace: is both an input and an output" in result.output


def test_profile_writes_the_trace_of_its_rank(
    folder: Path,
    small_trace: Trace,
    teraio_json: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch", reason="the profiler needs torch")
    metadata = replace(small_trace.metadata, rank=1, world_size=2)
    trace = replace(small_trace, metadata=metadata)
    monkeypatch.setattr("teraio.profiler.profile_script", lambda *_, **__: trace, raising=False)
    for output, file in (("x.trace", "x.rank1.trace"), ("{rank}-x.trace", "1-x.trace")):
        assert teraio_json("profile", "--json", "-o", output, "train.py")["file"] == file
    assert Trace.load(folder / "x.rank1.trace").metadata.rank == 1


def test_run_takes_the_plan_of_its_rank(
    ranks: list[str], teraio: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="the executor needs torch")
    options = ("--hardware", "h200", "--planner", "greedy", "-o", "p.plan")
    assert teraio("plan", *ranks, *options).exit_code == 0
    seen: list[Plan] = []

    def run_script(plan: Plan, *_: Any, **__: Any) -> Any:
        seen.append(plan)
        raise KeyboardInterrupt

    monkeypatch.setattr("teraio.executor.run_script", run_script, raising=False)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    teraio("run", "p.plan", "train.py")
    teraio("run", "p.rank{rank}.plan", "train.py")
    assert [plan.metadata.rank for plan in seen] == [1, 1]
    result = teraio("run", "q.plan", "train.py")
    assert "q.rank1.plan: there is no plan for rank 1 of 2" in result.output
