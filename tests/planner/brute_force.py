"""The best plan of a tiny instance, by trying every plan. Shares no code with planner or simulator.

Written from DESIGN, sections 6 and 7, for one GPU whose transfers never slow each other down. A
plan is a choice of (device, offload_start, free_by, prefetch_start) or "stays" for every inactive
period, and an order of rows where that matters. Its iteration time is found by playing the waits
until they repeat. All times are whole ticks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, permutations, product
from typing import NamedTuple

import numba
import numpy as np

from teraio.contracts.hardware import Hardware, Host, Ssd
from teraio.contracts.plan import Moves
from teraio.contracts.table import FloatArray, IntArray
from teraio.traces.trace import Storages, Trace

MOST_ITERATIONS = 64
STAYS = -1

DURATION, GAP, NEEDED = 0, 1, 2
"""Rows of ``Problem.kernels``."""

STORAGE, AFTER, END, IS_TAIL, PREVIOUS, IS_UNWRITTEN, SIZE = 0, 1, 2, 3, 4, 5, 6
"""Columns of ``Problem.periods``."""


class Problem(NamedTuple):
    """``kernels`` (3, K): duration and gap in ticks, bytes that must be away.

    ``periods`` (periods, 7): storage, last access before and next access (unrolled; of a tail the
    kernel after its death), whether a tail, the period before in the same version or -1, whether
    no kernel writes the storage, bytes. ``ticks`` (2, periods, devices) of offloads and prefetches.
    """

    kernels: IntArray
    periods: IntArray
    ticks: IntArray


@dataclass(frozen=True)
class Best:
    """Ticks per iteration, as ``ticks / iterations``; ``windows`` are rows (device, offload_start,
    free_by, prefetch_start) per period, ``rank`` the order of rows; ``tried`` plans that fit.
    """

    ticks: int
    iterations: int
    windows: IntArray
    rank: IntArray
    tried: int


def pose(trace: Trace, hardware: Hardware, ticks_per_second: int = 1) -> tuple[Problem, list[str]]:
    """The problem of a trace whose every time is a whole number of ticks; and the device names."""
    kernels, storages = trace.kernels, trace.storages
    K = len(kernels)
    needed = kernels.workspace_bytes - hardware.gpu[0].memory_bytes
    for s in range(len(storages)):
        for k in range(K):
            needed[k] += int(storages.allocated_bytes[s]) * _is_alive(storages, s, k, K)
    rows: list[tuple[int, ...]] = []
    for s in range(len(storages)):
        if storages.resizable[s]:
            rows += _periods_of(trace, s, len(rows))
    table = np.array(rows, dtype=np.int64).reshape(-1, 6)
    sizes = storages.nbytes[table[:, STORAGE]]
    devices: list[tuple[str, Host | Ssd]] = [(ssd.name, ssd) for ssd in hardware.ssd]
    if hardware.host.memory_bytes > 0:
        devices.insert(0, ("host", hardware.host))
    ticks = [
        [_whole((part.latency_seconds + sizes / rate) * ticks_per_second) for rate in rates]
        for rates, part in (((part.write_rate, part.read_rate), part) for _, part in devices)
    ]
    times = (kernels.duration_seconds, kernels.gap_before_seconds)
    problem = Problem(
        kernels=np.stack([*(_whole(seconds * ticks_per_second) for seconds in times), needed]),
        periods=np.column_stack([table, storages.allocated_bytes[table[:, STORAGE]]]),
        ticks=np.ascontiguousarray(np.array(ticks).transpose(1, 2, 0)),
    )
    return problem, [name for name, _ in devices]


def _whole(times: FloatArray) -> IntArray:
    whole = np.rint(times).astype(np.int64)
    assert np.allclose(whole, times), "times must be whole ticks"
    return whole


def _is_alive(storages: Storages, s: int, k: int, K: int) -> bool:
    birth, death = int(storages.birth[s]), int(storages.death[s])
    return birth < 0 or (k - birth) % K <= (death - birth) % K


def _periods_of(trace: Trace, s: int, number: int) -> list[tuple[int, ...]]:
    """Rows (storage, after, end, is_tail, previous, is_unwritten), going through a life in time."""
    K, birth, death = trace.num_kernels, int(trace.storages.birth[s]), int(trace.storages.death[s])
    mine = trace.accesses.storage == s
    written = dict(
        zip(trace.accesses.kernel[mine].tolist(), trace.accesses.writes[mine].tolist(), strict=True)
    )
    is_persistent, is_unwritten = birth < 0, birth < 0 and not any(written.values())
    start = 0 if is_persistent else birth
    if is_persistent and not is_unwritten:
        # Any write will do: the version begins there, so no copy is kept across it.
        start = min(k for k, w in written.items() if w)
    order = sorted(written, key=lambda k: (k - start) % K)
    rows: list[tuple[int, ...]] = []
    previous = -1
    for i, after in enumerate(order):
        if written[after]:
            previous = -1
        is_last = i == len(order) - 1
        is_tail = is_last and not is_persistent
        if is_tail:
            end = after + (death - after) % K + 1
        else:
            following = order[0] if is_last else order[i + 1]
            end = after + 1 + (following - after - 1) % K
        if end - after < 2:
            continue
        rows.append((s, after, end, is_tail, previous, is_unwritten))
        previous = number + len(rows) - 1
    return rows


def best_plan(problem: Problem, most: int = 10**7) -> Best | None:
    """The fastest plan that fits; None if none does. Refuses more than ``most`` combinations."""
    options, first = options_of(problem)
    sizes = np.diff(first)
    assert np.prod(sizes.astype(float)) <= most, "too many plans to try"
    orders = list(permutations(range(len(sizes))))
    ranks = np.array(orders, dtype=np.int64).reshape(len(orders), len(sizes))
    found, ticks, iterations, chosen, rank, tried = _search(problem, options, first, ranks)
    if not found:
        return None
    return Best(ticks, iterations, options[chosen], rank, tried)


def moves_of(
    trace: Trace, problem: Problem, devices: list[str], windows: IntArray, rank: IntArray
) -> Moves:
    """The table of moves of windows and an order of rows; copies and offsets are still open."""
    K = trace.num_kernels
    rows = []
    for p in np.argsort(rank):
        storage, after, end, is_tail = problem.periods[p, :4].tolist()
        device, offload, free, back = windows[p].tolist()
        if device == STAYS:
            continue
        name = devices[device]
        rows.append(
            (
                storage,
                after,
                None if is_tail else end % K,
                offload % K,
                free % K,
                None if is_tail else back % K,
                "host" if name == "host" else "ssd",
                name,
                0,
                int(trace.storages.nbytes[storage]),
                True,
            )
        )
    return Moves.from_rows(rows)


def num_plans(problem: Problem) -> float:
    """Combinations, of which many do not fit."""
    _, first = options_of(problem)
    return float(np.prod(np.diff(first).astype(float)))


def options_of(problem: Problem) -> tuple[IntArray, IntArray]:
    """All (device, offload_start, free_by, prefetch_start) of each period, "stays" first."""
    rows, first = [], [0]
    for p in range(len(problem.periods)):
        after, end = int(problem.periods[p, AFTER]), int(problem.periods[p, END])
        rows.append((STAYS, 0, 0, 0))
        for offload in range(after, end):
            for free in range(offload + 1, end):
                backs = [end] if problem.periods[p, IS_TAIL] else range(free + 1, end + 1)
                rows += [
                    (v, offload, free, b) for v in range(problem.ticks.shape[2]) for b in backs
                ]
        first.append(len(rows))
    return np.array(rows, dtype=np.int64).reshape(-1, 4), np.array(first)


@numba.njit(cache=True)
def _search(
    problem: Problem, options: IntArray, first: IntArray, ranks: IntArray
) -> tuple[bool, int, int, IntArray, IntArray, int]:
    """Count through all combinations, the last period fastest."""
    P = len(problem.periods)
    ideal = 0
    for k in range(problem.kernels.shape[1]):
        ideal += problem.kernels[DURATION, k] + problem.kernels[GAP, k]
    chosen = first[:-1].copy()
    windows = np.zeros((P, 4), dtype=np.int64)
    writes, ties = np.zeros(P, dtype=np.int64), np.zeros(P, dtype=np.int64)
    best_chosen, best_rank = chosen.copy(), ranks[0].copy()
    found, best_ticks, best_iterations, tried = False, 0, 1, 0
    while not (found and best_ticks == ideal * best_iterations):
        for p in range(P):
            for i in range(4):
                windows[p, i] = options[chosen[p], i]
        if fits(problem, windows):
            tried += 1
            set_writing(problem, windows, writes)
            # The first order is that of the numbers themselves.
            count = len(ranks) if set_ties(problem, windows, writes, ties) else 1
            for rank in ranks[:count]:
                if not is_of_interest(ties, rank):
                    continue
                ticks, iterations = play(problem, windows, writes, rank)
                if not found or ticks * best_iterations < best_ticks * iterations:
                    found, best_ticks, best_iterations = True, ticks, iterations
                    best_chosen[:] = chosen
                    best_rank[:] = rank
        p = P - 1
        while p >= 0 and chosen[p] == first[p + 1] - 1:
            chosen[p] = first[p]
            p -= 1
        if p < 0:
            break
        chosen[p] += 1
    return found, best_ticks, best_iterations, best_chosen, best_rank, tried


def all_fitting(problem: Problem) -> Iterator[tuple[IntArray, IntArray]]:
    """Windows and orders of rows of every plan that fits, for a judge of one's own."""
    options, first = options_of(problem)
    count = len(first) - 1
    orders = np.array(list(permutations(range(count))), dtype=np.int64)
    for chosen in product(*(range(*pair) for pair in pairwise(first.tolist()))):
        windows = options[list(chosen)]
        if fits(problem, windows):
            writes, ties = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
            set_writing(problem, windows, writes)
            set_ties(problem, windows, writes, ties)
            for rank in orders:
                if is_of_interest(ties, rank):
                    yield windows, rank


