"""Small traces and machines for planners: by hand in units of bytes and seconds, and at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from teraio.contracts.hardware import Gpu, Hardware, Host, Link, Ssd
from teraio.contracts.plan import Accesses
from teraio.traces.trace import Kernels, Storages, Trace, TraceMetadata

PLENTY = 10**15


def _make_trace(
    seconds: Sequence[float],
    storages: Sequence[tuple[str, int, int | None, int | None]],
    accesses: Sequence[tuple[int, str, str]],
    resizable: bool = True,
) -> Trace:
    """A trace from durations, (name, bytes, birth, death), and (kernel, name, "r" | "w" | "rw")."""
    kernels = Kernels.from_rows(
        [
            (k, f"op{k}", None, "forward", 0, s, 0, 0, k, 0, None, None, None)
            for k, s in enumerate(seconds)
        ]
    )
    names = [name for name, *_ in storages]
    rows: list[tuple[Any, ...]] = []
    for index, (name, nbytes, birth, death) in enumerate(storages):
        kind = "parameter" if birth is None else "activation"
        ordinal = None if birth is None else index
        rows.append(
            (index, nbytes, nbytes, kind, name, birth, ordinal, death, "float32", resizable)
        )
    table = sorted((k, names.index(name), "r" in how, "w" in how) for k, name, how in accesses)
    return Trace(
        kernels=kernels,
        storages=Storages.from_rows(rows),
        accesses=Accesses.from_rows(table),
        metadata=TraceMetadata(source="fake"),
    )


def _make_hardware(
    gpu_bytes: int,
    ssd_rate: float = 100.0,
    host_bytes: int = PLENTY,
    host_rate: float = 100.0,
    num_ssds: int = 1,
    **ssd: Any,
) -> Hardware:
    """One GPU whose link is no limit; slots on SSDs need no alignment unless told otherwise."""
    ssd = {"capacity_bytes": PLENTY, "alignment_bytes": 1, "gds": True} | ssd
    return Hardware(
        name="test",
        gpu=(Gpu(name="gpu", memory_bytes=gpu_bytes, link="pcie"),),
        link=(Link(name="pcie", read_rate=1e9, write_rate=1e9),),
        host=Host(memory_bytes=host_bytes, read_rate=host_rate, write_rate=host_rate),
        ssd=tuple(
            Ssd(name=f"ssd{i}", read_rate=ssd_rate, write_rate=ssd_rate, **ssd)
            for i in range(num_ssds)
        ),
    )


def _random_trace(seed: int) -> Trace:
    """A cycle of up to 14 kernels; some lifetimes wrap, some storages are never written."""
    chance = random.Random(seed)
    num_kernels = chance.randint(3, 14)
    storages: list[tuple[str, int, int | None, int | None]] = []
    accesses: list[tuple[int, str, str]] = []
    for index in range(chance.randint(2, 12)):
        is_persistent = chance.random() < 0.5
        birth = None if is_persistent else chance.randrange(num_kernels)
        life = num_kernels if is_persistent else chance.randint(1, num_kernels)
        death = None if birth is None else (birth + life - 1) % num_kernels
        storages.append((f"s{index}", chance.randint(1, 90), birth, death))
        ways = chance.choice((["r"], ["r", "w", "rw"], ["r", "r", "r", "rw"]))
        for position in chance.sample(range(life), chance.randint(1, min(life, 5))):
            kernel = ((birth or 0) + position) % num_kernels
            accesses.append((kernel, f"s{index}", chance.choice(ways)))
    seconds = [chance.choice((0.0, 0.1, 0.5, 1.0)) for _ in range(num_kernels)]
    return _make_trace(seconds, storages, accesses)


@pytest.fixture(scope="session")
def make_trace() -> Callable[..., Trace]:
    """See :func:`_make_trace`."""
    return _make_trace


@pytest.fixture(scope="session")
def make_hardware() -> Callable[..., Hardware]:
    """See :func:`_make_hardware`."""
    return _make_hardware


@pytest.fixture(scope="session")
def random_trace() -> Callable[[int], Trace]:
    """See :func:`_random_trace`."""
    return _random_trace


@pytest.fixture(scope="session")
def one_tensor(make_trace: Callable[..., Trace]) -> Trace:
    """Six kernels of 1 s. A (100 B) is made by 0 and read by 5; B (100 B) lives in 2 and 3."""
    return make_trace(
        [1.0] * 6,
        [("A", 100, 0, 5), ("B", 100, 2, 3)],
        [(0, "A", "w"), (5, "A", "r"), (2, "B", "w"), (3, "B", "r")],
    )


@pytest.fixture(scope="session")
def import_g10() -> Callable[[Path], Trace]:
    """The importer of G10's traces, each file read once."""
    from teraio.traces.importers.g10 import import_g10

    return lru_cache(maxsize=None)(import_g10)
