"""A max-heap of storages by next access (ties: lowest index first), with lazy deletion.

An access does not search the heap for the entry that it outdates: it pushes a new one, and entries
that no longer say the truth are dropped when they surface, or all at once when the heap is full.
Key and storage lie in two arrays, so that a shift of all keys at the cut keeps the order.
"""

from __future__ import annotations

from teraio.simulator.compilation import compiled
from teraio.simulator.state import NEVER, RESIDENT, Engine

ENTRIES_PER_STORAGE = 2
"""Length of the heap over the number of storages: half of a full heap is outdated."""


@compiled
def comes_first(key: int, storage: int, other_key: int, other_storage: int) -> bool:
    """Whether an entry is to be evicted before another."""
    return key > other_key or (key == other_key and storage < other_storage)


@compiled
def push_resident(engine: Engine, index: int) -> None:
    """Enter a resident storage with its next access; its entry before is outdated."""
    stream, storage = engine.stream[0], engine.storages[index]
    if stream.heap_size == engine.heap.size:
        drop_outdated(engine)
    storage.num_pushes += 1
    stream.heap_size += 1
    rise(engine, stream.heap_size - 1, storage.next_access, index, storage.num_pushes)


@compiled
def top_resident(engine: Engine) -> int:
    """The resident storage whose next access is furthest, left in the heap; -1 if there is none."""
    while engine.stream[0].heap_size > 0:
        if is_current(engine, 0):
            return int(engine.heap[0].storage)
        pop_top(engine)
    return -1


@compiled
def is_current(engine: Engine, row: int) -> bool:
    """Whether an entry still says the truth about its storage."""
    entry = engine.heap[row]
    storage = engine.storages[entry.storage]
    return bool(storage.status == RESIDENT and storage.num_pushes == entry.push)


@compiled
def pop_top(engine: Engine) -> None:
    """Remove the top entry."""
    stream = engine.stream[0]
    stream.heap_size -= 1
    if stream.heap_size > 0:
        last = engine.heap[stream.heap_size]
        sink(engine, 0, last.key, last.storage, last.push)


@compiled
def rise(engine: Engine, hole: int, key: int, storage: int, push: int) -> None:
    """Place an entry at or above an empty position."""
    heap = engine.heap
    while hole > 0:
        parent = (hole - 1) // 2
        if not comes_first(key, storage, heap[parent].key, heap[parent].storage):
            break
        heap[hole] = heap[parent]
        hole = parent
    set_entry(engine, hole, key, storage, push)


@compiled
def sink(engine: Engine, hole: int, key: int, storage: int, push: int) -> None:
    """Place an entry at or below an empty position."""
    heap, size = engine.heap, engine.stream[0].heap_size
    while 2 * hole + 1 < size:
        child = 2 * hole + 1
        if child + 1 < size:
            left, right = heap[child], heap[child + 1]
            if comes_first(right.key, right.storage, left.key, left.storage):
                child += 1
        if comes_first(key, storage, heap[child].key, heap[child].storage):
            break
        heap[hole] = heap[child]
        hole = child
    set_entry(engine, hole, key, storage, push)


@compiled
def set_entry(engine: Engine, row: int, key: int, storage: int, push: int) -> None:
    """Write an entry."""
    entry = engine.heap[row]
    entry.key = key
    entry.storage = storage
    entry.push = push


@compiled
def drop_outdated(engine: Engine) -> None:
    """Keep current entries only, one per storage at most, and restore the heap."""
    stream, heap, kept = engine.stream[0], engine.heap, 0
    for row in range(stream.heap_size):
        if is_current(engine, row):
            heap[kept] = heap[row]
            kept += 1
    stream.heap_size = kept
    for row in range(kept // 2 - 1, -1, -1):
        entry = heap[row]
        key, storage, push = entry.key, entry.storage, entry.push
        sink(engine, row, key, storage, push)


@compiled
def shift_keys(engine: Engine) -> None:
    """Count next accesses from the new cut; those that never come stay infinite."""
    stream = engine.stream[0]
    for index in range(engine.storages.size):
        storage = engine.storages[index]
        if storage.next_access < NEVER:
            storage.next_access -= stream.num_kernels
    for row in range(stream.heap_size):
        entry = engine.heap[row]
        if entry.key < NEVER:
            entry.key -= stream.num_kernels