@numba.njit(cache=True)
def fits(problem: Problem, windows: IntArray) -> bool:
    """Whether enough is away in every kernel."""
    K = problem.kernels.shape[1]
    for kernel in range(K):
        away = 0
        for p in range(len(windows)):
            # A window lies in at most two iterations.
            for k in (kernel, kernel + K):
                if windows[p, 0] != STAYS and windows[p, 2] <= k < windows[p, 3]:
                    away += problem.periods[p, SIZE]
        if away < problem.kernels[NEEDED, kernel]:
            return False
    return True


@numba.njit(cache=True)
def set_writing(problem: Problem, windows: IntArray, writes: IntArray) -> None:
    """1 for the periods that write: the last move of the version was not to the same device."""
    for p in range(len(windows)):
        writes[p] = 0
        if windows[p, 0] == STAYS or problem.periods[p, IS_UNWRITTEN]:
            continue
        q = problem.periods[p, PREVIOUS]
        while q >= 0 and windows[q, 0] == STAYS:
            q = problem.periods[q, PREVIOUS]
        if q < 0 or windows[q, 0] != windows[p, 0]:
            writes[p] = 1


@numba.njit(cache=True)
def key_of(K: int, trigger: int, other_end: int) -> int:
    """Order of a channel within the iteration in which a transfer is triggered."""
    shift = trigger // K
    return int((trigger % K) * 4 * K + other_end - shift * K + 2 * K)


