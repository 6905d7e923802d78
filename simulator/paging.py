"""Off plan: residency is tracked for real; what lacks is fetched, what is too much is evicted.

Used when there is no plan, or the plan does not fit (DESIGN: Off plan). A kernel that waits evicts
one storage after another, in the order of :mod:`eviction_rule`, until its own fits; then it fetches
what is missing, ahead of planned chunks that have not started. Of the plan, what can be carried out
is. What is decided follows from the order of kernels alone, as in the executor: a write that is
queued is a copy, for which memory that is to go waits.
"""

from __future__ import annotations

from teraio.contracts.table import MISSING
from teraio.simulator.channels import begin_transfer, request_pause
from teraio.simulator.compilation import compiled
from teraio.simulator.copies import (
    copy_device,
    give_up_copies,
    has_copy,
    leave_gpu,
    reserve_overflow,
    take_place,
)
from teraio.simulator.eviction_heap import pop_resident, push_resident
from teraio.simulator.state import (
    ABSENT,
    ARRIVING,
    AWAY,
    DEMAND,
    DEMAND_FETCH,
    DONE,
    EVICTION,
    NO_CAPACITY,
    NO_VICTIM,
    OFFLOAD,
    PLANNED,
    PREFETCH,
    READ,
    RESIDENT,
    WRITE,
    Engine,
)

# Boundary before a kernel, in the order of its stages.


@compiled
def have_left(engine: Engine) -> bool:
    """Whether the copies of all that the current kernel's ``free_by`` sends away are written."""
    kernel = engine.stream[0].current
    for row in range(engine.kernels[kernel].first_free, engine.kernels[kernel + 1].first_free):
        storage = engine.moves[engine.lists[row]].storage
        holds_memory = engine.storages[storage].status in (RESIDENT, ARRIVING)
        if holds_memory and has_copy(engine, storage) and is_in_transfer(engine, storage):
            return False
    return True


@compiled
def is_in_transfer(engine: Engine, storage: int) -> bool:
    """Whether a transfer still uses the memory of a storage."""
    record = engine.storages[storage]
    return bool(record.status == ARRIVING or record.num_leaving > 0)


@compiled
def give_back_memory(engine: Engine) -> None:
    """What has a copy gives its GPU memory back at ``free_by``; without one it stays."""
    kernel = engine.stream[0].current
    for row in range(engine.kernels[kernel].first_free, engine.kernels[kernel + 1].first_free):
        storage = engine.moves[engine.lists[row]].storage
        if engine.storages[storage].status == RESIDENT and has_copy(engine, storage):
            leave_gpu(engine, storage)


@compiled
def accept_prefetches(engine: Engine) -> None:
    """Prefetches that fit beside what the kernel creates take their memory, in queue order."""
    stream = engine.stream[0]
    kernel = stream.current
    created_bytes = engine.kernels[kernel].workspace_bytes
    for row in range(engine.kernels[kernel].first_birth, engine.kernels[kernel + 1].first_birth):
        created_bytes += engine.storages[engine.lists[row]].allocated_bytes
    first, end = engine.kernels[kernel].first_prefetch, engine.kernels[kernel + 1].first_prefetch
    for row in range(first, end):
        move = engine.moves[engine.lists[row]]
        storage = engine.storages[move.storage]
        if storage.status != AWAY:
            continue
        if stream.held + storage.allocated_bytes + created_bytes > stream.capacity:
            engine.account[0].dropped_prefetches += 1
            continue
        storage.status = ARRIVING
        storage.is_fresh = True
        stream.held += storage.allocated_bytes
        push_if_movable(engine, move.storage)
        if engine.copies[move.copy].is_valid:
            move.is_accepted = True
        else:
            channel = 2 * copy_device(engine, move.storage) + READ
            queue_errand(engine, channel, move.storage, PREFETCH)


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
        if stream.evicted == MISSING:
            failure = choose_victim(engine)
            if failure != DONE:
                return False, failure
        if is_in_transfer(engine, stream.evicted):
            return False, DONE
        leave_gpu(engine, stream.evicted)
        stream.evicted = MISSING
    end_eviction(engine)
    fetch_missing(engine)
    add_births(engine)
    return True, DONE


@compiled
def choose_victim(engine: Engine) -> int:
    """Note who is to leave, and issue its write if it has no copy; a failure or DONE.

    One that no device has room for stays: another, smaller one may still find a place.
    """
    stream = engine.stream[0]
    while True:
        victim = pop_resident(engine)
        if victim == MISSING:
            return NO_CAPACITY if stream.num_aside > 0 else NO_VICTIM
        if has_copy(engine, victim):
            break
        device = reserve_overflow(engine, victim)
        if device != MISSING:
            engine.storages[victim].num_leaving += 1
            engine.account[0].eviction_bytes += engine.storages[victim].nbytes
            queue_errand(engine, 2 * device + WRITE, victim, EVICTION)
            break
        engine.aside[stream.num_aside] = victim
        stream.num_aside += 1
    engine.account[0].evictions += 1
    stream.evicted = victim
    return DONE


