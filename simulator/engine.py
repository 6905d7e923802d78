"""The event loop of one iteration, from cut to cut (DESIGN: Semantics).

At one instant: transfers end, the kernel ends, the boundary before the next kernel is worked off as
far as it goes, idle channels start what they may, rates and pace follow. Then time jumps to the
next event. All changes of an instant come before the rates, so a transfer that follows another
without latency leaves the other rates untouched.
"""

from __future__ import annotations

from teraio.contracts.table import MISSING
from teraio.simulator.channels import (
    begin_bytes,
    end_segment,
    next_finish,
    shift_channels,
    update_pace,
    update_rates,
)
from teraio.simulator.compilation import compiled
from teraio.simulator.event_log import log_event
from teraio.simulator.eviction_heap import shift_keys
from teraio.simulator.paging import (
    accept_prefetches,
    begin_errand,
    end_paged_transfer,
    give_back_memory,
    have_left,
    is_wanted,
    make_room,
    pages_at_kernel_end,
    pages_at_kernel_start,
    storages_are_resident,
)
from teraio.simulator.queues import (
    begin_planned,
    find_head,
    has_served,
    last_required,
    leave_queue,
    may_start,
)
from teraio.simulator.state import (
    DONE,
    FREES,
    IDLE,
    KERNEL_EVENT,
    LATENCY,
    MEMORY_EVENT,
    MEMORY_STALL,
    NEVER,
    PLANNED,
    READ,
    READ_STALL,
    READS,
    ROOM,
    RUNNING,
    STALL_EVENT,
    STUCK,
    WRITE,
    Engine,
)


@compiled
def run_iteration(engine: Engine) -> int:
    """Simulate one iteration; DONE, or why it cannot end. Sums are left in ``account``."""
    stream = engine.stream[0]
    for index in range(engine.channels.size):
        find_head(engine, index)
    wait_for_kernel(engine, 0)
    while True:
        end_phases(engine)
        if stream.stage == RUNNING and stream.kernel_finish <= stream.now:
            end_kernel(engine)
            if stream.current == stream.num_kernels:
                break
        failure = work_off_boundary(engine)
        if failure != DONE:
            return failure
        start_transfers(engine)
        if stream.rates_are_due:
            update_rates(engine)
        update_pace(engine)
        if not advance(engine):
            return STUCK
    close_iteration(engine)
    return DONE


@compiled
def advance(engine: Engine) -> bool:
    """Jump to the next event, accounting for what the kernel did; False if there is none."""
    stream, account = engine.stream[0], engine.account[0]
    upcoming = next_finish(engine)
    if stream.stage == RUNNING:
        upcoming = min(upcoming, stream.kernel_finish)
    elif stream.ready > stream.now:
        upcoming = min(upcoming, stream.ready)
    if upcoming == NEVER:
        return False
    if stream.stage == RUNNING:
        if stream.active_mask:
            account.overlapped += upcoming - stream.now
        else:
            account.alone += upcoming - stream.now
    stream.now = upcoming
    return True


@compiled
def end_phases(engine: Engine) -> None:
    """Latencies that are over turn into byte phases, byte phases that are over end."""
    now = engine.stream[0].now
    for index in range(engine.channels.size):
        channel = engine.channels[index]
        if channel.phase != IDLE and channel.finish <= now:
            if channel.phase == LATENCY:
                begin_bytes(engine, index)
            else:
                end_transfer(engine, index)


@compiled
def end_transfer(engine: Engine, index: int) -> None:
    """A segment has moved; with nothing left of it, the transfer is over."""
    channel = engine.channels[index]
    is_complete = channel.after_stop == 0
    purpose, move, storage = channel.purpose, channel.move, channel.storage
    end_segment(engine, index)
    if is_complete:
        if purpose == PLANNED:
            leave_queue(engine, index)
        if engine.stream[0].is_paged:
            end_paged_transfer(engine, index, purpose, move, storage)


@compiled
def start_transfers(engine: Engine) -> None:
    """Give every idle channel its next transfer: demand first, then the head of its queue."""
    is_paged = engine.stream[0].is_paged
    for index in range(engine.channels.size):
        channel = engine.channels[index]
        if channel.phase != IDLE or (is_paged and begin_errand(engine, index)):
            continue
        while may_start(engine, index):
            if not is_paged or is_wanted(engine, index):
                begin_planned(engine, index)
                break
            leave_queue(engine, index)


