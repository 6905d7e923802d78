"""Problems and choices at random for tests of the optimal planner."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from tests.planner.repeating_traces import repeating_trace

from teraio.contracts.hardware import Gpu, Hardware, Host, Link, Slowdown, Ssd
from teraio.contracts.table import IntArray
from teraio.planner.optimal.periods import STAYS, Problem
from teraio.traces.trace import Trace

PLENTY = 10**12
SHARES = (0.0, 0.1, 0.3, 0.6, 0.9)
"""Between what the largest kernel needs and what all storages together need."""


class Case(NamedTuple):
    """A trace and a machine on which something must move, unless it is lucky."""

    trace: Trace
    hardware: Hardware


def random_case(seed: int, random_trace: Callable[[int], Trace]) -> Case:
    """A cycle of any shape or of micro-batches, on a machine of any shape with enough room."""
    chance = random.Random(seed)
    if chance.random() < 0.6:
        trace = random_trace(seed)
    else:
        trace = of_micro_batches(seed, chance.choice((1, 3, 7)), chance.choice((0.0, 0.1)))
    return Case(trace, random_hardware(chance, random_budget(trace, chance)))


def of_micro_batches(seed: int, micro_batches: int, noise: float = 0.0) -> Trace:
    """A trace that says how many micro-batches it has."""
    trace = repeating_trace(seed, micro_batches, noise)
    return replace(trace, metadata=replace(trace.metadata, micro_batches=micro_batches))


def random_budget(trace: Trace, chance: random.Random) -> int:
    """Bytes of a GPU on which every kernel can run."""
    least = least_bytes(trace)
    return max(1, least + int(chance.choice(SHARES) * (trace.peak_allocated_bytes - least)))


def least_bytes(trace: Trace) -> int:
    """What the largest kernel finds when all is away that can be."""
    plain = Hardware(
        name="plain",
        gpu=(Gpu(name="gpu", memory_bytes=PLENTY, link="pcie"),),
        link=(Link(name="pcie", read_rate=1.0, write_rate=1.0),),
        host=Host(memory_bytes=PLENTY, read_rate=1.0, write_rate=1.0),
    )
    problem = Problem.of(trace, plain)
    rows = np.arange(len(problem.period))
    left = problem.resident_with(rows, problem.away_first, problem.away_end)
    return int(left.max())


def random_hardware(chance: random.Random, gpu_bytes: int) -> Hardware:
    """Host or not, up to two SSDs with or without GPUDirect Storage, duplex limits, latency, a link
    that limits, slowdown of kernels.
    """

    def rates() -> dict[str, Any]:
        read, write = (float(chance.choice((5, 20, 100, 1000))) for _ in range(2))
        both = chance.choice((0.5, 0.7, 1.0))
        return {
            "read_rate": read,
            "write_rate": write,
            "duplex_read_rate": both * read,
            "duplex_write_rate": both * write,
            "latency_seconds": chance.choice((0.0, 0.0, 0.05)),
        }

    num_ssds = chance.choice((0, 1, 1, 2))
    link_rate = chance.choice((1e9, 1e9, 30.0))
    gds = [chance.random() < 0.6 for _ in range(num_ssds)]
    return Hardware(
        name="random",
        gpu=(Gpu(name="gpu", memory_bytes=gpu_bytes, link="pcie"),),
        link=(Link(name="pcie", read_rate=link_rate, write_rate=link_rate),),
        host=Host(
            memory_bytes=PLENTY if num_ssds == 0 else chance.choice((64 * num_ssds, 2000, PLENTY)),
            memory_rate=chance.choice((None, 50.0)),
            **rates(),
        ),
        ssd=tuple(
            Ssd(
                name=f"ssd{i}",
                capacity_bytes=PLENTY,
                alignment_bytes=chance.choice((1, 16)),
                gds=gds[i],
                bounce_bytes=0 if gds[i] else 64,
                **rates(),
            )
            for i in range(num_ssds)
        ),
        slowdown=chance.choice((Slowdown(), Slowdown(read=1.1, write=1.05, both=1.2))),
    )


def random_choice(problem: Problem, seed: int, share: float = 0.5) -> IntArray:
    """About so many of the rows go anywhere."""
    chance = np.random.default_rng(seed)
    device = chance.integers(0, len(problem.machine.devices), len(problem.period))
    return np.where(chance.random(len(device)) < share, device, STAYS)
