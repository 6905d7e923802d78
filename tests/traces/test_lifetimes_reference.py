"""Derived quantities against slow, obvious counting, on random traces with cyclic lifetimes."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teraio.contracts.plan import Accesses
from teraio.contracts.table import MISSING
from teraio.traces.lifetimes import (
    active_bytes,
    critical_pressure,
    inactive_periods,
    kernel_starts_seconds,
    live_bytes,
)
from teraio.traces.trace import Kernels, Storages, Trace, TraceMetadata

Period = tuple[int, int, int, int, float]
"""storage, after_kernel, before_kernel, end_kernel, seconds."""


def random_trace(seed: int) -> Trace:
    chance = random.Random(seed)
    num_kernels = chance.randint(1, 9)
    storages, accesses = [], []
    for s in range(chance.randint(0, 6)):
        is_persistent = chance.random() < 0.4
        birth = None if is_persistent else chance.randrange(num_kernels)
        life = num_kernels if birth is None else chance.randint(1, num_kernels)
        death = None if birth is None else (birth + life - 1) % num_kernels
        ordinal = None if birth is None else s
        nbytes = chance.randint(0, 100)
        storages.append((s, nbytes, nbytes + 5, "buffer", f"s{s}", birth, ordinal, death, "", True))
        for position in chance.sample(range(life), chance.randint(0, min(life, 4))):
            accesses.append((((birth or 0) + position) % num_kernels, s, True, False))
    not_collective = (None, None, None)
    kernels = [
        (k, "op", "", "other", None, chance.random(), gap, k % 3, k, 0, *not_collective)
        for k, gap in enumerate(chance.choices([0.0, 0.5], k=num_kernels))
    ]
    return Trace(
        kernels=Kernels.from_rows(kernels),
        storages=Storages.from_rows(storages),
        accesses=Accesses.from_rows(sorted(accesses)),
        metadata=TraceMetadata(source="fake"),
    )


def life_of(trace: Trace, storage: int) -> list[int]:
    """Kernels at which a storage is alive, from its birth on (persistent: from kernel 0)."""
    birth, death = int(trace.storages.birth[storage]), int(trace.storages.death[storage])
    if birth == MISSING:
        return list(range(trace.num_kernels))
    kernels = [birth]
    while kernels[-1] != death:
        kernels.append((kernels[-1] + 1) % trace.num_kernels)
    return kernels


def touches_of(trace: Trace, storage: int) -> set[int]:
    return set(trace.accesses.kernel[trace.accesses.storage == storage].tolist())


def slow_live_bytes(trace: Trace, sizes: np.ndarray) -> list[int]:
    live = [0] * trace.num_kernels
    for s in range(len(trace.storages)):
        for kernel in life_of(trace, s):
            live[kernel] += int(sizes[s])
    return live


def slow_periods(trace: Trace) -> list[Period]:
    """Walk from every access, kernel by kernel, to the next access or the end of life."""
    periods = []
    for s in range(len(trace.storages)):
        touches, life = touches_of(trace, s), life_of(trace, s)
        is_persistent = trace.storages.birth[s] == MISSING
        for start, after in enumerate(life):
            if after not in touches:
                continue
            inside, before = [], MISSING
            rest = life[start + 1 :] + (life[: start + 1] if is_persistent else [])
            for kernel in rest:
                if kernel in touches:
                    before = kernel
                    break
                inside.append(kernel)
            if not inside:
                continue
            periods.append(describe(trace, s, after, inside, before))
    return sorted(periods, key=lambda p: (p[1], p[0]))


def describe(trace: Trace, storage: int, after: int, inside: list[int], before: int) -> Period:
    gaps, durations = trace.kernels.gap_before_seconds, trace.kernels.duration_seconds
    seconds = float(sum(gaps[k] + durations[k] for k in inside))
    last = after + len(inside)
    if before == MISSING:
        return (storage, after, MISSING, last, seconds)
    return (storage, after, last + 1, last + 1, seconds + float(gaps[before]))


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_live_and_active_bytes_are_counted_right(seed: int) -> None:
    trace = random_trace(seed)
    storages = trace.storages
    assert live_bytes(trace).tolist() == slow_live_bytes(trace, storages.nbytes)
    allocated = slow_live_bytes(trace, storages.allocated_bytes)
    assert live_bytes(trace, allocated=True).tolist() == allocated
    active = [0] * trace.num_kernels
    for s in range(len(storages)):
        for kernel in touches_of(trace, s):
            active[kernel] += int(storages.nbytes[s])
    assert active_bytes(trace).tolist() == active
    used = [a + int(w) for a, w in zip(allocated, trace.kernels.workspace_bytes, strict=True)]
    assert trace.peak_allocated_bytes == max(used)
    assert critical_pressure(trace, 100).tolist() == [max(0, u - 100) for u in used]


@settings(max_examples=500, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_inactive_periods_are_those_that_one_walks_through(seed: int) -> None:
    trace = random_trace(seed)
    found = inactive_periods(trace)
    expected = slow_periods(trace)
    assert len(found) == len(expected)
    rows = zip(
        found.storage, found.after_kernel, found.before_kernel, found.end_kernel, strict=True
    )
    assert [tuple(int(x) for x in row) for row in rows] == [p[:4] for p in expected]
    assert found.seconds.tolist() == pytest.approx([p[4] for p in expected])
    assert found.is_tail.tolist() == [p[2] == MISSING for p in expected]


def test_periods_of_the_small_trace(small_trace: Trace) -> None:
    """Every kind once. Kernels take 1 ms after a gap of 0.1 ms; a period ends with the gap before
    the access that ends it, a tail with the kernel after which its storage is freed.
    """
    found = inactive_periods(small_trace)
    rows = list(
        zip(
            found.after_kernel.tolist(),
            found.storage.tolist(),
            found.before_kernel.tolist(),
            found.end_kernel.tolist(),
            strict=True,
        )
    )
    assert rows == [
        (1, 0, 5, 5),
        (1, 1, 4, 4),
        (3, 3, 6, 6),
        (4, 1, 7, 7),
        (4, 5, MISSING, 9),  # logits: freed after kernel 1 of the next iteration
        (5, 0, 9, 9),
        (5, 4, 11, 11),  # wrapping: read by kernel 3 of the next iteration
        (6, 2, 14, 14),  # state: accessed once, so away for the whole cycle but one kernel
        (6, 6, 14, 14),
        (7, 1, 9, 9),
    ]
    seconds = [3.4, 2.3, 2.3, 2.3, 5.5, 3.4, 5.6, 7.8, 7.8, 1.2]
    assert found.seconds.tolist() == pytest.approx([s * 1e-3 for s in seconds])


def test_starts_are_the_sums_of_gaps_and_durations(small_trace: Trace) -> None:
    starts = kernel_starts_seconds(small_trace)
    assert starts.tolist() == pytest.approx([k * 1.1e-3 for k in range(9)])