@compiled
def wait_for_kernel(engine: Engine, kernel: int) -> None:
    """Begin the boundary before a kernel, at the end of the one before."""
    stream = engine.stream[0]
    stream.current = kernel
    stream.stage = FREES
    if kernel < stream.num_kernels:
        stream.ready = stream.now + engine.kernels[kernel].gap


@compiled
def work_off_boundary(engine: Engine) -> int:
    """Move the waiting kernel through its stages as far as this instant allows."""
    stream = engine.stream[0]
    if stream.stage == FREES and moves_have_left(engine):
        stream.stage = ROOM
        if stream.is_paged:
            give_back_memory(engine)
            accept_prefetches(engine)
    if stream.stage == ROOM:
        has_room = True
        if stream.is_paged:
            has_room, failure = make_room(engine)
            if failure != DONE:
                return failure
        if has_room:
            open_memory(engine)
    if stream.stage == READS and storages_are_there(engine) and stream.ready <= stream.now:
        start_kernel(engine)
    return DONE


@compiled
def moves_have_left(engine: Engine) -> bool:
    """Whether every move with this ``free_by`` has left."""
    return have_left(engine) if engine.stream[0].is_paged else has_served(engine, WRITE)


@compiled
def open_memory(engine: Engine) -> None:
    """The kernel has its memory: what it waits for from now on are storages."""
    stream = engine.stream[0]
    stream.stage = READS
    stream.opened_at = stream.now
    if stream.is_paged:
        stream.memory_cause = stream.last_left
    elif stream.now > stream.ready:
        stream.memory_cause = last_required(engine, WRITE)
    stream.read_cause = MISSING


@compiled
def storages_are_there(engine: Engine) -> bool:
    """Whether all that the kernel accesses is resident; notes the last to arrive."""
    stream = engine.stream[0]
    if stream.is_paged:
        stream.read_cause = stream.last_arrived
        return storages_are_resident(engine)
    if not has_served(engine, READ):
        return False
    if stream.now > stream.ready and stream.now > stream.opened_at:
        stream.read_cause = last_required(engine, READ)
    return True


@compiled
def start_kernel(engine: Engine) -> None:
    """Account for the wait, then run."""
    stream, account = engine.stream[0], engine.account[0]
    now, kernel, ready = stream.now, stream.current, stream.ready
    memory_end = max(stream.opened_at, ready)
    account.gap += engine.kernels[kernel].gap
    account.stall_memory += memory_end - ready
    account.stall_read += now - memory_end
    log_stall(engine, stream.memory_cause, ready, memory_end, MEMORY_STALL)
    log_stall(engine, stream.read_cause, memory_end, now, READ_STALL)
    gpu_bytes = engine.kernels[kernel].gpu_bytes
    if stream.is_paged:
        pages_at_kernel_start(engine)
        gpu_bytes = stream.held + engine.kernels[kernel].workspace_bytes
    account.peak_bytes = max(account.peak_bytes, gpu_bytes)
    log_event(engine, MEMORY_EVENT, kernel, MISSING, MISSING, now, now, gpu_bytes, MISSING)
    stream.stage = RUNNING
    stream.kernel_start = now
    stream.work = engine.kernels[kernel].duration
    stream.factor = 0.0


@compiled
def log_stall(engine: Engine, storage: int, start: int, end: int, cause: int) -> None:
    """A stall event, if there was one."""
    if end > start:
        kernel = engine.stream[0].current
        log_event(engine, STALL_EVENT, kernel, storage, MISSING, start, end, 0, cause)


@compiled
def end_kernel(engine: Engine) -> None:
    """The running kernel has ended: the boundary before the next one begins."""
    stream = engine.stream[0]
    kernel = stream.current
    start = stream.kernel_start
    log_event(engine, KERNEL_EVENT, kernel, MISSING, MISSING, start, stream.now, 0, MISSING)
    if stream.is_paged:
        pages_at_kernel_end(engine)
    wait_for_kernel(engine, kernel + 1)


@compiled
def close_iteration(engine: Engine) -> None:
    """Restart the clock at the cut."""
    stream = engine.stream[0]
    duration = stream.now
    engine.account[0].iteration = duration
    shift_channels(engine, duration)
    if stream.is_paged:
        shift_keys(engine)
    stream.now = 0