@numba.njit(cache=True)
def set_ties(problem: Problem, windows: IntArray, writes: IntArray, ties: IntArray) -> int:
    """1 for the moves that differ from another of their channel by rows only; their number."""
    count = 0
    for p in range(len(windows)):
        ties[p] = 1 if is_tied(problem, windows, writes, p) else 0
        count += ties[p]
    return count


@numba.njit(cache=True)
def is_of_interest(ties: IntArray, rank: IntArray) -> bool:
    """Whether only those moves change places."""
    num_strangers = 0
    for p in range(len(rank)):
        num_strangers += 1 if rank[p] != p and not ties[p] else 0
    return num_strangers == 0


@numba.njit(cache=True)
def is_tied(problem: Problem, windows: IntArray, writes: IntArray, p: int) -> bool:
    """Whether the rows order p and another move."""
    K = problem.kernels.shape[1]
    for q in range(len(windows)):
        if q == p or windows[p, 0] != windows[q, 0] or windows[p, 0] == STAYS:
            continue
        one = key_of(K, windows[p, 1], problem.periods[p, AFTER])
        if writes[p] and writes[q] and one == key_of(K, windows[q, 1], problem.periods[q, AFTER]):
            return True
        one, reads = (
            key_of(K, windows[p, 3], problem.periods[p, END]),
            not problem.periods[p, IS_TAIL],
        )
        if (
            reads
            and not problem.periods[q, IS_TAIL]
            and one == key_of(K, windows[q, 3], problem.periods[q, END])
        ):
            return True
    return False