@compiled
def end_eviction(engine: Engine) -> None:
    """Those that found no place are asked again the next time."""
    stream = engine.stream[0]
    for row in range(stream.num_aside):
        push_resident(engine, engine.aside[row])
    stream.num_aside = 0


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
            queue_errand(engine, 2 * copy_device(engine, index) + READ, index, DEMAND_FETCH)
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
        storage.serial = 2 * engine.storages.size + storage.birth_rank
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
    """Accesses end periods, and written storages lose their copies."""
    kernel = engine.stream[0].current
    this, following = engine.kernels[kernel], engine.kernels[kernel + 1]
    for row in range(this.first_access, following.first_access):
        access = engine.accesses[row]
        engine.storages[access.storage].next_access = access.next_access
        engine.storages[access.storage].is_fresh = False
        if access.writes:
            give_up_copies(engine, access.storage)
        push_if_movable(engine, access.storage)


@compiled
def pages_at_kernel_end(engine: Engine) -> None:
    """Offloads are issued, deaths give memory and copies back, and with them places.

    At the cut of an iteration that did not go by its plan, offloads without a place are given up.
    """
    stream = engine.stream[0]
    this, following = engine.kernels[stream.current], engine.kernels[stream.current + 1]
    num_refused = 0
    for row in range(this.first_offload, following.first_offload):
        if not issue_offload(engine, engine.lists[row]):
            engine.aside[num_refused] = engine.lists[row]
            num_refused += 1
    for row in range(this.first_death, following.first_death):
        bury(engine, engine.lists[row])
    if stream.current + 1 < stream.num_kernels or is_on_plan(engine):
        for row in range(num_refused):
            issue_offload(engine, engine.aside[row])


@compiled
def bury(engine: Engine, index: int) -> None:
    """A storage has died."""
    storage = engine.storages[index]
    if storage.status != AWAY:
        engine.stream[0].held -= storage.allocated_bytes
    storage.status = ABSENT
    give_up_copies(engine, index)


@compiled
def is_on_plan(engine: Engine) -> bool:
    """Whether nothing had to be evicted or fetched, and no prefetch dropped, in this iteration."""
    account = engine.account[0]
    return bool(account.evictions + account.demand_fetches + account.dropped_prefetches == 0)


@compiled
def issue_offload(engine: Engine, index: int) -> bool:
    """Queue a planned write, if there is anything to write; False if its place holds another's only
    copy.
    """
    move = engine.moves[index]
    copy, storage = engine.copies[move.copy], engine.storages[move.storage]
    if storage.status not in (RESIDENT, ARRIVING) or (copy.is_valid and not move.writes):
        return True
    if not take_place(engine, move.storage, copy.device, copy.begin):
        return False
    give_up_copies(engine, move.storage)
    copy.is_valid = True
    storage.num_leaving += 1
    if move.writes:
        move.num_issued += 1
    else:
        # The clean copy that the plan counts on is gone.
        queue_errand(engine, 2 * copy.device + WRITE, move.storage, OFFLOAD)
    return True


@compiled
def push_if_movable(engine: Engine, storage: int) -> None:
    """A storage that holds memory and may move can be evicted."""
    if engine.storages[storage].is_movable:
        push_resident(engine, storage)


# Transfers.


@compiled
def queue_errand(engine: Engine, index: int, storage: int, cause: int) -> None:
    """Let a storage move outside the static order, as soon as the chunk under way has."""
    channel, errands = engine.channels[index], engine.demand[index]
    if channel.demand_end == errands.size:
        for row in range(channel.demand_head, channel.demand_end):
            errands[row - channel.demand_head] = errands[row]
        channel.demand_end -= channel.demand_head
        channel.demand_head = 0
    errands[channel.demand_end].storage = storage
    errands[channel.demand_end].cause = cause
    channel.demand_end += 1
    request_pause(engine, index)


@compiled
def begin_errand(engine: Engine, index: int) -> bool:
    """Start the next such transfer on an idle channel; False if there is none."""
    channel = engine.channels[index]
    if channel.demand_head == channel.demand_end:
        return False
    errand = engine.demand[index, channel.demand_head]
    channel.demand_head += 1
    channel.cause = errand.cause
    kernel, nbytes = engine.stream[0].current, engine.storages[errand.storage].nbytes
    begin_transfer(engine, index, DEMAND, MISSING, errand.storage, kernel, nbytes)
    return True


@compiled
def is_wanted(engine: Engine, index: int) -> bool:
    """Whether the head of a queue is to be served; notes that an offload begins."""
    channel = engine.channels[index]
    move = engine.moves[engine.entries[channel.head].move]
    if channel.suspended > 0:
        return True
    if index % 2 == READ:
        return bool(move.is_accepted)
    if move.num_issued == 0:
        return False
    move.num_issued -= 1
    return True


@compiled
def end_paged_transfer(engine: Engine, index: int, purpose: int, move: int, storage: int) -> None:
    """A transfer is over: the storage is on the GPU again, or has its copy."""
    stream = engine.stream[0]
    if index % 2 == WRITE:
        stream.last_left = storage
        engine.storages[storage].num_leaving -= 1
        return
    if purpose == PLANNED:
        engine.moves[move].is_accepted = False
    if engine.storages[storage].next_access == stream.current:
        stream.last_arrived = storage
    engine.storages[storage].status = RESIDENT
