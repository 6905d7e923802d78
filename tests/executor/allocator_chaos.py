"""A GPU's allocator by plain search, and random events in it, some of which nobody is told of."""

from __future__ import annotations

import itertools
import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import torch

from teraio.executor.gpu_allocator import ENDLESS, Layout
from teraio.executor.gpu_memory import CompactMemory
from teraio.executor.holding import Holding, Traffic
from teraio.simulator.caching_allocator import LARGE_PAGE_BYTES as PAGE
from teraio.simulator.caching_allocator import MIB

BUDGET = 60 * PAGE
ROWS = 40
SIZES = [2 * MIB, 3 * MIB, 7 * MIB, 12 * MIB + 512, 20 * MIB, 33 * MIB, 70 * MIB]


class PagedAllocator:
    """As PyTorch's, with pages that come and go anywhere; by plain search. It can be made to fail,
    and to be on another stream.
    """

    def __init__(self) -> None:
        self.blocks: dict[int, int] = {}
        self.pages: set[int] = set()
        self.address_of: dict[int, int] = {}
        self.most_pages = 10**9
        self.stream_is_ours = True
        self.is_captured = False
        self.num_allocated = 0
        self.num_looks = 0

    def ranges(self) -> list[tuple[int, int]]:
        ends = [page + 1 for page in sorted(self.pages) if page + 1 not in self.pages]
        begins = [page for page in sorted(self.pages) if page - 1 not in self.pages]
        return [(b * PAGE, e * PAGE) for b, e in zip(begins, ends, strict=True)]

    def holes(self) -> list[tuple[int, int]]:
        free: list[tuple[int, int]] = []
        blocks = deque(sorted(self.blocks.items()))
        for at, end in self.ranges():
            while blocks and blocks[0][0] < end:
                begin, size = blocks.popleft()
                free.append((at, begin - at))
                at = begin + size
            free.append((at, end - at))
        return [hole for hole in free if hole[1]]

    def growth(self) -> dict[int, int]:
        ranges = self.ranges()
        gaps = [b - e for (_, e), (b, _) in itertools.pairwise(ranges)]
        return {e: gap for (_, e), gap in zip(ranges, [*gaps, ENDLESS], strict=False)}

    def allocate(self, nbytes: int) -> int:
        self.num_allocated += 1
        growth = self.growth()
        fitting = sorted((size, begin) for begin, size in self.holes() if size >= nbytes)
        if not fitting:
            self._map(nbytes)
            return self.allocate(nbytes)
        chosen = fitting[0]
        for other in fitting[1:]:
            if other[0] + growth.get(sum(other), 0) >= chosen[0] + growth.get(sum(chosen), 0):
                break
            chosen = other
        self.blocks[chosen[1]] = nbytes
        return chosen[1]

    def _map(self, nbytes: int) -> None:
        ends = {PAGE, *(b + n for b, n in self.blocks.items())}
        for begin in sorted(ends):
            behind = [b for b in self.blocks if b >= begin]
            if not behind or min(behind) - begin >= nbytes:
                wanted = set(range(begin // PAGE, -(-(begin + nbytes) // PAGE)))
                if len(self.pages | wanted) > self.most_pages:
                    self.trim()
                    raise torch.OutOfMemoryError
                self.pages |= wanted
                return

    def free(self, address: int) -> None:
        del self.blocks[address]

    def move(self, storage: Any, nbytes: int) -> Any:
        old = self.address_of[id(storage)]
        self.address_of[id(storage)] = self.allocate(self.blocks[old])
        self.free(old)
        return f"copy {self.num_allocated}"

    def address(self, storage: Any) -> int:
        return self.address_of.get(id(storage), 0)

    def look(self) -> Layout:
        self.num_looks += 1
        blocks = list(self.blocks.items())
        return Layout(self.holes(), blocks, len(self.pages) * PAGE, self.growth())

    def books(self) -> tuple[int, int]:
        return sum(self.blocks.values()), len(self.pages) * PAGE

    def trim(self) -> None:
        used = set()
        for begin, size in self.blocks.items():
            used |= set(range(begin // PAGE, -(-(begin + size) // PAGE)))
        self.pages &= used

    def is_on_stream(self) -> bool:
        return self.stream_is_ours

    is_usable = is_on_stream

    def is_capturing(self) -> bool:
        return self.is_captured

    def current_stream(self) -> Any:
        return "another"


class Books:
    """What :class:`Residency` keeps of the storages, and deaths that are noticed late."""

    def __init__(self) -> None:
        self.capacity_bytes = BUDGET
        self.used_bytes = 0
        self.traffic = Traffic()
        self.memory: Any = None
        self.alive: set[Holding] = set()
        self.dead: deque[Holding] = deque()

    def holdings(self) -> set[Holding]:
        return self.alive

    def bury(self) -> None:
        while self.dead:
            holding = self.dead.popleft()
            self.alive.discard(holding)
            self.memory.forget(holding)
            self.used_bytes -= holding.allocated_bytes if holding.is_resident else 0


class Chaos:
    """Random events of a seed; ``surprises``: whether some are not told."""

    def __init__(self, seed: int, *, surprises: bool) -> None:
        self.random: Any = random.Random(seed)
        self.allocator = PagedAllocator()
        self.books = Books()
        self.memory = CompactMemory(self.books, self.allocator)  # type: ignore[arg-type]
        self.books.memory = self.memory
        self.may_move = [self.random.random() < 0.9 for _ in range(ROWS)]
        self.storages: dict[Holding, Any] = {}
        self.strangers: list[int] = []
        told = [self.birth] * 8 + [self.death] * 6 + [self.leave] * 2 + [self.come] * 3
        told += [self.iteration, self.transfer]
        untold = [self.stranger, self.stranger_ends, self.trim, self.elsewhere, self.full]
        untold += [self.wrong_size, self.strange_resize, self.twice, self.recorded]
        self.events = told + (untold if surprises else [])

    def prepare(self, *sizes: int) -> None:
        """And what must hold afterwards."""
        allocator = self.allocator
        before, in_use = allocator.num_allocated, sum(allocator.blocks.values())
        sizes_before = {h: allocator.blocks.get(self.where(h)) for h in self.storages}
        self.memory.prepare(sizes, self.may_move)
        assert not self.memory._plugs
        assert sum(allocator.blocks.values()) == in_use
        assert {h: allocator.blocks.get(self.where(h)) for h in self.storages} == sizes_before
        assert allocator.num_allocated - before < 400

    def where(self, holding: Holding) -> int:
        return self.allocator.address_of.get(id(self.storages[holding]), 0)

    def pick(self, *, resident: bool) -> Holding | None:
        found = [h for h in self.books.alive if h.is_resident is resident and not h.is_dead]
        return self.random.choice(sorted(found, key=lambda h: h.stamp)) if found else None

    def room(self, *sizes: int) -> bool:
        return self.books.used_bytes + sum(sizes) <= BUDGET

    def allocate(self, storage: Any, nbytes: int) -> bool:
        try:
            self.allocator.address_of[id(storage)] = self.allocator.allocate(nbytes)
        except torch.OutOfMemoryError:
            return False
        return True

    def birth(self, block_bytes: int = 0) -> None:
        sizes = self.random.choices(SIZES, k=self.random.choice((1, 1, 2, 3)))
        if not self.room(*sizes):
            return
        self.prepare(*sizes)
        for nbytes in sizes:
            storage = torch.UntypedStorage(nbytes, device="meta")
            if not self.allocate(storage, block_bytes or nbytes):
                continue
            state: Any = SimpleNamespace(
                nbytes=nbytes,
                reference=lambda storage=storage: storage,
                is_foreign=not self.random.randrange(0, 2),
            )
            holding = Holding(state, nbytes, is_fixed=False)
            holding.row = self.random.randrange(-1, ROWS + 5)
            holding.stamp = len(self.storages)
            self.storages[holding] = storage
            self.books.alive.add(holding)
            self.memory.note(holding)
            self.books.used_bytes += nbytes

    def death(self) -> None:
        holding = self.pick(resident=self.random.random() < 0.8)
        if holding is not None:
            holding.is_dead = True
            address = self.allocator.address_of.pop(id(self.storages[holding]), None)
            if address is not None:
                self.allocator.free(address)
            self.books.dead.append(holding)
            if self.random.random() < 0.7:
                self.books.bury()

    def leave(self) -> None:
        holding = self.pick(resident=True)
        if holding is not None:
            holding.is_resident = False
            self.books.used_bytes -= holding.allocated_bytes
            self.memory.forget(holding)
            self.allocator.free(self.allocator.address_of.pop(id(self.storages[holding])))

    def come(self) -> None:
        holding = self.pick(resident=False)
        if holding is not None and self.room(holding.allocated_bytes):
            self.prepare(holding.allocated_bytes)
            if self.allocate(self.storages[holding], holding.allocated_bytes):
                self.memory.note(holding)
                holding.is_resident = True
                self.books.used_bytes += holding.allocated_bytes

    def iteration(self) -> None:
        in_use = sum(self.allocator.blocks.values())
        self.memory.end_iteration()
        self.memory.tidy(self.may_move)
        assert sum(self.allocator.blocks.values()) == in_use

    def transfer(self) -> None:
        holding = self.pick(resident=True)
        if holding is not None:
            holding.leaving = SimpleNamespace(done=self.random.random() < 0.5)

    # What nobody tells

    def stranger(self) -> None:
        try:
            self.strangers.append(self.allocator.allocate(self.random.choice(SIZES)))
        except torch.OutOfMemoryError:
            return

    def stranger_ends(self) -> None:
        if self.strangers:
            self.allocator.free(self.strangers.pop(self.random.randrange(len(self.strangers))))

    def trim(self) -> None:
        self.allocator.trim()

    def elsewhere(self) -> None:
        self.allocator.stream_is_ours = not self.allocator.stream_is_ours

    def full(self) -> None:
        is_full = self.random.random() < 0.5
        self.allocator.most_pages = len(self.allocator.pages) if is_full else 10**9

    def wrong_size(self) -> None:
        self.birth(self.random.choice(SIZES))

    def strange_resize(self) -> None:
        holding = self.pick(resident=True)
        if holding is not None:
            storage = self.storages[holding]
            address = self.allocator.address_of[id(storage)]
            if self.allocate(storage, self.random.choice(SIZES)):
                self.allocator.free(address)

    def twice(self) -> None:
        holding = self.pick(resident=True)
        if holding is not None:
            self.random.choice((self.memory.note, self.memory.forget))(holding)

    def recorded(self) -> None:
        holding = self.pick(resident=True)
        if holding is not None:
            self.memory.note_uses([holding], ("tensor", torch.Stream("cpu")))
