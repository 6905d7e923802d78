"""The engine for a trace, a plan and a machine, before kernel 0 of a cold iteration."""

from __future__ import annotations

import numpy as np

from teraio.contracts.plan import Plan
from teraio.contracts.table import MISSING, BoolArray, FloatArray, IntArray
from teraio.errors import InfeasibleError
from teraio.simulator.machine_arrays import Machine
from teraio.simulator.page_setup import Pages, build_pages, no_pages
from teraio.simulator.plan_arrays import (
    Queues,
    build_queues,
    planned_gpu_bytes,
    returned_at_cut,
)
from teraio.simulator.plan_checks import PlannedMoves, check_moves
from teraio.simulator.state import (
    ACCOUNT,
    CHANNEL,
    EVENT,
    KERNEL,
    LINK,
    RESIDENT,
    STREAM,
    Engine,
    RecordArray,
    records,
)
from teraio.simulator.trace_arrays import kernel_times, residency
from teraio.traces.trace import Trace
from teraio.units import format_bytes, to_picoseconds

_LARGEST_TABULATED_CHANNELS = 12


def build_engine(trace: Trace, plan: Plan | None, machine: Machine, *, record: bool) -> Engine:
    """An engine in the state of the cold start (DESIGN: Placement), which follows from the moves.

    Residency is tracked only if the plan (or without one, the trace) does not fit in index space.
    Raises InputError for a plan that is not this trace's, InfeasibleError for a kernel that needs
    more than the GPU has, CapacityError if storages off the GPU find no room.
    """
    moves = no_moves() if plan is None else check_moves(trace, plan, machine)
    gpu_bytes = _gpu_bytes(trace, moves)
    is_paged = bool(gpu_bytes.max() > machine.gpu_memory_bytes)
    if is_paged:
        check_feasible(trace, machine.gpu_memory_bytes)
    pages = build_pages(trace, plan, moves, machine) if is_paged else None
    return _engine(trace, moves, machine, pages, host_stall_seconds(trace, plan), record=record)


def engine_of_moves(trace: Trace, moves: PlannedMoves, machine: Machine, *, record: bool) -> Engine:
    """The engine for moves that are right and fit, without a plan: what planners judge by."""
    return _engine(trace, moves, machine, None, host_stall_seconds(trace, None), record=record)


def _engine(
    trace: Trace,
    moves: PlannedMoves,
    machine: Machine,
    pages_or_none: Pages | None,
    stall_seconds: float,
    *,
    record: bool,
) -> Engine:
    """``pages_or_none``: residency to track, if the moves do not fit."""
    is_paged = pages_or_none is not None
    pages = pages_or_none or no_pages()
    queues = build_queues(moves, trace.num_kernels, len(machine.channel_names))
    gpu_bytes = _gpu_bytes(trace, moves)
    rates, is_known = _empty_rate_table(len(machine.channel_names))
    return Engine(
        stream=_stream(trace, pages, machine, is_paged),
        account=records(ACCOUNT, 1),
        kernels=_kernels(trace, gpu_bytes, pages, stall_seconds),
        accesses=pages.accesses,
        lists=pages.lists,
        storages=pages.storages,
        moves=pages.moves,
        copies=pages.copies,
        places=pages.places,
        devices=pages.devices,
        channels=_channels(queues, machine),
        entries=queues.entries,
        required=queues.required,
        demand=pages.demand,
        aside=np.zeros(len(pages.storages), dtype=np.int64),
        in_gaps=np.zeros(len(pages.storages), dtype=np.int64),
        heap=pages.heap,
        links=records(
            LINK, 2, solo_rate=machine.link_solo_rate, duplex_rate=machine.link_duplex_rate
        ),
        rates=rates,
        is_known=is_known,
        slowdown=machine.slowdown,
        log=records(EVENT, 0) if not record else _empty_log(trace, queues, is_paged),
    )


def _gpu_bytes(trace: Trace, moves: PlannedMoves) -> IntArray:
    """What each kernel finds on the GPU in index space, int64 (K,)."""
    held_bytes = planned_gpu_bytes(
        moves, trace.storages.allocated_bytes, kernel_times(trace).live_bytes
    )
    result: IntArray = held_bytes + trace.kernels.workspace_bytes
    return result


