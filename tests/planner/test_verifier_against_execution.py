"""The verifier against an obvious machine that moves contents, on random traces and plans.

The machine steps through kernels and knows which version of which storage lies in every block of
every device. Transfers happen at random moments of their windows. Where the verifier says *valid*,
the machine must never read what is absent, stale or foreign; where it says *fits*, it must never
hold more than the budget. The other way round, plans built to be right must pass.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import (
    Accesses,
    Copies,
    Moves,
    Plan,
    PlanKernels,
    PlanMetadata,
    PlanStorages,
)
from teraio.contracts.plan_checks import check_plan, find_violations
from teraio.contracts.table import MISSING

BLOCK_BYTES = 512
TIER = {"host": "host", "near": "ssd"}


@dataclass(frozen=True)
class Window:
    """A move with its kernels on one axis, beginning at ``after``."""

    row: int
    storage: int
    after: int
    offload_start: int
    free_by: int
    prefetch_start: int | None
    before: int | None
    end: int
    device: str
    offset: int
    writes: bool

    @property
    def place(self) -> tuple[int, str, int]:
        return (self.storage, self.device, self.offset)


def following(kernel: int, base: int, num_kernels: int) -> int:
    """The first kernel >= base that is ``kernel`` in some iteration."""
    return base + (kernel - base) % num_kernels


def windows_of(plan: Plan) -> list[Window]:
    num_kernels, moves = len(plan.kernels), plan.moves
    result = []
    for row in range(len(moves)):
        storage, after = int(moves.storage[row]), int(moves.after_kernel[row])
        before = None
        prefetch = None
        if moves.before_kernel[row] != MISSING:
            before = following(int(moves.before_kernel[row]), after + 1, num_kernels)
            prefetch = following(int(moves.prefetch_start[row]), after + 1, num_kernels)
        death = following(int(plan.storages.death[storage]), after, num_kernels)
        result.append(
            Window(
                row=row,
                storage=storage,
                after=after,
                offload_start=following(int(moves.offload_start[row]), after, num_kernels),
                free_by=following(int(moves.free_by[row]), after + 1, num_kernels),
                prefetch_start=prefetch,
                before=before,
                end=death if before is None else before,
                device=str(moves.device[row]),
                offset=int(moves.tier_offset_bytes[row]),
                writes=bool(moves.writes[row]),
            )
        )
    return result


@dataclass
class Machine:
    """Runs a plan in index space. ``problems`` lists what went wrong, ``used`` bytes per kernel."""

    plan: Plan
    chance: random.Random
    version: dict[int, int] = field(default_factory=dict)
    on_gpu: dict[int, int] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)
    blocks: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    used: list[int] = field(default_factory=list)

    def blocks_of(self, storage: int, device: str, offset: int) -> Iterator[tuple[str, int]]:
        unit = 4096 if device == "near" else BLOCK_BYTES
        size = -(-int(self.plan.storages.nbytes[storage]) // unit) * unit
        for block in range(offset // BLOCK_BYTES, (offset + size) // BLOCK_BYTES):
            yield device, block

    def fill(self, storage: int, device: str, offset: int) -> None:
        for block in self.blocks_of(storage, device, offset):
            self.blocks[block] = (storage, self.version.get(storage, 0))

    def start_cold(self) -> None:
        """Placement and listed copies exist; nothing else does."""
        storages, copies = self.plan.storages, self.plan.copies
        for s in range(len(storages)):
            self.version[s] = 0
            if storages.placement[s] == "gpu":
                self.held.add(s)
                self.on_gpu[s] = 0
            elif storages.placement[s]:
                self.fill(s, storages.device[s], int(storages.tier_offset_bytes[s]))
        for row in range(len(copies)):
            place = copies.device[row], int(copies.tier_offset_bytes[row])
            self.fill(int(copies.storage[row]), *place)

    def events(self, num_iterations: int) -> dict[int, list[tuple[int, str, Window]]]:
        """What happens at the boundary before each kernel, transfers at random within windows."""
        num_kernels = len(self.plan.kernels)
        agenda: dict[int, list[tuple[int, str, Window]]] = {}

        def add(kernel: int, order: int, what: str, window: Window) -> None:
            if kernel > 0 or (kernel == 0 and what == "copy in"):
                agenda.setdefault(kernel, []).append((order, what, window))

        for window in windows_of(self.plan):
            for shift in range(-num_kernels, num_iterations * num_kernels, num_kernels):
                write_at = self.chance.randint(window.offload_start + 1, window.free_by)
                if window.writes and window.offload_start + shift >= 0:
                    add(max(1, write_at + shift), 0, "copy out", window)
                add(window.free_by + shift, 1, "free", window)
                if window.prefetch_start is not None and window.before is not None:
                    read_at = self.chance.randint(window.prefetch_start, window.before)
                    add(window.prefetch_start + shift, 2, "take", window)
                    if window.prefetch_start + shift > 0:
                        add(read_at + shift, 3, "copy in", window)
        return agenda

    def happen(self, kernel: int, what: str, window: Window) -> None:
        s = window.storage
        if what == "copy out":
            if self.on_gpu.get(s) != self.version[s]:
                self.problems.append(f"{kernel}: storage {s} leaves, but is not there")
            self.fill(s, window.device, window.offset)
        elif what == "free":
            self.held.discard(s)
            self.on_gpu.pop(s, None)
        elif what == "take":
            self.held.add(s)
        else:
            wanted = (s, self.version[s])
            for block in self.blocks_of(s, window.device, window.offset):
                if self.blocks.get(block) != wanted:
                    self.problems.append(
                        f"{kernel}: {block} holds {self.blocks.get(block)}, not {wanted}"
                    )
            self.on_gpu[s] = self.version[s]

    def run(self, num_iterations: int, first_kernel: int = 0) -> None:
        plan, num_kernels = self.plan, len(self.plan.kernels)
        storages, accesses = plan.storages, plan.accesses
        agenda = self.events(num_iterations)
        for now in range(first_kernel, num_iterations * num_kernels):
            kernel = now % num_kernels
            for _, what, window in sorted(agenda.get(now, []), key=lambda e: (e[0], e[2].row)):
                self.happen(now, what, window)
            for s in np.flatnonzero(storages.birth == kernel).tolist():
                self.version[s] += 1
                self.on_gpu[s] = self.version[s]
                self.held.add(s)
            held = sum(int(storages.allocated_bytes[s]) for s in self.held)
            self.used.append(held + int(plan.kernels.workspace_bytes[kernel]))
            for row in np.flatnonzero(accesses.kernel == kernel).tolist():
                s = int(accesses.storage[row])
                if self.on_gpu.get(s) != self.version[s]:
                    self.problems.append(f"{now}: storage {s} is not there")
                if accesses.writes[row]:
                    self.version[s] += 1
                    self.on_gpu[s] = self.version[s]
            for s in np.flatnonzero(storages.death == kernel).tolist():
                self.held.discard(s)
                self.on_gpu.pop(s, None)


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
            placement=[r[0] for r in rows],
            device=[r[1] for r in rows],
            tier_offset_bytes=[r[2] for r in rows],
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


@pytest.fixture(scope="session")
def machine_text(small_hardware: Hardware) -> str:
    return small_hardware.to_toml()


def runs_right(plan: Plan, seed: int) -> Machine:
    machine = Machine(plan, random.Random(seed))
    machine.start_cold()
    machine.run(4)
    return machine


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_plans_built_to_be_right_pass_and_run(machine_text: str, seed: int) -> None:
    plan = random_plan(seed, machine_text)
    assert check_plan(plan) == []
    assert runs_right(plan, seed).problems == []


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_fits_is_exact_to_the_byte(machine_text: str, seed: int) -> None:
    plan = random_plan(seed, machine_text)
    tighter = replace(
        plan,
        metadata=replace(plan.metadata, gpu_memory_bytes=plan.metadata.gpu_memory_bytes - 1),
    )
    verdict = find_violations(tighter).verification()
    assert verdict.valid
    assert not verdict.fits


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_slots_collide_exactly_if_two_copies_hold_a_block_at_once(
    machine_text: str, seed: int
) -> None:
    """Against a count of holders per block and kernel, with places thrown into a small arena."""
    plan, chance = random_plan(seed, machine_text), random.Random(seed)
    offsets = plan.moves.tier_offset_bytes.copy()
    for place in {w.place for w in windows_of(plan)}:
        rows = [w.row for w in windows_of(plan) if w.place == place]
        offsets[rows] = 4096 * chance.randint(0, 8)
    plan = replace(plan, moves=replace(plan.moves, tier_offset_bytes=offsets))
    found = {v.rule for v in check_plan(plan)}
    assert "clean" not in found
    assert ("slot" in found) == has_collision(plan)


def has_collision(plan: Plan) -> bool:
    num_kernels, windows = len(plan.kernels), windows_of(plan)
    machine = Machine(plan, random.Random(0))
    holders: dict[tuple[int, str, int], set[tuple[int, int]]] = {}
    for window in windows:
        made = source_of(plan, window, windows)
        span = range(num_kernels) if made is None else range(made, window.end)
        copy = (window.storage, -1 if made is None else made % num_kernels)
        for kernel in span:
            for block in machine.blocks_of(window.storage, window.device, window.offset):
                holders.setdefault((kernel % num_kernels, *block), set()).add(copy)
    return any(len(copies) > 1 for copies in holders.values())


def change(plan: Plan, chance: random.Random) -> Plan:
    """One random cell of one random table takes another value of its kind, sensible or not.

    Half of the changes are of the subtle sorts: a flag of a write flips, a move stands twice.
    """
    if len(plan.moves) and chance.random() < 0.1:
        twice = [*range(len(plan.moves)), chance.randrange(len(plan.moves))]
        return replace(plan, moves=plan.moves.take(np.array(twice)))
    if chance.random() < 0.4:
        name = chance.choice(["moves", "accesses"] if len(plan.moves) else ["accesses"])
        writes = getattr(plan, name).writes.copy()
        row = chance.randrange(len(writes))
        writes[row] = not writes[row]
        return replace(plan, **{name: replace(getattr(plan, name), writes=writes)})
    names = [n for n in ("moves", "storages", "accesses", "copies", "kernels") if getattr(plan, n)]
    name = chance.choice([*names, "moves"] if len(plan.moves) else names)
    table = getattr(plan, name)
    column = chance.choice(table.COLUMNS)
    values = getattr(table, column.name).copy()
    row = chance.randrange(len(table))
    choices: dict[str, list[Any]] = {
        "int": [*range(-2, 12), 512, 4096, 2**62, -(2**62), int(values[0]) + 1]
        if column.kind == "int"
        else [],
        "bool": [True, False],
        "text": ["", "gpu", "host", "ssd", "near", "far", "recompute"],
    }
    values[row] = chance.choice(choices[column.kind])
    return replace(plan, **{name: replace(table, **{column.name: values})})


@settings(max_examples=500, deadline=None)
@given(seed=st.integers(0, 2**32), num_changes=st.integers(1, 4))
def test_a_changed_plan_never_crashes_and_runs_if_valid(
    machine_text: str, seed: int, num_changes: int
) -> None:
    chance = random.Random(seed)
    plan = random_plan(seed % 500, machine_text)
    for _ in range(num_changes):
        plan = change(plan, chance)
    verdict = find_violations(plan).verification()
    if not verdict.valid:
        assert verdict.violations
        return
    machine = runs_right(plan, seed)
    assert machine.problems == []
    if verdict.fits:
        assert max(machine.used) <= plan.metadata.gpu_memory_bytes
