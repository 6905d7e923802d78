"""Bounce buffers whose copies end when they like, as those of a busy GPU do."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from teraio.errors import StoreError
from teraio.executor.stores import staging
from teraio.executor.stores.arena import Arena
from teraio.executor.stores.block_file import BlockFile
from teraio.executor.stores.file import FileStore
from teraio.executor.stores.queues import Await, ThreadTransfer

UNIT_BYTES = 64 * 1024
NUM_UNITS = 40


class LateCopier:
    """Copies are made in order by a thread of their own, some time after they were asked for."""

    def __init__(self, arena: Arena) -> None:
        self._copier = MEMORY_COPIER(arena)
        self._thread = ThreadPoolExecutor(1)
        self._random = random.Random(0)
        self.num_asked = self.num_ended = self.most_under_way = 0
        COPIERS.append(self)

    def fill(self, buffer_offset: int, transfer: ThreadTransfer, begin: int, end: int) -> Await:
        """See :class:`staging.Copier`."""
        return self._later(self._copier.fill, buffer_offset, transfer, begin, end)

    def drain(self, buffer_offset: int, transfer: ThreadTransfer, begin: int, end: int) -> Await:
        """See :class:`staging.Copier`."""
        return self._later(self._copier.drain, buffer_offset, transfer, begin, end)

    def _later(self, copy: Any, *arguments: Any) -> Await:
        seconds = self._random.choice([0.0, 0.0, 0.001, 0.02])
        self.num_asked += 1
        self.most_under_way = max(self.most_under_way, self.num_asked - self.num_ended)

        def make() -> None:
            time.sleep(seconds)
            copy(*arguments)
            self.num_ended += 1

        return self._thread.submit(make).result


MEMORY_COPIER = staging.MemoryCopier
COPIERS: list[LateCopier] = []


@pytest.fixture(params=[2, 3, 8])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FileStore]:
    """With so many buffers of each direction."""
    COPIERS.clear()
    monkeypatch.setattr(staging, "MemoryCopier", LateCopier)
    made = FileStore(
        "ssd0",
        tmp_path,
        2 * NUM_UNITS * UNIT_BYTES,
        preferred_io_bytes=UNIT_BYTES,
        bounce_bytes=2 * request.param * UNIT_BYTES,
    )
    assert made.pinned_bytes == 2 * request.param * UNIT_BYTES
    yield made
    made.close()


def random_bytes(nbytes: int, seed: int) -> torch.Tensor:
    """Bytes that no buffer happens to hold."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def test_no_buffer_is_used_before_its_copy_has_ended(store: FileStore) -> None:
    """Whole pieces and odd ends, both directions at once, one transfer right after another."""
    sizes = [NUM_UNITS * UNIT_BYTES, 5 * UNIT_BYTES + 1, UNIT_BYTES, 17]
    written = [random_bytes(size, seed) for seed, size in enumerate(sizes)]
    offset, transfers, read = 0, [], []
    for tensor in written:
        transfers.append(store.write(tensor.untyped_storage(), offset, tensor.numel()))
        read.append(torch.zeros_like(tensor))
        transfers.append(store.read(read[-1].untyped_storage(), offset, tensor.numel()))
        offset += -(-tensor.numel() // store.alignment_bytes) * store.alignment_bytes
    for transfer in transfers:
        transfer.wait()
    assert all(torch.equal(one, other) for one, other in zip(written, read, strict=True))
    assert all(copier.num_asked == copier.num_ended > 0 for copier in COPIERS)


def test_copies_wait_together(store: FileStore) -> None:
    """At most as many as there are buffers, and more than one: the disk is not kept waiting."""
    tensor = random_bytes(NUM_UNITS * UNIT_BYTES, 0)
    store.write(tensor.untyped_storage(), 0, tensor.numel()).wait()
    store.read(tensor.untyped_storage(), 0, tensor.numel()).wait()
    reading, writing = COPIERS
    num_buffers = store.pinned_bytes // (2 * UNIT_BYTES)
    assert 1 < writing.most_under_way <= num_buffers
    # Half of the buffers are on the disk meanwhile.
    assert min(2, num_buffers - 1) <= reading.most_under_way <= num_buffers


@pytest.mark.parametrize("is_write", [True, False])
def test_an_error_leaves_no_copy_under_way(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, is_write: bool
) -> None:
    """Else the next transfer's bytes would share a buffer with it."""
    tensor = random_bytes(NUM_UNITS * UNIT_BYTES, 0)
    store.write(tensor.untyped_storage(), 0, tensor.numel()).wait()
    move = BlockFile._move

    def failing(self: BlockFile, view: memoryview, offset_bytes: int, **options: Any) -> Any:
        if offset_bytes == 9 * UNIT_BYTES:
            return 0, "as this test wants"
        return move(self, view, offset_bytes, **options)

    monkeypatch.setattr(BlockFile, "_move", failing)
    before = [copier.num_asked for copier in COPIERS]
    start = store.write if is_write else store.read
    transfer = start(tensor.untyped_storage(), 0, tensor.numel())
    with pytest.raises(StoreError, match="as this test wants"):
        transfer.wait()
    assert all(copier.num_asked == copier.num_ended for copier in COPIERS)
    # The rest is not even begun, but for what had buffers already.
    num_buffers = store.pinned_bytes // (2 * UNIT_BYTES)
    asked = COPIERS[is_write].num_asked - before[is_write]
    assert asked <= 9 + num_buffers + 1


def test_an_urgent_transfer_waits_for_buffers_at_most(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for the rest of the one under way; and each is known to have taken its own time."""
    move, under_way = BlockFile._move, threading.Event()

    def slow(self: BlockFile, view: memoryview, offset_bytes: int, **options: Any) -> Any:
        under_way.set()
        time.sleep(0.02)
        return move(self, view, offset_bytes, **options)

    large, small = (random_bytes(n * UNIT_BYTES, n) for n in (NUM_UNITS, 1))
    store.write(large.untyped_storage(), 0, large.numel()).wait()
    at = NUM_UNITS * UNIT_BYTES
    store.write(small.untyped_storage(), at, UNIT_BYTES).wait()
    monkeypatch.setattr(BlockFile, "_move", slow)
    normal = store.read(large.untyped_storage(), 0, large.numel())
    assert under_way.wait(60)
    issued_seconds = time.perf_counter()
    urgent = store.read(small.untyped_storage(), at, UNIT_BYTES, urgent=True)
    urgent.wait()
    urgent_seconds = time.perf_counter() - issued_seconds
    assert not normal.done
    normal.wait()
    normal_seconds = normal.end_seconds - normal.start_seconds
    num_buffers = store.pinned_bytes // (2 * UNIT_BYTES)
    # Twice as long as it should need, so that a busy machine does not matter.
    assert urgent_seconds <= 2 * (num_buffers + 3) / NUM_UNITS * normal_seconds
    assert normal.start_seconds < issued_seconds < urgent.end_seconds < normal.end_seconds


def test_times_of_transfers_in_a_row_do_not_overlap(store: FileStore) -> None:
    """They begin while others are on their way, but a channel has one after the other."""
    tensor = random_bytes(4 * UNIT_BYTES, 0)
    transfers = [
        store.write(tensor.untyped_storage(), 4 * UNIT_BYTES * number, tensor.numel())
        for number in range(8)
    ]
    for transfer in transfers:
        transfer.wait()
    assert all(a.end_seconds <= b.start_seconds for a, b in pairwise(transfers))
    assert all(transfer.start_seconds < transfer.end_seconds for transfer in transfers)


def test_files_serve_until_the_interpreter_has_ended(tmp_path: Path) -> None:
    """What runs in ``atexit`` may still need a storage that is away."""
    script = f"""
import atexit, torch
from teraio.executor.stores.file import FileStore
store = FileStore("ssd0", {str(tmp_path)!r}, 2**20)
ones = torch.ones(2**20, dtype=torch.uint8)
store.write(ones, 0, 2**20).wait()
read = torch.zeros_like(ones)
def last():
    store.read(read, 0, 2**20).wait()
    print("equal", torch.equal(read, ones))
atexit.register(last)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout == "equal True\n", done.stderr
