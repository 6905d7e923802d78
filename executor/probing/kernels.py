"""Kernels that run while transfers do: which kinds slow down, and by how much."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping

import torch

from teraio.contracts.hardware import Slowdown
from teraio.executor.probing.effort import Effort
from teraio.executor.probing.fitting import Fit
from teraio.executor.probing.transfers import TransferBench
from teraio.executor.stores import Transfer

SHARES = {"fp32 matmul": 0.35, "bf16 matmul": 0.35, "elementwise": 0.2, "attention": 0.1}
"""Parts of a step's time that each kind stands for: about those of training a Llama."""

_COVER = 3.0
"""Transfers are issued for so many times the kernels' own time, so that they outlast them."""

_DIRECTIONS = {"read": (False,), "write": (True,), "both": (False, True)}


class KernelLoop:
    """Kernels of one kind, repeated so often that they take about ``seconds`` alone."""

    def __init__(self, kind: str, device: str, seconds: float) -> None:
        self._device = device
        self._is_gpu = torch.device(device).type == "cuda"
        self._call = _kernel(kind, device, is_gpu=self._is_gpu)
        self._repetitions = 1
        self._limit_seconds = math.inf
        self.run()
        self._each_seconds = max(self.run()[0], 1e-6)
        self._repetitions = max(1, math.ceil(seconds / self._each_seconds))
        self._limit_seconds = _COVER * seconds
        if self._is_gpu:
            # One kernel alone is mostly its launch.
            self._each_seconds = max(self.run()[0] / self._repetitions, 1e-6)
            self._repetitions = max(1, math.ceil(seconds / self._each_seconds))

    def enqueue(self, seconds: float) -> None:
        """Put kernels of about ``seconds`` into the current stream and return."""
        for _ in range(math.ceil(seconds / self._each_seconds)):
            self._call()

    def run(self) -> tuple[float, float]:
        """Wall seconds of one run, and its share done: less than 1 where it took too long."""
        self.finish()
        done = 0
        begin = time.perf_counter()
        while done < self._repetitions and time.perf_counter() < begin + self._limit_seconds:
            self._call()
            done += 1
        self.finish()
        return time.perf_counter() - begin, done / self._repetitions

    def finish(self) -> None:
        """Wait for what has been enqueued."""
        # The compute stream alone: the transfers beside it go on.
        if self._is_gpu:
            torch.cuda.current_stream(self._device).synchronize()


def _kernel(kind: str, device: str, *, is_gpu: bool) -> Callable[[], object]:
    generator = torch.Generator(device).manual_seed(0)
    if kind == "elementwise":
        vector = torch.ones(2**26 if is_gpu else 2**19, device=device)
        return lambda: vector.mul(1.5).add_(vector)
    if kind == "attention":
        shape = (4, 16, 2048, 128) if is_gpu else (1, 4, 256, 64)
        query = torch.randn(shape, generator=generator, device=device)
        query = query.to(torch.bfloat16) if is_gpu else query
        attend = torch.nn.functional.scaled_dot_product_attention
        return lambda: attend(query, query, query, is_causal=True)
    size = 8192 if is_gpu else 384
    dtype = torch.bfloat16 if kind == "bf16 matmul" else torch.float32
    matrix = torch.randn(size, size, generator=generator, device=device).to(dtype)
    return lambda: torch.mm(matrix, matrix)


def measure_slowdowns(
    bench: TransferBench, fit: Fit, nbytes: int, effort: Effort
) -> dict[str, Slowdown]:
    """By kind of kernel: its time while the store reads, writes or does both, over that alone."""
    return {
        kind: _slowdown(
            KernelLoop(kind, bench.device, effort.kernel_seconds), bench, fit, nbytes, effort
        )
        for kind in effort.kernels
    }


def weighted_slowdown(of_kinds: Mapping[str, Slowdown]) -> Slowdown:
    """One factor for a step that consists of the measured kinds in their usual shares."""
    total = sum(SHARES[kind] for kind in of_kinds)
    factors = {
        name: sum(SHARES[kind] * getattr(slowdown, name) for kind, slowdown in of_kinds.items())
        for name in _DIRECTIONS
    }
    return Slowdown(**{name: _factor_of(value / total) for name, value in factors.items()})


def _slowdown(
    kernels: KernelLoop, bench: TransferBench, fit: Fit, nbytes: int, effort: Effort
) -> Slowdown:
    alone: list[float] = []
    factors: dict[str, list[float]] = {name: [] for name in _DIRECTIONS}
    deadline = time.perf_counter() + effort.limit_seconds
    # Interleaved, so that a machine that changes its pace changes it for all alike.
    for _ in range(effort.rounds):
        seconds, share = kernels.run()
        alone.append(seconds / share)
        for name, values in factors.items():
            if values and time.perf_counter() > deadline:
                break
            values.append(
                _factor_beside(kernels, statistics.median(alone), name, bench, fit, nbytes)
            )
        if time.perf_counter() > deadline:
            break
    return Slowdown(**{name: _factor_of(statistics.median(x)) for name, x in factors.items()})


def _factor_beside(
    kernels: KernelLoop,
    alone_seconds: float,
    name: str,
    bench: TransferBench,
    fit: Fit,
    nbytes: int,
) -> float:
    """By which factor the kernels run longer beside transfers of the named kind."""
    rows: list[list[Transfer]] = []
    prefix = "duplex_" if name == "both" else ""
    for is_write in _DIRECTIONS[name]:
        each_seconds = fit.seconds(prefix + ("write" if is_write else "read"), nbytes)
        count = math.ceil(_COVER * alone_seconds / each_seconds) + 1
        rows.append([bench.issue(is_write, nbytes, index) for index in range(count)])
    begin = time.perf_counter()
    seconds, share = kernels.run()
    for row in rows:
        row[-1].wait()
    covered_seconds = min(row[-1].end_seconds for row in rows) - begin
    return slowdown_factor(share * alone_seconds, seconds, covered_seconds)


def slowdown_factor(alone_seconds: float, seconds: float, covered_seconds: float) -> float:
    """Slowdown of kernels of which the first ``covered_seconds`` ran beside transfers."""
    if covered_seconds >= seconds:
        return seconds / alone_seconds
    # The rest ran at full speed, so this much of their work had been done beside transfers.
    done_seconds = alone_seconds - (seconds - covered_seconds)
    return covered_seconds / max(done_seconds, alone_seconds / 10)


def _factor_of(value: float) -> float:
    return max(1.0, float(f"{value:.4g}"))