@numba.njit(cache=True)
def sort_by(keys: IntArray, order: IntArray) -> None:
    """The numbers of the keys in their order."""
    for i in range(len(keys)):
        place = i
        while place > 0 and keys[order[place - 1]] > keys[i]:
            order[place] = order[place - 1]
            place -= 1
        order[place] = i


@numba.njit(cache=True)
def play(problem: Problem, windows: IntArray, writes: IntArray, rank: IntArray) -> tuple[int, int]:
    """Ticks of one turn of the steady cycle, and its iterations."""
    K, P, D = problem.kernels.shape[1], len(windows), problem.ticks.shape[2]
    # Keys of both directions; -1 where nothing is transferred.
    keys = np.full((2, P), -1, dtype=np.int64)
    for p in range(P):
        if windows[p, 0] != STAYS:
            if writes[p]:
                keys[0, p] = key_of(K, windows[p, 1], problem.periods[p, AFTER]) * P + rank[p]
            if not problem.periods[p, IS_TAIL]:
                keys[1, p] = key_of(K, windows[p, 3], problem.periods[p, END]) * P + rank[p]
    order = np.zeros((2, P), dtype=np.int64)
    sort_by(keys[0], order[0])
    sort_by(keys[1], order[1])
    # When the transfers end, of each direction and period, then until when each device is busy.
    ends = np.zeros((2, P + D), dtype=np.int64)
    states = np.zeros((MOST_ITERATIONS, 2, P + D), dtype=np.int64)
    times = np.zeros(MOST_ITERATIONS, dtype=np.int64)
    now = 0
    for iteration in range(MOST_ITERATIONS):
        for k in range(K):
            opened = now
            for p in range(P):
                if keys[0, p] >= 0 and windows[p, 2] % K == k:
                    opened = max(opened, ends[0, p])
            for p in order[1]:
                if keys[1, p] >= 0 and windows[p, 3] % K == k:
                    v = windows[p, 0]
                    ends[1, p] = max(ends[1, P + v], opened) + problem.ticks[1, p, v]
                    ends[1, P + v] = ends[1, p]
            start = max(opened, now + problem.kernels[GAP, k])
            for p in range(P):
                if keys[1, p] >= 0 and problem.periods[p, END] % K == k:
                    start = max(start, ends[1, p])
            now = start + problem.kernels[DURATION, k]
            for p in order[0]:
                if keys[0, p] >= 0 and windows[p, 1] % K == k:
                    v = windows[p, 0]
                    ends[0, p] = max(ends[0, P + v], now) + problem.ticks[0, p, v]
                    ends[0, P + v] = ends[0, p]
        times[iteration] = now
        for way in range(2):
            for i in range(P + D):
                states[iteration, way, i] = max(ends[way, i] - now, 0)
        for before in range(iteration):
            if is_same(states[before], states[iteration]):
                return now - times[before], iteration - before
    raise ValueError("not steady")


@numba.njit(cache=True)
def is_same(one: IntArray, other: IntArray) -> bool:
    """Whether two states are equal."""
    for way in range(2):
        for i in range(one.shape[1]):
            if one[way, i] != other[way, i]:
                return False
    return True
