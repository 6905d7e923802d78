"""Random small cycles, and plans for them that are right by construction."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
from tests.planner.plan_machine import Machine, Window, following, windows_of

from teraio.contracts.plan import (
    Accesses,
    Copies,
    Moves,
    Plan,
    PlanKernels,
    PlanMetadata,
    PlanStorages,
)
from teraio.contracts.table import MISSING

TIER = {"host": "host", "near": "ssd"}


def random_cycle(chance: random.Random) -> tuple[PlanKernels, PlanStorages, Accesses]:
    """Kernels, storages (without placement) and accesses."""
    num_kernels = chance.randint(3, 10)
    rows, accesses = [], []
    for s in range(chance.randint(1, 6)):
        is_persistent = chance.random() < 0.5
        birth = None if is_persistent else chance.randrange(num_kernels)
        life = num_kernels if is_persistent else chance.randint(1, num_kernels)
        death = None if birth is None else (birth + life - 1) % num_kernels
        ordinal = None if is_persistent else s
        nbytes = chance.randint(1, 9000)
        rows.append((s, f"s{s}", "buffer", birth, ordinal, death, nbytes, nbytes + 7, "", "", None))
        is_written = chance.random() < 0.7
        for position in sorted(chance.sample(range(life), chance.randint(1, min(life, 4)))):
            kernel = ((birth or 0) + position) % num_kernels
            accesses.append((kernel, s, True, is_written and chance.random() < 0.4))
    kernels = PlanKernels.from_rows(
        [(k, f"op{k}", k, "other", "", chance.randint(0, 50)) for k in range(num_kernels)]
    )
    return kernels, PlanStorages.from_rows(rows), Accesses.from_rows(sorted(accesses))


def random_moves(plan: Plan, chance: random.Random) -> Moves:
    """Some inactive periods leave, each storage to at most two places of its own."""
    num_kernels, storages = len(plan.kernels), plan.storages
    end_of = {"host": 0, "near": 0}
    rows: list[tuple[Any, ...]] = []
    for s in range(len(storages)):
        birth = int(storages.birth[s])
        touches = plan.accesses.kernel[plan.accesses.storage == s]
        touches = touches[np.argsort((touches - max(birth, 0)) % num_kernels)].tolist()
        places = {}
        for device, unit in (("host", 512), ("near", 4096)):
            places[device] = end_of[device]
            end_of[device] += -(-int(storages.nbytes[s]) // unit) * unit
        for after, before in zip(touches, [*touches[1:], touches[0]], strict=True):
            is_tail = birth >= 0 and after == touches[-1]
            if is_tail:
                end = following(int(storages.death[s]), after, num_kernels)
            else:
                end = following(before, after + 1, num_kernels)
            kernels = random_window(after, end, is_tail, num_kernels, chance)
            if kernels:
                device = chance.choice(["host", "near"])
                nbytes = int(storages.nbytes[s])
                rows.append((s, *kernels, TIER[device], device, places[device], nbytes, True))
    chance.shuffle(rows)
    return Moves.from_rows(rows)


def random_window(
    after: int, end: int, is_tail: bool, num_kernels: int, chance: random.Random
) -> tuple[int | None, ...] | None:
    """after_kernel, before_kernel, offload_start, free_by, prefetch_start; or no move at all."""
    least = 1 if is_tail else 2
    if end - after < least or chance.random() < 0.3:
        return None
    offload = chance.randint(after, end - least)
    free_by = chance.randint(offload + 1, end - least + 1)
    if is_tail:
        return (after, None, offload % num_kernels, free_by % num_kernels, None)
    prefetch = chance.randint(free_by + 1, end)
    return (
        after,
        end % num_kernels,
        offload % num_kernels,
        free_by % num_kernels,
        prefetch % num_kernels,
    )


def reuse_copies(plan: Plan, chance: random.Random) -> Plan:
    """Turn writes into reuse, one after another, where looking back through time allows it."""
    for row in range(len(plan.moves)):
        if chance.random() < 0.7 and has_clean_copy(plan, row):
            writes = plan.moves.writes.copy()
            writes[row] = False
            plan = replace(plan, moves=replace(plan.moves, writes=writes))
    return plan


def has_clean_copy(plan: Plan, row: int) -> bool:
    """Look back kernel by kernel from the last access, for at most one iteration."""
    num_kernels, windows = len(plan.kernels), windows_of(plan)
    mine = windows[row]
    others = {w.after: w for w in windows if w.place == mine.place and w.row != row}
    accesses = plan.accesses
    written_by = set(accesses.kernel[(accesses.storage == mine.storage) & accesses.writes].tolist())
    birth = int(plan.storages.birth[mine.storage])
    if birth < 0 and not written_by and not any(w.writes for w in others.values()):
        return True
    users = [w for w in others.values() if not w.writes]
    if users:
        return False  # Keep the chain simple: somebody may rest on this very copy.
    for back in range(num_kernels):
        kernel = (mine.after - back) % num_kernels
        if back and kernel in others:
            return True
        if kernel in written_by or kernel == birth:
            return False
    return False


def with_start(plan: Plan) -> Plan:
    """Placement and copies as the machine has them after two iterations, if the start is empty.

    A copy is listed if a move that frees the GPU after the cut rests on what it holds at the cut.
    """
    num_kernels, storages = len(plan.kernels), plan.storages
    windows = windows_of(plan)
    cut = 2 * num_kernels
    away: dict[int, Window] = {}
    listed: dict[tuple[int, str, int], int] = {}
    for window in windows:
        for shift in range(0, 3 * num_kernels, num_kernels):
            back = window.end + 1 if window.prefetch_start is None else window.prefetch_start
            if window.free_by + shift <= cut < back + shift:
                away[window.storage] = window
    for window in windows:
        source = source_of(plan, window, windows)
        for shift in range(0, 4 * num_kernels, num_kernels):
            made = -1 if source is None else source + shift
            if made < cut < window.free_by + shift:
                listed[window.place] = 1
    for window in away.values():
        listed.pop(window.place, None)
    rows = []
    for s in range(len(storages)):
        birth = int(storages.birth[s])
        age = (0 - birth) % num_kernels
        is_alive = birth < 0 or age <= (int(storages.death[s]) - birth) % num_kernels
        window_or_none = away.get(s)
        if window_or_none is not None:
            device = window_or_none.device
            rows.append((TIER[device], device, window_or_none.offset))
        else:
            rows.append(("gpu" if is_alive else "", "", MISSING))
    return replace(
        plan,
        storages=replace(
            storages,
            placement=np.array([r[0] for r in rows], dtype=object),
            device=np.array([r[1] for r in rows], dtype=object),
            tier_offset_bytes=np.array([r[2] for r in rows]),
        ),
        copies=Copies.from_rows([(s, TIER[d], d, o) for s, d, o in listed]),
    )


def source_of(plan: Plan, window: Window, windows: list[Window]) -> int | None:
    """Kernel at whose end the copy that ``window`` rests on was made, on its own axis."""
    if window.writes:
        return window.offload_start
    num_kernels = len(plan.kernels)
    writers = [w for w in windows if w.place == window.place and w.writes]
    if not writers:
        return None
    gap, writer = min(((window.after - w.after) % num_kernels, w.row) for w in writers)
    chosen = windows[writer]
    return chosen.offload_start - chosen.after + window.after - gap


def random_plan(seed: int, machine_text: str) -> Plan:
    """A right plan, its budgets exact."""
    chance = random.Random(seed)
    kernels, storages, accesses = random_cycle(chance)
    metadata = PlanMetadata(
        trace_hash="",
        hardware=machine_text,
        planner="random",
        gpu_memory_bytes=0,
        host_memory_bytes=100_000,
        ideal_seconds=0.0,
        predicted_seconds=0.0,
        lower_bound_seconds=0.0,
        bound_kind="ideal",
        peak_gpu_bytes=0,
        peak_host_bytes=0,
        planning_seconds=0.0,
        arena_bytes={"host": 100_000, "near": 100_000},
    )
    plan = Plan(Moves.empty(), kernels, storages, accesses, Copies.empty(), metadata)
    plan = replace(plan, moves=random_moves(plan, chance))
    plan = with_start(reuse_copies(plan, chance))
    machine = Machine(plan, chance)
    machine.start_cold()
    machine.run(3)
    peak = max(machine.used)
    return replace(plan, metadata=replace(metadata, gpu_memory_bytes=peak))
