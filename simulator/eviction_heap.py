"""Which storage leaves next off plan: a max-heap in the order of :mod:`eviction_rule`.

An access does not search the heap for the entry that it outdates: it pushes a new one, and entries
that no longer say the truth are dropped when they surface, or all at once when the heap is full.
"""

from __future__ import annotations

from teraio.simulator.compilation import compiled
from teraio.simulator.state import ARRIVING, NEVER, RESIDENT, Engine

ENTRIES_PER_STORAGE = 2
"""Length of the heap over the number of storages: half of a full heap is outdated."""

CLASS = 2 * NEVER
"""Distance between the keys of two classes; within one, keys are kernels, or NEVER."""


@compiled
def eviction_key(is_fresh: int, is_small: int, next_access: int) -> int:
    """Larger leaves earlier: the class decides, then the next access."""
    return next_access - (2 * is_fresh + is_small) * CLASS


@compiled
def comes_first(key: int, serial: int, other_key: int, other_serial: int) -> bool:
    """Whether an entry is to be evicted before another; of equal ones, the youngest."""
    return key > other_key or (key == other_key and serial > other_serial)


@compiled
def push_resident(engine: Engine, index: int) -> None:
    """Enter a storage that holds memory with its next access; its entry before is outdated."""
    stream, storage = engine.stream[0], engine.storages[index]
    if stream.heap_size == engine.heap.size:
        drop_outdated(engine)
    storage.num_pushes += 1
    stream.heap_size += 1
    rise(engine, stream.heap_size - 1, index)


@compiled
def pop_resident(engine: Engine) -> int:
    """Take out the storage that is to leave next, -1 if there is none.

    What the waiting kernel accesses stays: it is entered again when that kernel starts.
    """
    stream = engine.stream[0]
    while stream.heap_size > 0:
        index = int(engine.heap[0].storage)
        is_candidate = is_current(engine, 0)
        pop_top(engine)
        if is_candidate and engine.storages[index].next_access > stream.current:
            return index
    return -1


@compiled
def is_current(engine: Engine, row: int) -> bool:
    """Whether an entry still says the truth about its storage."""
    entry = engine.heap[row]
    storage = engine.storages[entry.storage]
    holds_memory = storage.status == RESIDENT or storage.status == ARRIVING
    return bool(holds_memory and storage.num_pushes == entry.push)


@compiled
def pop_top(engine: Engine) -> None:
    """Remove the top entry."""
    stream = engine.stream[0]
    stream.heap_size -= 1
    if stream.heap_size > 0:
        last = engine.heap[stream.heap_size]
        sink(engine, 0, last.key, last.serial, last.storage, last.push)


@compiled
def rise(engine: Engine, hole: int, index: int) -> None:
    """Place a storage at or above an empty position."""
    heap, storage = engine.heap, engine.storages[index]
    key = eviction_key(storage.is_fresh, storage.is_small, storage.next_access)
    while hole > 0:
        parent = (hole - 1) // 2
        if not comes_first(key, storage.serial, heap[parent].key, heap[parent].serial):
            break
        heap[hole] = heap[parent]
        hole = parent
    set_entry(engine, hole, key, storage.serial, index, storage.num_pushes)


@compiled
def sink(engine: Engine, hole: int, key: int, serial: int, storage: int, push: int) -> None:
    """Place an entry at or below an empty position."""
    heap, size = engine.heap, engine.stream[0].heap_size
    while 2 * hole + 1 < size:
        child = 2 * hole + 1
        if child + 1 < size:
            left, right = heap[child], heap[child + 1]
            if comes_first(right.key, right.serial, left.key, left.serial):
                child += 1
        if comes_first(key, serial, heap[child].key, heap[child].serial):
            break
        heap[hole] = heap[child]
        hole = child
    set_entry(engine, hole, key, serial, storage, push)


@compiled
def set_entry(engine: Engine, row: int, key: int, serial: int, storage: int, push: int) -> None:
    """Write an entry."""
    entry = engine.heap[row]
    entry.key = key
    entry.serial = serial
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
        key, serial, storage, push = entry.key, entry.serial, entry.storage, entry.push
        sink(engine, row, key, serial, storage, push)


@compiled
def shift_keys(engine: Engine) -> None:
    """Count next accesses and births from the new cut; accesses that never come stay infinite."""
    stream, count = engine.stream[0], engine.storages.size
    for index in range(count):
        storage = engine.storages[index]
        if storage.next_access < NEVER:
            storage.next_access -= stream.num_kernels
        if storage.serial >= 2 * count:
            storage.serial -= count
    for row in range(stream.heap_size):
        entry = engine.heap[row]
        if entry.key % CLASS < NEVER:
            entry.key -= stream.num_kernels
        if entry.serial >= 2 * count:
            entry.serial -= count
