"""Plans for several ranks of one training: each rank against its fair share of the machine.

What ranks of a node share is divided evenly beforehand, so that their plans hold whatever the
others do at the moment: host memory and its bandwidth among all ranks of the node, an SSD (rates
and capacity) among the ranks whose GPUs reach it, a link among those whose GPUs hang on it. The
host tier's transfer rates are those of one GPU, as measured through its link. Each rank has a file
of its own on an SSD, so offsets never meet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from teraio.contracts.hardware import (
    HOST_ALIGNMENT_BYTES,
    Hardware,
    Link,
    Ssd,
    as_hardware,
)
from teraio.contracts.plan import Plan
from teraio.errors import InputError
from teraio.planner.planning import plan
from teraio.traces.trace import Trace, as_trace


def plan_ranks(
    traces: Iterable[Trace | str | Path],
    hardware: Hardware | str | Path,
    *,
    host_memory: int | str | None = None,
    ranks_per_node: int | None = None,
    **options: Any,
) -> list[Plan]:
    """One plan for each trace, in their order; ``options`` are those of :func:`plan`.

    The traces are of different ranks of one training; those of some ranks may be missing.
    ``host_memory`` is what all ranks of a node may use together, ``gpu_memory`` what each may. The
    share of a rank: :func:`share_of_rank`. Raises what ``plan`` raises, InputError for traces that
    do not belong together.
    """
    loaded = [as_trace(trace) for trace in traces]
    world_size = _world_size(loaded)
    whole = as_hardware(hardware).with_budgets(host_memory=host_memory)
    shares = [
        share_of_rank(whole, trace.metadata.rank, world_size, ranks_per_node) for trace in loaded
    ]
    return [plan(trace, share, **options) for trace, share in zip(loaded, shares, strict=True)]


def share_of_rank(
    hardware: Hardware, rank: int, world_size: int, ranks_per_node: int | None = None
) -> Hardware:
    """The machine as one rank may count on it: see the module's docstring.

    ``ranks_per_node`` defaults to all ranks, or where the node has several GPUs and there are more
    ranks than that, to their number. If more ranks run on a node than it lists GPUs, each has a GPU
    and link of its own like the one listed. Raises InputError for numbers that cannot be.
    """
    num_gpus = len(hardware.gpu)
    count = ranks_per_node
    if count is None:
        count = num_gpus if 1 < num_gpus < world_size else world_size
    if not 0 <= rank < world_size:
        raise InputError(f"rank: must be in 0..{world_size - 1}, got {rank}")
    if count < min(num_gpus, world_size) or count > world_size:
        raise InputError(
            f"ranks_per_node: {world_size} ranks on nodes of {num_gpus} GPUs are at least "
            f"{min(num_gpus, world_size)} and at most {world_size} on a node, got {count}; list "
            "only the GPUs in use in the hardware file"
        )
    host = hardware.host
    own_link = hardware.gpu_of_rank(rank).link
    return replace(
        hardware,
        host=replace(
            host,
            memory_bytes=_even_share(host.memory_bytes, count, HOST_ALIGNMENT_BYTES),
            memory_rate=None if host.memory_rate is None else host.memory_rate / count,
        ),
        link=tuple(
            _share_of_link(hardware, link, count) if link.name == own_link else link
            for link in hardware.link
        ),
        ssd=tuple(_share_of_ssd(hardware, ssd, count) for ssd in hardware.ssd),
    )


def _world_size(traces: list[Trace]) -> int:
    if not traces:
        raise InputError("traces: give at least one")
    sizes = sorted({trace.metadata.world_size for trace in traces})
    ranks = sorted(trace.metadata.rank for trace in traces)
    if len(sizes) > 1:
        raise InputError(f"traces: recorded among different numbers of ranks: {sizes}")
    twice = [rank for i, rank in enumerate(ranks) if i and ranks[i - 1] == rank]
    if twice:
        raise InputError(f"traces: several are of rank {twice[0]}; give one of each rank")
    return sizes[0]


def _share_of_link(hardware: Hardware, link: Link, count: int) -> Link:
    gpus = range(min(count, len(hardware.gpu)))
    sharers = sum(hardware.gpu[index].link == link.name for index in gpus)
    return replace(link, **_divided_rates(link, sharers))


def _share_of_ssd(hardware: Hardware, ssd: Ssd, count: int) -> Ssd:
    num_gpus = len(hardware.gpu)
    sharers = sum(not ssd.gpus or rank % num_gpus in ssd.gpus for rank in range(count))
    if sharers <= 1:
        return ssd
    capacity = _even_share(ssd.capacity_bytes, sharers, ssd.alignment_bytes)
    return replace(ssd, capacity_bytes=capacity, **_divided_rates(ssd, sharers))


def _divided_rates(device: Link | Ssd, sharers: int) -> dict[str, Any]:
    names = ("read_rate", "write_rate", "duplex_read_rate", "duplex_write_rate")
    return {name: getattr(device, name) / max(sharers, 1) for name in names}


def _even_share(nbytes: int, count: int, alignment_bytes: int) -> int:
    share = nbytes // count
    return share - share % alignment_bytes
