"""Times one made call: on the device, on the host that launches it, and its scratch memory."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch

from teraio.profiler.costs.remaking import MadeCall
from teraio.profiler.operators import nested_tensors
from teraio.profiler.workspace import CudaWorkspaceMeter

ALLOCATION_BYTES = 512
"""The caching allocator hands out multiples of this."""

_CACHE_BYTES = 128 * 2**20
"""More than twice the level 2 cache of any GPU of the table but the RTX 5090 (96 MiB)."""

_MAX_COPIES = 8
_GROUPS = 5
_MAX_REPEATS = 100
_HOST_REPEATS = 10
_SLEEP_CYCLES_PER_SECOND = 2e9
"""Cycles of torch.cuda._sleep: clocks of the GPUs at hand, rounded up."""


class Measured(NamedTuple):
    """What one call takes."""

    seconds: float
    host_seconds: float
    workspace_bytes: int


MakeCall = Callable[[], MadeCall]


class CpuMeter:
    """Wall time of a call on the CPU, where nothing is launched ahead."""

    def measure(self, make: MakeCall, moved_bytes: int, *, is_heavy: bool) -> Measured:
        """The fastest of a few calls: on a CPU, others only ever disturb."""
        call = make()
        call()
        return Measured(min(_wall_seconds(call) for _ in range(3)), 0.0, 0)


class CudaMeter:
    """Times calls in a queue that never runs empty, as kernels of a long iteration run.

    Inputs rotate among copies that the level 2 cache cannot hold, unless one call's are too many
    for it anyway, or so few that training would find them there too. Heavy calls (matrix products,
    attention) run for longer, so that they meet the clocks that the power limit leaves them.
    """

    def measure(self, make: MakeCall, moved_bytes: int, *, is_heavy: bool) -> Measured:
        """Seconds of a call of ``moved_bytes``, in median over several groups of repeats."""
        calls = [make()]
        workspace_bytes = self._workspace_bytes(calls[0])
        calls += [make() for _ in range(num_copies(moved_bytes) - 1)]
        if moved_bytes == 0:
            return Measured(0.0, self._host_seconds(calls), workspace_bytes)
        host_seconds = self._host_seconds(calls)
        once = self._group_seconds(calls, 3, host_seconds)
        group_seconds = 0.02 if is_heavy else 0.002
        repeats = min(max(math.ceil(group_seconds / max(once, 1e-6)), 1), _MAX_REPEATS)
        num_groups = _GROUPS if once < 0.1 else 3
        groups = [self._group_seconds(calls, repeats, host_seconds) for _ in range(num_groups)]
        return Measured(statistics.median(groups), host_seconds, workspace_bytes)

    def _workspace_bytes(self, call: MadeCall) -> int:
        """Scratch of the second call: the first also sets up what a library then keeps."""
        call()
        torch.cuda.synchronize()
        meter = CudaWorkspaceMeter()
        with meter.around_kernel():
            result = call()
        meter.kernel_ended(_new_bytes(call, result))
        return int(meter.stop()[0])

    def _host_seconds(self, calls: Sequence[MadeCall]) -> float:
        """Time to launch one, while the device is busy with earlier work."""
        rounds = []
        for _ in range(3):
            torch.cuda.synchronize()
            began = perf_counter()
            for index in range(_HOST_REPEATS):
                calls[index % len(calls)]()
            rounds.append((perf_counter() - began) / _HOST_REPEATS)
        torch.cuda.synchronize()
        return min(rounds)

    def _group_seconds(self, calls: Sequence[MadeCall], repeats: int, host_seconds: float) -> float:
        """Seconds of one of ``repeats`` calls that were all launched before the first began."""
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Results stay for a round, or each would be written where the last one was.
        held: list[Any] = [None] * len(calls)
        head_start = 1.5 * repeats * host_seconds + 50e-6
        torch.cuda._sleep(int(head_start * _SLEEP_CYCLES_PER_SECOND))
        first.record()
        for index in range(repeats):
            held[index % len(calls)] = calls[index % len(calls)]()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e-3 / repeats


Meter = CpuMeter | CudaMeter


def make_meter(device: str) -> Meter:
    """The meter for a device type."""
    return CudaMeter() if torch.device(device).type == "cuda" else CpuMeter()


def num_copies(moved_bytes: int) -> int:
    """Input sets to rotate among, so that they are not all in the cache when their turn comes."""
    if moved_bytes < _CACHE_BYTES // (2 * _MAX_COPIES):
        return 1
    return max(1, min(_MAX_COPIES, math.ceil(_CACHE_BYTES / moved_bytes)))


def _wall_seconds(call: MadeCall) -> float:
    began = perf_counter()
    call()
    return perf_counter() - began


def _new_bytes(call: MadeCall, result: Any) -> int:
    """What a call leaves behind, as the allocator rounds it."""
    given = nested_tensors((*call.args, *call.kwargs.values()))
    known = {tensor.untyped_storage()._cdata for tensor in given}
    new = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in nested_tensors(result)}
    sizes = [nbytes for address, nbytes in new.items() if address not in known]
    return sum(-(-size // ALLOCATION_BYTES) * ALLOCATION_BYTES for size in sizes)
