"""A small Llama whose state is three times the GPU's budget, its plan, and ways to train it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

import teraio
from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Plan
from teraio.executor.execution import Execution
from teraio.executor.planned_places import planned_bytes_per_device
from teraio.profiler.models import build_model, make_batch
from teraio.traces.trace import Trace

SIZES: dict[str, Any] = {"hidden": 64, "intermediate": 160, "layers": 6}
BATCH = (2, 16)
STEPS = 4
IMPLEMENTATIONS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
}
Losses = list[float]


def build(**options: Any) -> nn.Module:
    """As its constructor initialises it."""
    return build_model("tiny-llama", **SIZES, **options)


def build_on_meta(**options: Any) -> nn.Module:
    """Shapes, no memory."""
    with torch.device("meta"):
        return build(**options)


def initialise(module: nn.Module) -> None:
    """What a module's own tensors begin with, whatever kind of module it is."""
    for parameter in module.parameters(recurse=False):
        if parameter.dim() == 1:
            nn.init.ones_(parameter)
        else:
            nn.init.normal_(parameter, std=0.02)
    with torch.no_grad():
        for buffer in module.buffers(recurse=False):
            buffer.copy_(10000.0 ** -torch.linspace(0, 1, buffer.numel() + 1)[:-1])


def adamw(model: nn.Module, implementation: str = "fused") -> torch.optim.Optimizer:
    """AdamW of one implementation."""
    return torch.optim.AdamW(model.parameters(), **IMPLEMENTATIONS[implementation])  # type: ignore[arg-type]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    """One iteration; its loss."""
    generator = torch.Generator().manual_seed(number)
    batch = make_batch("tiny-llama", *BATCH, generator)
    device = next(model.parameters()).device
    loss = model(*(part.to(device) for part in batch))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Copies of parameters, buffers and optimizer state."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    for index, state in enumerate(optimizer.state.values()):
        tensors |= {f"{index}.{key}": value for key, value in state.items()}
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Bit by bit."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@cache
def trace(implementation: str = "fused", tied: bool = False) -> Trace:
    """Of the training; every kernel takes as long as any, so that its plans are always the same."""
    model = build(tied=tied)
    optimizer = adamw(model, implementation)
    with teraio.profile(model, optimizer, bucket_bytes=64 * 1024) as profile:
        while not profile.done:
            step(model, optimizer, 0)
            profile.step()
    recorded = profile.trace
    kernels = dataclasses.replace(
        recorded.kernels,
        duration_seconds=np.full(recorded.num_kernels, 5e-4),
        gap_before_seconds=np.zeros(recorded.num_kernels),
    )
    return dataclasses.replace(recorded, kernels=kernels)


def state_bytes(traced: Trace) -> int:
    """Parameters, gradients and AdamW's two moments."""
    is_parameter = traced.storages.kind == "parameter"
    return 4 * int(traced.storages.nbytes[is_parameter].sum())


def with_small_buffers(machine: Hardware, state_bytes: int) -> Hardware:
    """The machine with bounce buffers that suit the model, not a real one's."""
    bounce_bytes = min(64 * 2**20, max(256 * 1024, state_bytes // 64 // 4096 * 4096))
    ssds = tuple(
        dataclasses.replace(ssd, bounce_bytes=bounce_bytes, preferred_io_bytes=bounce_bytes // 4)
        for ssd in machine.ssd
    )
    return dataclasses.replace(machine, ssd=ssds)


@cache
def plan(implementation: str = "fused", tied: bool = False) -> Plan:
    """For a third of the state on the GPU, and the rest in host memory and on a disk."""
    traced = trace(implementation, tied)
    total = state_bytes(traced)
    machine = with_small_buffers(Hardware.preset("cpu"), total)
    made = teraio.plan(
        traced, machine, planner="greedy", gpu_memory=total // 3, host_memory=total * 2 // 5
    )
    assert set(made.moves.device) == {"host", "disk"}
    return made


def exactly(made: Plan) -> dict[str, Any]:
    """Plan and host memory for tiers that hold what the plan puts there, and not a byte more."""
    hardware, arenas = made.hardware, planned_bytes_per_device(made, made.hardware)
    ssds = tuple(dataclasses.replace(s, capacity_bytes=arenas[s.name]) for s in hardware.ssd)
    toml = dataclasses.replace(hardware, ssd=ssds).to_toml()
    metadata = dataclasses.replace(made.metadata, hardware=toml)
    bounce_bytes = sum(ssd.bounce_bytes for ssd in ssds)
    return {
        "plan": dataclasses.replace(made, metadata=metadata),
        "host_memory": arenas["host"] + bounce_bytes,
    }


def train_plainly(
    make: Callable[[], nn.Module] = build, implementation: str = "fused", steps: int = STEPS
) -> tuple[Losses, dict[str, torch.Tensor]]:
    """The reference: everything fits."""
    torch.manual_seed(0)
    model = make()
    optimizer = adamw(model, implementation)
    losses = [step(model, optimizer, number) for number in range(steps)]
    return losses, tensors_of(model, optimizer)


def peaks(run: Execution) -> list[int]:
    """Most bytes held in each iteration so far, that of the making of the model included."""
    assert run._mode is not None
    return [record.peak_bytes for record in run._mode.log.recent]
