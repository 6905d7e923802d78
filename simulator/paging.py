"""Off plan: residency is tracked for real; what lacks is fetched, what is too much is evicted.

Used when there is no plan, or the plan does not fit (DESIGN: Off plan). A kernel that waits evicts
one storage after another, furthest next access first, until its own fits; then it fetches what is
missing, ahead of planned chunks that have not started. Of the plan, what can be carried out is.
"""

from __future__ import annotations

from teraio.contracts.table import MISSING
from teraio.simulator.channels import begin_transfer, request_pause
from teraio.simulator.compilation import compiled
from teraio.simulator.copies import (
    invalidate_copies,
    leave_gpu,
    overflow_target,
    release_overflow,
    reserve_overflow,
    valid_copy_device,
)
from teraio.simulator.eviction_heap import pop_top, push_resident, top_resident
from teraio.simulator.state import (
    ABSENT,
    ARRIVING,
    AWAY,
    CANCELLED,
    DEMAND,
    DONE,
    IDLE,
    LEAVING,
    LEFT,
    NO_CAPACITY,
    NO_VICTIM,
    PENDING,
    PLANNED,
    READ,
    RESIDENT,
    WRITE,
    Engine,
)

# Boundary before a kernel, in the order of its stages.


@compiled
def have_left(engine: Engine) -> bool:
    """Whether every move with ``free_by`` at the current kernel has left, or has nothing to do."""
    kernel = engine.stream[0].current
    for row in range(engine.kernels[kernel].first_free, engine.kernels[kernel + 1].first_free):
        move = engine.moves[engine.lists[row]]
        if move.state == PENDING:
            status = engine.storages[move.storage].status
            if status not in (AWAY, ABSENT):
                return False
            move.state = CANCELLED
            move.is_withdrawn = move.writes
    return True


@compiled
def give_back_memory(engine: Engine) -> None:
    """Moves that have left give their GPU memory back at ``free_by``."""
    kernel = engine.stream[0].current
    for row in range(engine.kernels[kernel].first_free, engine.kernels[kernel + 1].first_free):
        move = engine.moves[engine.lists[row]]
        if move.state == LEFT and engine.storages[move.storage].status == RESIDENT:
            leave_gpu(engine, move.storage)
        if move.is_tail:
            move.state = PENDING


@compiled
def accept_prefetches(engine: Engine) -> None:
    """Prefetches that find room take it, in queue order; others become demand fetches."""
    stream = engine.stream[0]
    kernel = stream.current
    first, end = engine.kernels[kernel].first_prefetch, engine.kernels[kernel + 1].first_prefetch
    for row in range(first, end):
        move = engine.moves[engine.lists[row]]
        storage = engine.storages[move.storage]
        has_copy = engine.copies[move.copy].is_valid
        if move.state == LEFT and storage.status == AWAY and has_copy:
            held_after = stream.held + needed_bytes(engine)
            if storage.next_access != kernel:
                held_after += storage.allocated_bytes
            if held_after <= stream.capacity:
                storage.status = ARRIVING
                stream.held += storage.allocated_bytes
                move.is_accepted = True
        move.state = PENDING


@compiled
def needed_bytes(engine: Engine) -> int:
    """GPU bytes that the current kernel needs on top of what is held."""
    kernel = engine.stream[0].current
    this, following = engine.kernels[kernel], engine.kernels[kernel + 1]
    needed = this.workspace_bytes
    for row in range(this.first_access, following.first_access):
        storage = engine.storages[engine.accesses[row].storage]
        if storage.status == AWAY:
            needed += storage.allocated_bytes
    for row in range(this.first_birth, following.first_birth):
        needed += engine.storages[engine.lists[row]].allocated_bytes
    return int(needed)


@compiled
def make_room(engine: Engine) -> tuple[bool, int]:
    """Evict until the current kernel fits, then take its memory and fetch what is missing.

    Returns whether it has its memory, and a failure or DONE.
    """
    stream = engine.stream[0]
    while stream.held + needed_bytes(engine) > stream.capacity:
        if stream.is_evicting:
            return False, DONE
        victim = top_resident(engine)
        if victim == MISSING or engine.storages[victim].next_access <= stream.current:
            return False, DONE if is_any_in_transfer(engine) else NO_VICTIM
        pop_top(engine)
        engine.account[0].evictions += 1
        if valid_copy_device(engine, victim) != MISSING:
            leave_gpu(engine, victim)
        elif not begin_eviction(engine, victim):
            return False, NO_CAPACITY
    fetch_missing(engine)
    add_births(engine)
    return True, DONE


@compiled
def is_any_in_transfer(engine: Engine) -> bool:
    """Whether some transfer under way may yet change what can be evicted."""
    for index in range(engine.channels.size):
        if engine.channels[index].phase != IDLE or engine.channels[index].suspended > 0:
            return True
    return False


@compiled
def begin_eviction(engine: Engine, victim: int) -> bool:
    """Queue the demand write of a victim; False if no device has room for it."""
    stream, storage = engine.stream[0], engine.storages[victim]
    device = overflow_target(engine, victim)
    if device == MISSING:
        stream.last_left = victim
        return False
    reserve_overflow(engine, victim, device)
    storage.status = LEAVING
    stream.is_evicting = True
    engine.account[0].eviction_bytes += storage.nbytes
    queue_demand(engine, 2 * device + WRITE, victim)
    return True


