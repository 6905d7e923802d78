"""The rows of benchmarks/h200.py that are not teraio's: one process each, the same training.

Its argument is an order in JSON: see :class:`Order`. Model, tokens, attention, dtype and steps are
those of teraio's rows; each contender changes what its documentation says one changes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.h200_deepspeed import deepspeed_step
    from benchmarks.h200_rows import Contender, Setting, emit, say
    from benchmarks.h200_training import (
        LEARNING_RATE,
        HostMemory,
        Step,
        Trainee,
        forget_memory,
        made_on,
        peaks,
        prepare_process,
        run_window,
    )
else:  # A script's own folder is on its path, the repository's root is not.
    from h200_deepspeed import deepspeed_step
    from h200_rows import Contender, Setting, emit, say
    from h200_training import (
        LEARNING_RATE,
        HostMemory,
        Step,
        Trainee,
        forget_memory,
        made_on,
        peaks,
        prepare_process,
        run_window,
    )

import torch

from teraio.units import format_bytes, format_seconds

Make = Callable[[Setting, Path], Step]
"""Builds a contender; the folder is where it may keep files."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What to measure. ``folder``: for files of the contender (NVMe, compiled code).

    ``steps``: iterations that are timed, after ``warm_up``.
    """

    setting: Mapping[str, Any]
    contender: list[Any]
    folder: str
    warm_up: int = 2
    steps: int = 5


def plain(setting: Setting, _: Path) -> Step:
    """No offloading: the ideal."""
    return Trainee(setting).step


def save_on_cpu(setting: Setting, _: Path) -> Step:
    """PyTorch's hook on saved tensors: each is copied to the host and back, the host waiting."""
    trainee = Trainee(setting)
    pinned = setting.device == "cuda"
    trainee.around_forward = lambda: torch.autograd.graph.save_on_cpu(pin_memory=pinned)
    return trainee.step


def checkpointing(setting: Setting, _: Path) -> Step:
    """Recomputation of each block in backward; nothing moves."""
    return Trainee(setting, checkpoint="non-reentrant").step


def torchao(setting: Setting, _: Path) -> Step:
    """torchao's optimizer on the CPU, with gradients that leave as they come."""
    from torchao.optim import CPUOffloadOptimizer  # type: ignore[import-not-found,unused-ignore]

    trainee = Trainee(setting)
    trainee.optimizer = CPUOffloadOptimizer(
        trainee.model.parameters(),
        torch.optim.AdamW,
        offload_gradients=True,
        fused=True,
        lr=LEARNING_RATE,
    )
    return trainee.step


def fsdp2(setting: Setting, _: Path) -> Step:
    """FSDP2 on one rank, parameters, gradients and optimizer on the CPU, a unit for each block."""
    from torch.distributed import init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    _describe_single_rank()
    is_gpu = setting.device == "cuda"
    init_process_group("cpu:gloo,cuda:nccl" if is_gpu else "gloo")
    mesh = init_device_mesh(setting.device, (1,))
    policy = CPUOffloadPolicy(pin_memory=is_gpu)
    trainee = Trainee(setting)
    for block in trainee.model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(trainee.model, mesh=mesh, offload_policy=policy)
    trainee.optimizer = torch.optim.AdamW(trainee.model.parameters(), lr=LEARNING_RATE, fused=True)
    return trainee.step


def _describe_single_rank() -> None:
    """One process is the whole world: what torchrun would set, and no network is looked for."""
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }.items():
        os.environ.setdefault(name, value)


def deepspeed_cpu(setting: Setting, folder: Path) -> Step:
    """DeepSpeed ZeRO-3, parameters and optimizer in pinned host memory (ZeRO-Offload)."""
    _describe_single_rank()
    return deepspeed_step(setting, folder, nvme=False)


def deepspeed_nvme(setting: Setting, folder: Path) -> Step:
    """DeepSpeed ZeRO-3, parameters in pinned host memory, optimizer in files (ZeRO-Infinity)."""
    _describe_single_rank()
    return deepspeed_step(setting, folder, nvme=True)


CONTENDERS: dict[str, Make] = {
    "ideal": plain,
    "save-on-cpu": save_on_cpu,
    "checkpointing": checkpointing,
    "torchao": torchao,
    "fsdp2": fsdp2,
    "deepspeed-cpu": deepspeed_cpu,
    "deepspeed-nvme": deepspeed_nvme,
}
"""By the name in ``--rows``, in the order of the table."""


def measure(order: Order, contender: Contender) -> dict[str, Any]:
    """Seconds, peaks of the GPU while training, and host memory that building and training took."""
    setting = Setting(**order.setting)
    prepare_process(setting)
    host = HostMemory()
    began = time.perf_counter()
    step = CONTENDERS[contender.name](setting, Path(order.folder))
    building_seconds = time.perf_counter() - began
    say(f"{contender.label}: built in {building_seconds:.1f} s")
    # Peaks of training, not of building: a model may be on the GPU whole before it is offloaded.
    forget_memory(setting.device)
    began = time.perf_counter()
    first_loss = float(step(0))
    first_seconds = time.perf_counter() - began
    say(f"{contender.label}: first step {first_seconds:.1f} s, loss {first_loss:.6f}")
    window = run_window(
        lambda number: step(number + 1), order.warm_up - 1, order.steps, setting.device
    )
    row = window.as_row() | peaks(setting.device) | host.as_row()
    row["losses"] = [first_loss, *row["losses"]]
    row["building_seconds"], row["first_step_seconds"] = building_seconds, first_seconds
    row["made_on"] = made_on(setting.device)
    say(
        f"{contender.label}: step {format_seconds(window.step_seconds)}, "
        + ", ".join(f"{name} {format_bytes(row[name])}" for name in row if name.startswith("max_"))
    )
    return row


def main() -> None:
    """Measure the contender of the order."""
    order = Order(**json.loads(sys.argv[1]))
    contender = Contender(*order.contender)
    emit(contender, measure(order, contender))
    sys.stdout.flush()
    # What is measured is said; engines with threads and files do not always end by themselves.
    os._exit(0)


if __name__ == "__main__":
    main()
