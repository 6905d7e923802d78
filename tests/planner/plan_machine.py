"""An obvious machine that runs a plan in index space and moves contents, for tests.

It steps through kernels and knows which version of which storage lies in every block of every
device. Transfers happen at random moments of their windows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from teraio.contracts.plan import Plan
from teraio.contracts.table import MISSING

BLOCK_BYTES = 512


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
