"""Several GPUs at once: whose transfers slow down together share a link.

Two GPUs on one link halve each other's rate. If all together are slow and no two of them are, what
binds is the host's memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from teraio.executor.probing.transfers import TransferBench, seconds_per_transfer
from teraio.executor.stores import Transfer

Rates = Mapping[str, float]
"""Bytes per second by kind: read, write, duplex_read, duplex_write."""

_FALL = 0.1
"""Rates that fall by more than this share beside other GPUs' transfers are shared."""


@dataclass(frozen=True)
class LinkGroup:
    """GPUs (places in the list of measured ones) that share a link, and what it carries."""

    gpus: tuple[int, ...]
    rates: dict[str, float]


@dataclass(frozen=True)
class Together:
    """All GPUs at once: rates of each, the links found, and the host's limit if it is one.

    ``memory_rate`` is in bytes/s, both directions of all GPUs together.
    """

    rates: tuple[Rates, ...]
    links: tuple[LinkGroup, ...]
    memory_rate: float | None


def find_links(
    alone: Sequence[Rates], rates_of: Callable[[Sequence[int]], Sequence[Rates]]
) -> Together:
    """Group GPUs by link. ``rates_of(gpus)`` measures those GPUs while all of them transfer.

    Pairs are measured only among GPUs that slow down when all are active.
    """
    everyone = range(len(alone))
    together = tuple(rates_of(everyone))
    slow = [gpu for gpu in everyone if _falls(alone[gpu], together[gpu])]
    group_of = {gpu: {gpu} for gpu in everyone}
    for i, first in enumerate(slow):
        for second in slow[i + 1 :]:
            if group_of[first] is group_of[second]:
                continue
            beside = rates_of((first, second))
            if _falls(alone[first], beside[0]) and _falls(alone[second], beside[1]):
                merged = group_of[first] | group_of[second]
                group_of.update(dict.fromkeys(merged, merged))
    groups = sorted({tuple(sorted(group)) for group in group_of.values()})
    links = tuple(LinkGroup(group, _link_rates(group, alone, together)) for group in groups)
    is_host_bound = any(len(group_of[gpu]) == 1 for gpu in slow)
    return Together(together, links, _total_rate(together) if is_host_bound else None)


def _falls(alone: Rates, beside: Rates) -> bool:
    return any(beside[kind] < (1 - _FALL) * alone[kind] for kind in alone)


def _link_rates(
    group: Sequence[int], alone: Sequence[Rates], together: Sequence[Rates]
) -> dict[str, float]:
    """One GPU's own rates, or all that a shared link carried; never less than one GPU got."""
    if len(group) == 1:
        return dict(alone[group[0]])
    rates = {
        kind: max(sum(together[gpu][kind] for gpu in group), *(alone[gpu][kind] for gpu in group))
        for kind in alone[0]
    }
    for kind in ("read", "write"):
        rates[f"duplex_{kind}"] = min(rates[f"duplex_{kind}"], rates[kind])
    return rates


def _total_rate(together: Sequence[Rates]) -> float:
    """The most bytes per second that all GPUs moved at once."""
    kinds = (("read",), ("write",), ("duplex_read", "duplex_write"))
    return max(sum(rates[kind] for rates in together for kind in both) for both in kinds)


def rates_at_once(
    benches: Sequence[TransferBench], nbytes: int, count: int
) -> list[dict[str, float]]:
    """Rates of each bench while all of them transfer, each issued to by a thread of its own."""
    result: list[dict[str, float]] = [{} for _ in benches]
    for directions, prefix in (((False,), ""), ((True,), ""), ((False, True), "duplex_")):
        of_benches = _rows_at_once(benches, nbytes, count, directions)
        seconds = iter(seconds_per_transfer([row for rows in of_benches for row in rows]))
        for rates in result:
            for is_write in directions:
                rates[prefix + ("write" if is_write else "read")] = nbytes / next(seconds)
    return result


def _rows_at_once(
    benches: Sequence[TransferBench], nbytes: int, count: int, directions: Sequence[bool]
) -> list[list[list[Transfer]]]:
    barrier = threading.Barrier(len(benches))
    rows: dict[int, list[list[Transfer]]] = {}
    errors: list[BaseException] = []

    def work(index: int, bench: TransferBench) -> None:
        try:
            if torch.device(bench.device).type == "cuda":
                torch.cuda.set_device(bench.device)
            barrier.wait()
            issued = bench.issue_rows(nbytes, directions, [count] * len(directions))
            for row in issued:
                for transfer in row:
                    transfer.wait()
            rows[index] = issued
        except BaseException as error:  # Raised below, in the thread that asked.
            barrier.abort()
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=(index, bench), name=f"teraio-probe-{index}")
        for index, bench in enumerate(benches)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next(
            (e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0]
        )
    return [rows[index] for index in range(len(benches))]
