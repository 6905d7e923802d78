"""What a timing file says of the machine, and the pace of its host."""

from __future__ import annotations

import platform
import statistics
import subprocess
from time import perf_counter

import torch

import teraio
from teraio.profiler.costs.timings import TimedMachine
from teraio.profiler.dispatch import KernelMode
from teraio.profiler.training import TrainingSetup, build_training

METHOD = (
    "each call with random data in groups that were queued before the first began; inputs rotate "
    "beyond the level 2 cache; median of the groups; products and attention again in the mixture "
    "of the trace"
)


def describe_machine(device: str, *, with_pace: bool = True) -> TimedMachine:
    """The device, its software and settings, and how fast the host feeds it."""
    is_cuda = torch.device(device).type == "cuda"
    pace = host_seconds_per_kernel() if is_cuda and with_pace else 0.0
    return TimedMachine(
        gpu=torch.cuda.get_device_name(device) if is_cuda else f"cpu {platform.machine()}",
        torch_version=torch.__version__,
        cuda_version=torch.version.cuda or "",
        driver_version=_query("driver_version") if is_cuda else "",
        clocks=_query("clocks.max.sm,clocks.max.mem,power.limit") if is_cuda else "",
        teraio_version=teraio.__version__,
        method=METHOD if is_cuda else "wall time, fastest of three",
        host_seconds_per_kernel=pace,
    )


def _query(names: str) -> str:
    """What nvidia-smi says of the first GPU; empty if it is not there."""
    command = ["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.strip().partition("\n")[0]


class _Counter(KernelMode):
    """Counts the kernels of an iteration."""

    num_kernels = 0

    def on_iteration_end(self) -> None:
        self.num_kernels = self.kernel


def host_seconds_per_kernel(device: str = "cuda") -> float:
    """Training time over kernels, of a model so small that the GPU always waits for the host.

    Python between the kernels, autograd and optimizer are all in it.
    """
    setup = TrainingSetup(model="tiny-llama", sequence=16, micro_batch_size=1, micro_batches=2)
    training = build_training(setup, device)
    training.run_iteration()
    with _Counter(device_type=torch.device(device).type) as counter:
        training.run_iteration()
    laps = []
    for _ in range(7):
        began = perf_counter()
        training.run_iteration()
        laps.append(perf_counter() - began)
    return statistics.median(laps) / max(counter.num_kernels, 1)
