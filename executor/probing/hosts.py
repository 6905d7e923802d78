"""Rates of the host tier, beside each GPU and beside all of them at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from teraio.contracts.hardware import HOST, Slowdown
from teraio.executor.probing.effort import MIB, Effort
from teraio.executor.probing.fitting import fit_rates
from teraio.executor.probing.kernels import KernelLoop, measure_slowdowns
from teraio.executor.probing.links import Rates, Together, find_links, rates_at_once
from teraio.executor.probing.measurements import MeasuredPath
from teraio.executor.probing.numa import near_node
from teraio.executor.probing.places import GpuPlace
from teraio.executor.probing.transfers import Background, TransferBench
from teraio.executor.stores import HostStore

_SLOWDOWN_BYTES = 64 * MIB
_TOGETHER_BYTES = 64 * MIB
_TOGETHER_HALF_BYTES = 128 * MIB
_TOGETHER_COUNT = 16


def background_kernels(place: GpuPlace) -> Background | None:
    """Kernels to run beside transfers; none on a CPU, whose cores the transfers need."""
    return KernelLoop("bf16 matmul", place.device, 0.05) if place.is_cuda else None


@contextmanager
def host_bench(
    place: GpuPlace, half_bytes: int, background: Background | None = None
) -> Iterator[TransferBench]:
    """The host store beside a GPU, pinned on its node; ``half_bytes`` are for one direction."""
    with place.current():
        with near_node(place.node):
            store = HostStore(2 * half_bytes, device=place.device)
        try:
            yield TransferBench(
                store,
                place.device,
                store_bytes=half_bytes,
                buffer_bytes=half_bytes,
                background=background,
                waits_in_stream=place.is_cuda,
            )
        finally:
            store.close()


def measure_host(place: GpuPlace, effort: Effort) -> MeasuredPath:
    """Transfers between the host tier and one GPU, by size."""
    half_bytes = max(effort.memory_bytes, 2 * max(effort.sizes))
    with host_bench(place, half_bytes, background_kernels(place)) as bench:
        timings = bench.timings(effort, effort.sizes)
    return MeasuredPath(HOST, "memory", place.index, tuple(timings), fit_rates(timings))


def measure_kernels(place: GpuPlace, path: MeasuredPath, effort: Effort) -> dict[str, Slowdown]:
    """By kind of kernel, the slowdown while the host tier's transfers run."""
    nbytes = max(
        (size for size in effort.sizes if size <= _SLOWDOWN_BYTES), default=effort.sizes[0]
    )
    with host_bench(place, max(effort.memory_bytes, 2 * nbytes)) as bench:
        return measure_slowdowns(bench, path.fit, nbytes, effort)


def measure_together(places: Sequence[GpuPlace]) -> Together | None:
    """All GPUs at once, and which of them share a link; None for one GPU."""
    if len(places) == 1:
        return None
    with ExitStack() as opened:
        benches = [
            opened.enter_context(host_bench(place, _TOGETHER_HALF_BYTES)) for place in places
        ]

        def rates_of(gpus: Sequence[int]) -> Sequence[Rates]:
            return rates_at_once([benches[gpu] for gpu in gpus], _TOGETHER_BYTES, _TOGETHER_COUNT)

        return find_links([rates_of([gpu])[0] for gpu in range(len(places))], rates_of)
