"""One rank of parallel training: plain, profiled, planned and executed; run as a script.

Arguments: folder, kinds of parallelism (a comma between them), rank, world size, device type.
Writes what it found, or fails: a rank's results must be those of plain training to the bit,
whatever the plan.
"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

import teraio
from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Moves, Plan
from teraio.errors import OffloadWarning
from teraio.planner import evict_everything, plan_ranks, share_of_rank
from teraio.planner.plan_building import build_plan
from teraio.traces.trace import UNTRACKED, Trace

WIDTH, BLOCKS, ROWS, MICRO_BATCHES = 64, 4, 16, 4
STEPS, PROFILED_STEPS = 5, 9


class Block(nn.Module):
    """A residual block of a transformer without its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + y


@dataclass
class Training:
    """What one rank trains; ``schedule`` only where stages make a pipeline."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Any = None

    def step(self, number: int, device: str) -> float:
        """One step of one batch, the same for the same number."""
        rank = distributed.get_rank()
        seed = 100 * number + (rank if self.schedule is None else 0)
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device)
        self.optimizer.zero_grad()
        loss = self._piped(x) if self.schedule else self._whole(x)
        self.optimizer.step()
        return float(loss.detach())

    def _whole(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(x).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return loss

    def _piped(self, x: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        if distributed.get_rank() == 0:
            self.schedule.step(x)
            return torch.zeros(())
        self.schedule.step(target=x.flip(0), losses=losses)
        return torch.stack(losses).mean()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that must be the same to the bit."""
        found = {name: _local(p).clone() for name, p in self.model.named_parameters()}
        for number, state in enumerate(self.optimizer.state.values()):
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    found[f"state {number} {key}"] = _local(value).clone()
        return found


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()


def build(kind: str, device: str) -> Training:
    """Parallel training of a kind, with the same weights every time."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*[Block() for _ in range(BLOCKS)]).to(device)
    schedule = None
    if kind.startswith("ddp"):
        model = nn.parallel.DistributedDataParallel(
            model, bucket_cap_mb=0.1, gradient_as_bucket_view=kind == "ddp views"
        )
    elif kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model.children():
            fully_shard(block)
        fully_shard(model)
    else:
        model, schedule = _pipeline(kind, model, device)
    return Training(model, torch.optim.AdamW(model.parameters(), lr=0.01), schedule)


def _pipeline(kind: str, model: Any, device: str) -> tuple[nn.Module, Any]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    rank = distributed.get_rank()
    part = model[: BLOCKS // 2] if rank == 0 else model[BLOCKS // 2 :]
    stage = PipelineStage(part, rank, 2, torch.device(device))
    make = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[kind]
    return part, make(
        stage,
        n_microbatches=MICRO_BATCHES,
        loss_fn=lambda out, target: (out - target).pow(2).mean(),
    )


def profiled(kind: str, device: str) -> Trace:
    """The trace of this rank."""
    training = build(kind, device)
    with teraio.profile(training.model, training.optimizer, device=device) as profile:
        for number in range(PROFILED_STEPS):
            training.step(number, device)
    return profile.trace


def machine(device: str) -> Hardware:
    """A node that both ranks share."""
    preset = Hardware.preset("cpu" if device == "cpu" else "h200")
    return preset.with_budgets(gpu_memory="1GB", host_memory="200MB")


def plans(trace: Trace, device: str) -> dict[str, Plan]:
    """Plans of this rank by name: the stress policy on each tier, greedy and on demand at 60 %."""
    node = machine(device)
    share = share_of_rank(node, trace.metadata.rank, trace.metadata.world_size)
    # What a GPU's libraries keep cannot leave, and is more than such a small model.
    kept = int(trace.storages.allocated_bytes[trace.storages.name == UNTRACKED].sum())
    budget_bytes = kept + int(0.6 * (trace.peak_allocated_bytes - kept))
    tight = replace(share, gpu=tuple(replace(g, memory_bytes=budget_bytes) for g in share.gpu))
    (greedy,) = plan_ranks([trace], node, planner="greedy", gpu_memory=budget_bytes)
    return {
        "evict to host": evict_everything(trace, share, tiers="host"),
        "evict to ssd": evict_everything(trace, share, tiers="ssd"),
        "greedy": greedy,
        "on demand": build_plan(trace, Moves.empty(), tight, planner="on-demand"),
    }


def executed(plan: Plan, kind: str, device: str, folder: str) -> tuple[Any, dict[str, Any]]:
    """(losses and final tensors, what the report says) under a plan."""
    training = build(kind, device)
    run = teraio.execute(plan, training.model, training.optimizer, ssd_path=folder, device=device)
    with run:
        losses = [training.step(number, device) for number in range(STEPS)]
    report = run.report
    facts = {
        name: getattr(report, name)
        for name in ("drift", "moves_found", "moves_planned", "demand_fetches", "evictions")
    }
    facts |= {"peak_bytes": report.peak_bytes, "budget_bytes": report.budget_bytes}
    return (losses, training.tensors()), facts


def differences(one: Any, other: Any) -> list[str]:
    """What is not the same, bit by bit."""
    wrong = [] if one[0] == other[0] else [f"losses {one[0]} and {other[0]}"]
    wrong += [name for name in one[1] if not torch.equal(one[1][name], other[1][name])]
    return wrong


def findings_of(kind: str, device: str, folder: str) -> dict[str, Any]:
    """Train in every way: who this rank is, and what each plan did and changed."""
    training = build(kind, device)
    plain = [training.step(number, device) for number in range(STEPS)], training.tensors()
    trace = profiled(kind, device)
    findings: dict[str, Any] = {"world": [trace.metadata.rank, trace.metadata.world_size]}
    for name, plan in plans(trace, device).items():
        outcome, facts = executed(plan, kind, device, folder)
        findings[name] = {**facts, "differences": differences(plain, outcome)}
    return findings


def main(folder: str, kinds: str, rank: int, world_size: int, device: str) -> None:
    """Train with each kind of parallelism and write the findings to ``folder``."""
    warnings.simplefilter("ignore", OffloadWarning)
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=180),
    )
    findings = {kind: findings_of(kind, device, folder) for kind in kinds.split(",")}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(findings))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
