"""Plans of several ranks: whose plan is whose, and training in several processes to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import teraio
from teraio.contracts.plan import Moves, Plan
from teraio.errors import InputError
from teraio.executor.ranks import PlanChoice, plan_of_this_rank
from teraio.planner.plan_building import build_plan

SOURCE = Path(__file__).resolve().parents[2] / "src"
WORKER = Path(__file__).with_name("rank_training.py")
KINDS = ("ddp", "ddp views", "fsdp2", "gpipe", "1f1b")
MAX_FETCHES = 120
"""Under the stress policy: an iteration that differs (DDP's second) fetches what it needs."""

distributed = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="needs torch.distributed"
)


@pytest.fixture
def plan(loop: Any, train: Any, machine: Any) -> Plan:
    """A plan without moves of a small loop, of rank 0 of 1."""
    return build_plan(loop(train).trace(), Moves.empty(), machine(), planner="on-demand")


def of_rank(plan: Plan, rank: int, world_size: int = 2) -> Plan:
    return replace(plan, metadata=replace(plan.metadata, rank=rank, world_size=world_size))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is rank 1 of 2, as a launcher says."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")


@pytest.mark.usefixtures("launched")
def test_each_rank_takes_its_own_plan(plan: Plan, tmp_path: Path) -> None:
    for rank in range(2):
        of_rank(plan, rank).save(tmp_path / f"p.rank{rank}.plan")
    choices: list[PlanChoice] = [
        [of_rank(plan, 0), of_rank(plan, 1)],
        [tmp_path / "p.rank0.plan", str(tmp_path / "p.rank1.plan")],
        tmp_path / "p.plan",
        tmp_path / "p.rank{rank}.plan",
        str(tmp_path),
        tmp_path / "p.rank1.plan",
    ]
    assert [plan_of_this_rank(choice).metadata.rank for choice in choices] == [1] * 6


@pytest.mark.usefixtures("launched")
def test_a_plan_of_another_rank_is_refused(plan: Plan, tmp_path: Path) -> None:
    of_rank(plan, 0).save(tmp_path / "p.rank0.plan")
    refusals: list[tuple[PlanChoice, str]] = [
        (of_rank(plan, 0), r"is of rank 0 of 2, this process is rank 1 of 2; .*\{rank\}"),
        (of_rank(plan, 1, 4), "rank 1 of 4, .* rank 1 of 2; profile and plan .* with 2 ranks"),
        (of_rank(plan, 0, 1), "is of rank 0 of 1, .* rank 1 of 2"),
        (tmp_path / "p.plan", r"p.rank1.plan: there is no plan for rank 1 of 2"),
        (tmp_path / "p.{rank}.plan", r"p.1.plan: there is no plan"),
        (tmp_path, "one plan of rank 1 is wanted there, found none"),
        ([of_rank(plan, 0)], r"one of the 1 plans must be of rank 1 of 2; they are of ranks \[0\]"),
    ]
    for choice, message in refusals:
        with pytest.raises(InputError, match=message):
            teraio.execute(choice)


def test_a_plan_of_several_ranks_is_refused_in_one_process(plan: Plan) -> None:
    with pytest.raises(InputError, match="is of rank 0 of 2, this process is rank 0 of 1"):
        teraio.execute(of_rank(plan, 0))


def test_a_launcher_that_says_nonsense_is_named(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(InputError, match=r"WORLD_SIZE: .* must be a number, got 'two'"):
        teraio.execute(plan)


def train_on_all_ranks(
    folder: Path, kinds: tuple[str, ...], device: str
) -> list[dict[str, dict[str, Any]]]:
    """What each of two ranks found, by the kind of parallelism."""
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(WORKER), str(folder), ",".join(kinds)]
    ranks = [
        subprocess.Popen([*command, str(rank), "2", device], env=environment) for rank in range(2)
    ]
    try:
        assert [rank.wait(timeout=200) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def check_findings(rank: int, kind: str, findings: dict[str, Any]) -> None:
    """Bit-identical under every plan, within the budget, and the stress plan carried out."""
    assert findings.pop("world") == [rank, 2]
    assert len(findings) == 4
    for name, found in findings.items():
        assert found["differences"] == [], (kind, name)
        assert found["peak_bytes"] <= found["budget_bytes"], (kind, name)
    for name in ("evict to host", "evict to ssd"):
        stressed = findings[name]
        assert stressed["moves_found"] == stressed["moves_planned"] > 100, (kind, name)
        assert stressed["demand_fetches"] <= MAX_FETCHES, (kind, name)


@distributed
@pytest.mark.slow
@pytest.mark.parametrize("kinds", [KINDS[:3], KINDS[3:]], ids=["data", "pipeline"])
def test_training_of_two_processes_is_the_same_to_the_bit(
    kinds: tuple[str, ...], tmp_path: Path
) -> None:
    """One kind after the other: starting the processes takes longer than what they do."""
    for rank, found in enumerate(train_on_all_ranks(tmp_path, kinds, "cpu")):
        assert tuple(found) == kinds
        for kind, findings in found.items():
            check_findings(rank, kind, findings)


@distributed
@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", KINDS)
def test_training_of_two_gpus_is_the_same_to_the_bit(kind: str, tmp_path: Path) -> None:
    """In processes of its own: what stays on a GPU counts in the budget of what follows."""
    for rank, found in enumerate(train_on_all_ranks(tmp_path, (kind,), "cuda")):
        check_findings(rank, kind, found[kind])
