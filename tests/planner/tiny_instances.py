"""Random instances small enough to try every plan: whole times, sizes and rates."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.planner.brute_force import NEEDED, Problem, num_plans, pose

from teraio.contracts.hardware import Gpu, Hardware, Host, Link, Ssd
from teraio.contracts.plan import Accesses
from teraio.simulator.trace_arrays import residency
from teraio.traces.trace import Kernels, Storages, Trace, TraceMetadata

PLENTY = 10**12


class Tiny(NamedTuple):
    """An instance, as teraio takes it and as the search through all plans does."""

    seed: int
    trace: Trace
    hardware: Hardware
    problem: Problem
    devices: list[str]


def tiny_instances(first_seed: int, count: int, most_plans: float) -> Iterator[Tiny]:
    """``count`` instances that need to move something, of at most so many plans."""
    seed = first_seed
    while count > 0:
        chance = random.Random(seed)
        trace = tiny_trace(chance)
        least = int(residency(trace).required_bytes.max())
        room = trace.peak_allocated_bytes - least
        gpu_bytes = least + int(room * chance.random())
        hardware = tiny_hardware(chance, gpu_bytes, chance.choice((1, 2)))
        problem, devices = pose(trace, hardware)
        if problem.kernels[NEEDED].max() > 0 and num_plans(problem) <= most_plans:
            yield Tiny(seed, trace, hardware, problem, devices)
            count -= 1
        seed += 1


def tiny_trace(chance: random.Random) -> Trace:
    """4 to 7 kernels; 1 to 3 storages that move; others that only take room."""
    num_kernels = chance.randint(4, 7)
    rows: list[tuple[Any, ...]] = []
    accesses: list[tuple[int, int, bool, bool]] = []
    for s in range(chance.randint(1, 3)):
        is_persistent = chance.random() < 0.5
        birth = None if is_persistent else chance.randrange(num_kernels)
        life = num_kernels if is_persistent else chance.randint(3, num_kernels)
        death = None if birth is None else (birth + life - 1) % num_kernels
        ways = chance.choice(((False,), (True, False), (False, False, True)))
        touched = chance.sample(range(life), chance.randint(1, min(life, 3)))
        rows.append(_storage(s, 4 * chance.randint(1, 5), birth, death, True))
        for position in touched:
            kernel = ((birth or 0) + position) % num_kernels
            accesses.append((kernel, s, True, chance.choice(ways)))
    for s in range(len(rows), len(rows) + chance.randint(1, 3)):
        birth = chance.randrange(num_kernels)
        death = (birth + chance.randint(0, 1)) % num_kernels
        rows.append(_storage(s, 4 * chance.randint(1, 5), birth, death, False))
        accesses.append((birth, s, False, True))
    seconds = [
        (float(chance.randint(0, 5)), float(chance.choice((0, 0, 0, 1))))
        for _ in range(num_kernels)
    ]
    kernels = Kernels.from_rows(
        [
            (
                k,
                f"op{k}",
                None,
                "forward",
                0,
                *times,
                chance.choice((0, 0, 4)),
                k,
                0,
                None,
                None,
                None,
            )
            for k, times in enumerate(seconds)
        ]
    )
    return Trace(
        kernels=kernels,
        storages=Storages.from_rows(rows),
        accesses=Accesses.from_rows(sorted(accesses)),
        metadata=TraceMetadata(source="fake"),
    )


def _storage(
    s: int, nbytes: int, birth: int | None, death: int | None, resizable: bool
) -> tuple[Any, ...]:
    kind = "parameter" if birth is None else "activation"
    return (s, nbytes, nbytes, kind, f"s{s}", birth, s, death, "float32", resizable)


def tiny_hardware(chance: random.Random, gpu_bytes: int, num_tiers: int) -> Hardware:
    """One SSD, with two tiers a host as well; the link is no limit, every time is whole."""
    rates = [float(chance.choice((1, 2, 4))) for _ in range(4)]
    host_bytes = PLENTY if num_tiers == 2 else 0
    latency = float(chance.choice((0, 0, 1)))
    return Hardware(
        name="tiny",
        gpu=(Gpu(name="gpu", memory_bytes=gpu_bytes, link="pcie"),),
        link=(Link(name="pcie", read_rate=1e9, write_rate=1e9),),
        host=Host(memory_bytes=host_bytes, read_rate=rates[0], write_rate=rates[1]),
        ssd=(
            Ssd(
                name="ssd0",
                read_rate=rates[2],
                write_rate=rates[3],
                latency_seconds=latency,
                capacity_bytes=PLENTY,
                alignment_bytes=1,
                gds=True,
            ),
        ),
    )