@compiled
def fetch_missing(engine: Engine) -> None:
    """Take the memory of what the current kernel misses, and queue demand fetches."""
    stream, account = engine.stream[0], engine.account[0]
    this, following = engine.kernels[stream.current], engine.kernels[stream.current + 1]
    for row in range(this.first_access, following.first_access):
        index = engine.accesses[row].storage
        storage = engine.storages[index]
        if storage.status == AWAY:
            storage.status = ARRIVING
            stream.held += storage.allocated_bytes
            account.demand_fetches += 1
            account.demand_fetch_bytes += storage.nbytes
            queue_demand(engine, 2 * valid_copy_device(engine, index) + READ, index)
    stream.last_arrived = MISSING


@compiled
def add_births(engine: Engine) -> None:
    """Take the memory of what the current kernel creates."""
    stream = engine.stream[0]
    this, following = engine.kernels[stream.current], engine.kernels[stream.current + 1]
    for row in range(this.first_birth, following.first_birth):
        index = engine.lists[row]
        storage = engine.storages[index]
        storage.status = RESIDENT
        storage.next_access = storage.next_at_birth
        stream.held += storage.allocated_bytes
        if storage.next_access != stream.current:
            push_if_movable(engine, index)


@compiled
def storages_are_resident(engine: Engine) -> bool:
    """Whether all that the current kernel accesses is on the GPU."""
    kernel = engine.stream[0].current
    first, end = engine.kernels[kernel].first_access, engine.kernels[kernel + 1].first_access
    for row in range(first, end):
        if engine.storages[engine.accesses[row].storage].status != RESIDENT:
            return False
    return True


# Kernels.


@compiled
def pages_at_kernel_start(engine: Engine) -> None:
    """Accesses end periods: overflow copies go, written storages lose theirs."""
    kernel = engine.stream[0].current
    this, following = engine.kernels[kernel], engine.kernels[kernel + 1]
    for row in range(this.first_access, following.first_access):
        access = engine.accesses[row]
        engine.storages[access.storage].next_access = access.next_access
        release_overflow(engine, access.storage)
        if access.writes:
            invalidate_copies(engine, access.storage)
        push_if_movable(engine, access.storage)
    for row in range(this.first_release, following.first_release):
        engine.copies[engine.moves[engine.lists[row]].copy].is_valid = False


@compiled
def pages_at_kernel_end(engine: Engine) -> None:
    """Deaths give memory and copies back; moves without a write leave."""
    stream = engine.stream[0]
    this, following = engine.kernels[stream.current], engine.kernels[stream.current + 1]
    for row in range(this.first_death, following.first_death):
        index = engine.lists[row]
        storage = engine.storages[index]
        if storage.status != AWAY:
            stream.held -= storage.allocated_bytes
        storage.status = ABSENT
        release_overflow(engine, index)
        invalidate_copies(engine, index)
    for row in range(this.first_clean, following.first_clean):
        move = engine.moves[engine.lists[row]]
        is_resident = engine.storages[move.storage].status == RESIDENT
        move.state = LEFT if is_resident and engine.copies[move.copy].is_valid else CANCELLED


@compiled
def push_if_movable(engine: Engine, storage: int) -> None:
    """A resident storage that holds memory and may move can be evicted."""
    if engine.storages[storage].is_movable:
        push_resident(engine, storage)


# Transfers.


@compiled
def queue_demand(engine: Engine, index: int, storage: int) -> None:
    """Let a storage move as soon as the chunk under way has."""
    channel = engine.channels[index]
    if channel.demand_head == channel.demand_end:
        channel.demand_head = 0
        channel.demand_end = 0
    engine.demand[index, channel.demand_end] = storage
    channel.demand_end += 1
    request_pause(engine, index)


@compiled
def begin_demand(engine: Engine, index: int) -> bool:
    """Start the next demand transfer of an idle channel; False if there is none."""
    channel = engine.channels[index]
    if channel.demand_head == channel.demand_end:
        return False
    storage = engine.demand[index, channel.demand_head]
    channel.demand_head += 1
    kernel, nbytes = engine.stream[0].current, engine.storages[storage].nbytes
    begin_transfer(engine, index, DEMAND, MISSING, storage, kernel, nbytes)
    return True


@compiled
def is_wanted(engine: Engine, index: int) -> bool:
    """Whether the head of a queue still has something to move; notes that an offload begins."""
    channel = engine.channels[index]
    entry = engine.entries[channel.head]
    move, storage = engine.moves[entry.move], engine.storages[entry.storage]
    if channel.suspended > 0:
        return True
    if index % 2 == READ:
        return bool(move.is_accepted)
    if move.is_withdrawn:
        move.is_withdrawn = False
        return False
    if storage.status != RESIDENT:
        move.state = CANCELLED
        return False
    storage.status = LEAVING
    return True


@compiled
def end_paged_transfer(engine: Engine, index: int, purpose: int, move: int, storage: int) -> None:
    """A transfer is over: the storage is on the GPU again, or has a copy."""
    stream = engine.stream[0]
    if index % 2 == WRITE:
        stream.last_left = storage
        if purpose == DEMAND:
            stream.is_evicting = False
            leave_gpu(engine, storage)
            return
        engine.moves[move].state = LEFT
        engine.copies[engine.moves[move].copy].is_valid = True
    else:
        if purpose == PLANNED:
            engine.moves[move].is_accepted = False
        if engine.storages[storage].next_access == stream.current:
            stream.last_arrived = storage
    engine.storages[storage].status = RESIDENT
    push_if_movable(engine, storage)
