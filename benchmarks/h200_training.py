"""What benchmarks/h200.py trains, and how it is timed: the same for every contender."""

from __future__ import annotations

import gc
import importlib.metadata
import itertools
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from benchmarks.h200_rows import Setting
else:  # A script's own folder is on its path, the repository's root is not.
    from h200_rows import Setting

# As docs/execution.md advises: the caching allocator then counts what was asked for.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
# Deterministic matrix products need it before CUDA begins; others do not notice.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import Tensor, nn

import teraio
from teraio.profiler.product_precision import product_precision_of
from teraio.profiler.training.loop import autocast, build_training, random_batch
from teraio.profiler.training.setup import TrainingSetup

LEARNING_RATE = 1e-4
Step = Callable[[int], Tensor]
"""Runs one iteration, of this number; its loss, still on the device."""


def setup_of(setting: Setting, **changes: Any) -> TrainingSetup:
    """The setting as the library's reference loop describes it, some fields changed."""
    given: dict[str, Any] = {
        "model": setting.model,
        "sequence": setting.sequence,
        "micro_batch_size": setting.micro_batch_size,
        "dtype": setting.dtype,
        "optimizer_implementation": setting.optimizer,
        "compile_blocks": setting.compiled,
    }
    return TrainingSetup(**(given | changes))


def prepare_process(setting: Setting) -> None:
    """Determinism as the setting wants it, for the whole process."""
    torch.use_deterministic_algorithms(setting.exact)
    # Filling fresh memory changes no result here, and would be timed.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