def check_feasible(trace: Trace, gpu_memory_bytes: int) -> None:
    """Raise InfeasibleError for the first kernel that needs more than the GPU, all else evicted."""
    required = residency(trace).required_bytes
    if required.max() > gpu_memory_bytes:
        kernel = int(np.argmax(required > gpu_memory_bytes))
        raise infeasible(trace, kernel, int(required[kernel]), gpu_memory_bytes)


def infeasible(
    trace: Trace, kernel: int, needed_bytes: int, available_bytes: int
) -> InfeasibleError:
    """The error for a kernel that cannot run."""
    return InfeasibleError(
        f"kernel {kernel} ({trace.kernels.op[kernel]}) needs {needed_bytes} bytes "
        f"({format_bytes(needed_bytes)}) of GPU memory at once, but {available_bytes} bytes "
        f"({format_bytes(available_bytes)}) are available"
    )


def no_moves() -> PlannedMoves:
    """The moves of no plan."""
    indices: IntArray = np.zeros(0, dtype=np.int64)
    flags: BoolArray = np.zeros(0, dtype=bool)
    return PlannedMoves(
        storage=indices,
        device=indices,
        tier_offset_bytes=indices,
        nbytes=indices,
        writes=flags,
        is_tail=flags,
        after_kernel=indices,
        offload_start=indices,
        free_by=indices,
        prefetch_start=indices,
        end=indices,
    )


def _stream(trace: Trace, pages: Pages, machine: Machine, is_paged: bool) -> RecordArray:
    is_on_gpu = pages.storages["status"] == RESIDENT
    return records(
        STREAM,
        1,
        num_kernels=trace.num_kernels,
        is_paged=is_paged,
        capacity=machine.gpu_memory_bytes,
        held=pages.storages["allocated_bytes"][is_on_gpu].sum(),
        evicted=MISSING,
        heap_size=pages.heap_size,
        memory_rate=machine.memory_rate,
    )


def host_stall_seconds(trace: Trace, plan: Plan | None) -> float:
    """What the executor adds to every kernel; nothing where none is at work (``ideal``)."""
    is_executed = plan is None or plan.metadata.planner != "ideal"
    return trace.metadata.dispatch_seconds if is_executed else 0.0


def _kernels(
    trace: Trace, gpu_bytes: IntArray, pages: Pages, host_stall_seconds: float
) -> RecordArray:
    times = kernel_times(trace)
    kernels = records(KERNEL, trace.num_kernels + 1, **pages.kernel_columns)
    kernels["duration"][:-1] = times.duration
    # The host's stall comes before each kernel as a gap does, and is told apart in the account.
    kernels["gap"][:-1] = times.gap + to_picoseconds(host_stall_seconds)
    kernels["gpu_bytes"][:-1] = gpu_bytes
    kernels["workspace_bytes"][:-1] = trace.kernels.workspace_bytes
    return kernels


def _channels(queues: Queues, machine: Machine) -> RecordArray:
    return records(
        CHANNEL,
        len(machine.channel_names),
        first_entry=queues.first[:-1],
        num_entries=np.diff(queues.first),
        served=returned_at_cut(queues),
        latency=machine.latency,
        solo_rate=machine.solo_rate,
        duplex_rate=machine.duplex_rate,
        memory_weight=machine.memory_weight,
        move=MISSING,
        storage=MISSING,
        for_kernel=MISSING,
        finished_at=MISSING,
    )


def _empty_rate_table(num_channels: int) -> tuple[FloatArray, BoolArray]:
    """Room for the rates of every set of channels; beyond a dozen channels for one set only."""
    num_sets = 2**num_channels if num_channels <= _LARGEST_TABULATED_CHANNELS else 1
    return np.zeros((num_sets, num_channels)), np.zeros(num_sets, dtype=bool)


def _empty_log(trace: Trace, queues: Queues, is_paged: bool) -> RecordArray:
    """As long as one iteration can need.

    Per kernel its run, a memory sample and two stalls; per entry of a queue a transfer, twice if
    those of the iteration before are late. Off plan a storage is fetched at most once per access,
    and evicted at most once per arrival, birth or crossing of the cut; each may split a transfer.
    Pages of the array that are never written cost no memory.
    """
    most = 4 * trace.num_kernels + 2 * len(queues.entries)
    if is_paged:
        fetches = len(trace.accesses)
        evictions = fetches + 2 * len(queues.entries) + 2 * len(trace.storages)
        most += 2 * (fetches + evictions)
    return np.empty(most, dtype=EVENT)