class Trainee:
    """A model with its optimizer, made anew and always alike; baselines replace parts of it.

    ``around_forward`` makes a context for each forward pass. ``optimizer``: None has none built.
    """

    def __init__(self, setting: Setting, **changes: Any) -> None:
        torch.manual_seed(0)
        self.setting = setting
        self.setup = setup_of(setting, **changes)
        self.device = torch.device(setting.device)
        built = build_training(self.setup, self.device)
        self.model: nn.Module = built.model
        self.optimizer: torch.optim.Optimizer = built.optimizer
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE
        self.around_forward: Callable[[], AbstractContextManager[Any]] = nullcontext

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets of iteration ``number``: the same for every contender."""
        torch.manual_seed(number)
        return random_batch(self.setup, self.device)

    def step(self, number: int) -> Tensor:
        """One iteration, operator for operator as the library's reference loop runs it."""
        with product_precision_of(self.setup.dtype):
            batch = self.batch(number)
            with self.around_forward(), autocast(self.setup.dtype, self.device):
                loss: Tensor = self.model(*batch)
            (loss / float(self.setup.micro_batches)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()


class Window(NamedTuple):
    """Iterations issued back to back. Seconds; ``losses`` also of those before the window.

    They stay tensors: what reads them inside a run under a plan would be one more kernel.
    """

    step_seconds: float
    whole_seconds: float
    all_seconds: list[float]
    losses: list[Tensor]

    def as_row(self) -> dict[str, Any]:
        """What a row keeps. ``window_step_seconds`` is the mean over the whole window."""
        return {
            "step_seconds": self.step_seconds,
            "window_step_seconds": self.whole_seconds / len(self.all_seconds),
            "all_step_seconds": self.all_seconds,
            "losses": [float(loss) for loss in self.losses],
        }


def run_exactly(step: Step, count: int, device: str) -> tuple[list[Tensor], float | None]:
    """The first ``count`` iterations with deterministic algorithms; their losses, on the device,
    and the median of their seconds.

    A plan may be followed across their end: the operators are the same ones.
    """
    was_exact = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        window = run_window(step, 0, count, device)
    finally:
        torch.use_deterministic_algorithms(was_exact)
    return window.losses, window.step_seconds if count else None


def run_window(step: Step, warm_up: int, timed: int, device: str, first: int = 0) -> Window:
    """Iterations from number ``first`` on, to warm up, then timed: their median, and all of them.

    On a GPU by events in its own stream, so that the host may run ahead as it does in training.
    """
    losses = [step(number) for number in range(first, first + warm_up)]
    synchronize(device)
    clock = _EventClock() if device == "cuda" else _HostClock()
    clock.mark()
    for number in range(first + warm_up, first + warm_up + timed):
        losses.append(step(number))
        clock.mark()
    synchronize(device)
    seconds = clock.laps()
    return Window(statistics.median(seconds or [0.0]), sum(seconds), seconds, losses)


def run_told(
    step: Step, count: int, device: str, tell: Callable[[int, float], None]
) -> tuple[list[Tensor], list[float]]:
    """Losses and seconds of iterations from the first on; ``tell`` hears of each as it ends.

    On a GPU an iteration is waited for once the next one is issued, so that the GPU never idles.
    """
    clock = _EventClock() if device == "cuda" else _HostClock()
    losses: list[Tensor] = []
    seconds: list[float] = []

    def hear() -> None:
        seconds.append(clock.lap(len(seconds)))
        tell(len(seconds) - 1, seconds[-1])

    clock.mark()
    for number in range(count):
        losses.append(step(number))
        clock.mark()
        if number > 0:
            hear()
    if count > 0:
        hear()
    return losses, seconds


class _EventClock:
    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def lap(self, number: int) -> float:
        self._events[number + 1].synchronize()
        return float(self._events[number].elapsed_time(self._events[number + 1])) / 1e3

    def laps(self) -> list[float]:
        events = self._events
        return [begun.elapsed_time(ended) / 1e3 for begun, ended in itertools.pairwise(events)]


class _HostClock:
    def __init__(self) -> None:
        self._times: list[float] = []

    def mark(self) -> None:
        self._times.append(time.perf_counter())

    def lap(self, number: int) -> float:
        return self._times[number + 1] - self._times[number]

    def laps(self) -> list[float]:
        times = self._times
        return [ended - begun for begun, ended in itertools.pairwise(times)]


def synchronize(device: str) -> None:
    """Wait for the GPU, if it is one."""
    if device == "cuda":
        torch.cuda.synchronize()


def forget_memory(device: str) -> None:
    """Free what an earlier run left, compiled blocks included, and begin peaks anew."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if device == "cuda" and torch.cuda.is_available():  # Plans are made where there is no GPU, too.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peaks(device: str) -> dict[str, int]:
    """Bytes of the GPU at most allocated and reserved since the last reset; empty on a CPU."""
    if device != "cuda":
        return {}
    return {
        "max_memory_allocated": torch.cuda.max_memory_allocated(),
        "max_memory_reserved": torch.cuda.max_memory_reserved(),
    }


class HostMemory:
    """Main memory of the machine that is used more than when this object was made."""

    def __init__(self) -> None:
        self._before = self._used_bytes()

    def as_row(self) -> dict[str, int]:
        """Bytes used more by the whole machine (pinned memory too), and this process's largest."""
        largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        used = max(0, self._used_bytes() - self._before)
        return {"host_bytes": used, "peak_resident_bytes": largest}

    @staticmethod
    def _used_bytes() -> int:
        """Total minus available: right also where a virtual machine's total grows with use."""
        lines = Path("/proc/meminfo").read_text().splitlines()
        kibibytes: Mapping[str, int] = {
            name: int(rest.split()[0]) for name, rest in (line.split(":") for line in lines)
        }
        return 1024 * (kibibytes["MemTotal"] - kibibytes["MemAvailable"])


def checksum(model: nn.Module) -> int:
    """An exact sum over the bits of all parameters (float32)."""
    sums = [
        int(p.detach().view(torch.int32).sum(dtype=torch.int64)) * index
        for index, p in enumerate(model.parameters(), 1)
    ]
    return sum(sums)


_PACKAGES = ("torchao", "deepspeed")


def made_on(device: str) -> str:
    """GPU, cores and versions in one line."""
    is_gpu = device == "cuda"
    parts = [
        torch.cuda.get_device_name() if is_gpu else "no GPU",
        f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        f"Python {platform.python_version()}, teraio {teraio.__version__}",
        f"torch {torch.__version__}" + (f" (CUDA {torch.version.cuda})" if is_gpu else ""),
    ]
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            parts.append(f"{package} {importlib.metadata.version(package)}")
    return ", ".join(parts)
