"""Records of an off-plan run: what residency depends on, and its state before the first kernel."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from teraio.contracts.plan import Plan
from teraio.contracts.table import MISSING, BoolArray, IntArray
from teraio.simulator.cold_start import Placement, place_storages
from teraio.simulator.eviction_heap import CLASS, ENTRIES_PER_STORAGE
from teraio.simulator.eviction_rule import SMALL_BYTES
from teraio.simulator.machine_arrays import Machine
from teraio.simulator.plan_arrays import MoveLists, build_move_lists
from teraio.simulator.plan_checks import PlannedMoves
from teraio.simulator.state import (
    ABSENT,
    ACCESS,
    AWAY,
    COPY,
    DEVICE,
    ERRAND,
    HEAP_ENTRY,
    MOVE,
    PLACE,
    RESIDENT,
    STORAGE,
    RecordArray,
    records,
)
from teraio.simulator.trace_arrays import Residency, residency
from teraio.traces.trace import Trace


class Pages(NamedTuple):
    """What :class:`teraio.simulator.state.Engine` holds of residency; empty for a run on plan.

    ``kernel_columns`` go into its kernel records.
    """

    accesses: RecordArray
    lists: IntArray
    storages: RecordArray
    moves: RecordArray
    copies: RecordArray
    places: RecordArray
    devices: RecordArray
    demand: RecordArray
    heap: RecordArray
    heap_size: int
    kernel_columns: dict[str, IntArray]


def no_pages() -> Pages:
    """Nothing to track."""
    return Pages(
        accesses=records(ACCESS, 0),
        lists=np.zeros(0, dtype=np.int64),
        storages=records(STORAGE, 0),
        moves=records(MOVE, 0),
        copies=records(COPY, 0),
        places=records(PLACE, 0),
        devices=records(DEVICE, 0),
        demand=np.zeros((0, 0), dtype=ERRAND),
        heap=records(HEAP_ENTRY, 0),
        heap_size=0,
        kernel_columns={},
    )


def build_pages(trace: Trace, plan: Plan | None, moves: PlannedMoves, machine: Machine) -> Pages:
    """The state at the cut of a cold start. Raises CapacityError if a storage fits nowhere."""
    needs = residency(trace)
    move_lists = build_move_lists(moves, trace.num_kernels, len(trace.storages))
    crossing = _moves_over_cut(moves, trace.num_kernels)
    copies = _copies(trace, plan, move_lists, crossing, machine)
    places = _places(copies, move_lists)
    placement = _placement(trace, plan, moves, move_lists, crossing, copies, machine)
    lists, kernel_columns = _kernel_lists(needs, move_lists)
    storages = _storages(trace, needs, move_lists, placement)
    evictable = np.flatnonzero(placement.is_on_gpu & needs.is_movable)
    return Pages(
        accesses=records(
            ACCESS,
            len(trace.accesses),
            storage=trace.accesses.storage,
            writes=trace.accesses.writes,
            next_access=needs.access_next,
        ),
        lists=lists,
        storages=storages,
        moves=records(
            MOVE,
            len(moves.storage),
            storage=moves.storage,
            copy=move_lists.copy,
            writes=moves.writes,
        ),
        copies=copies,
        places=places,
        devices=_devices(plan, machine, copies, placement.room_bytes),
        # At most one read and one write of each storage wait at a time, writes overtaken aside.
        demand=np.zeros((len(machine.channel_names), 2 * len(storages)), dtype=ERRAND),
        heap=_heap(evictable, storages),
        heap_size=len(evictable),
        kernel_columns=kernel_columns,
    )


class _Crossing(NamedTuple):
    """Moves of the iteration before that reach over the cut, bool (moves,).

    ``has_left``: has its copy and has not come back. ``is_away``: its GPU memory is given back.
    """

    has_left: BoolArray
    is_away: BoolArray


def _moves_over_cut(moves: PlannedMoves, num_kernels: int) -> _Crossing:
    crosses = np.where(moves.is_tail, moves.end >= num_kernels, moves.prefetch_start > num_kernels)
    return _Crossing(
        has_left=crosses & (moves.offload_start < num_kernels),
        is_away=crosses & (moves.free_by <= num_kernels),
    )


def _copies(
    trace: Trace, plan: Plan | None, lists: MoveLists, crossing: _Crossing, machine: Machine
) -> RecordArray:
    nbytes = trace.storages.nbytes[_storage_of_copy(lists)]
    copies = records(
        COPY,
        len(lists.copy_device),
        device=lists.copy_device,
        begin=lists.copy_offset,
        end=lists.copy_offset + np.maximum(nbytes, 1),
    )
    copies["is_valid"] = _listed_copies(plan, lists, machine)
    copies["is_valid"][lists.copy[crossing.has_left]] = True
    return copies


def _storage_of_copy(lists: MoveLists) -> IntArray:
    return np.repeat(np.arange(len(lists.copy_first) - 1), np.diff(lists.copy_first))


def _places(copies: RecordArray, lists: MoveLists) -> RecordArray:
    order = np.lexsort((copies["begin"], copies["device"]))
    reach = copies["end"][order]
    for rows in np.split(
        np.arange(len(order)), np.flatnonzero(np.diff(copies["device"][order])) + 1
    ):
        reach[rows] = np.maximum.accumulate(reach[rows])
    return records(
        PLACE,
        len(order),
        copy=order,
        storage=_storage_of_copy(lists)[order],
        begin=copies["begin"][order],
        end=copies["end"][order],
        reach=reach,
    )


def _devices(
    plan: Plan | None, machine: Machine, copies: RecordArray, room_bytes: IntArray
) -> RecordArray:
    count = len(machine.devices)
    devices = records(DEVICE, count + 1)
    devices["alignment"][:-1] = machine.alignment
    devices["room"][:-1] = room_bytes
    devices["first_place"] = np.searchsorted(np.sort(copies["device"]), np.arange(count + 1))
    ends = np.zeros(count, dtype=np.int64)
    np.maximum.at(ends, copies["device"], copies["end"])
    if plan is not None:
        listed = plan.copies
        for number, device in enumerate(machine.devices):
            rows = (listed.device == device).astype(bool)
            nbytes = plan.storages.nbytes[listed.storage[rows]]
            end = (listed.tier_offset_bytes[rows] + np.maximum(nbytes, 1)).max(initial=0)
            ends[number] = max(ends[number], end)
    devices["arena_bytes"][:-1] = -(-ends // machine.alignment) * machine.alignment
    return devices


def _listed_copies(plan: Plan | None, lists: MoveLists, machine: Machine) -> BoolArray:
    """Which of the moves' slots hold a copy that the plan lists for kernel 0."""
    if plan is None or len(plan.copies) == 0:
        return np.zeros(len(lists.copy_device), dtype=bool)
    table = plan.copies
    columns = (table.storage.tolist(), table.device.tolist(), table.tier_offset_bytes.tolist())
    listed = set(zip(*columns, strict=True))
    storage = _storage_of_copy(lists)
    device = [machine.devices[index] for index in lists.copy_device]
    slots = zip(storage.tolist(), device, lists.copy_offset.tolist(), strict=True)
    return np.array([slot in listed for slot in slots], dtype=bool)


def _placement(
    trace: Trace,
    plan: Plan | None,
    moves: PlannedMoves,
    lists: MoveLists,
    crossing: _Crossing,
    copies: RecordArray,
    machine: Machine,
) -> Placement:
    needs = residency(trace)
    is_away = np.zeros(len(trace.storages), dtype=bool)
    is_away[moves.storage[crossing.is_away]] = True
    num_valid = np.concatenate([[0], np.cumsum(copies["is_valid"])])
    return place_storages(
        trace.storages,
        np.flatnonzero(needs.is_alive_at_cut & ~is_away),
        first_access=needs.next_at_cut,
        has_copy=num_valid[lists.copy_first[1:]] > num_valid[lists.copy_first[:-1]],
        gpu_memory_bytes=machine.gpu_memory_bytes,
        room_bytes=overflow_room(plan, machine),
        alignment=machine.alignment,
    )


def _storages(
    trace: Trace, needs: Residency, lists: MoveLists, placement: Placement
) -> RecordArray:
    status = np.where(placement.is_on_gpu, RESIDENT, np.where(needs.is_alive_at_cut, AWAY, ABSENT))
    count = len(trace.storages) + 1
    storages = records(STORAGE, count, first_copy=lists.copy_first, overflow_offset=MISSING)
    birth_rank = np.zeros(count - 1, dtype=np.int64)
    birth_rank[needs.birth_storage] = np.arange(len(needs.birth_storage))
    columns = {
        "allocated_bytes": trace.storages.allocated_bytes,
        "nbytes": trace.storages.nbytes,
        "is_movable": needs.is_movable,
        "is_small": trace.storages.allocated_bytes < SMALL_BYTES,
        "next_at_birth": needs.next_at_birth,
        "birth_rank": birth_rank,
        # What the iteration before has made is younger than what persists.
        "serial": np.where(trace.is_persistent, np.arange(count - 1), count + birth_rank),
        "status": status,
        "next_access": needs.next_at_cut,
        "overflow_device": placement.overflow_device,
    }
    for name, values in columns.items():
        storages[name][:-1] = values
    return storages


def _kernel_lists(needs: Residency, lists: MoveLists) -> tuple[IntArray, dict[str, IntArray]]:
    """All rows by kernel, one list after the other, and where each kernel's begin."""
    parts = {
        "first_birth": (needs.birth_first, needs.birth_storage),
        "first_death": (needs.death_first, needs.death_storage),
        "first_offload": (lists.offload_first, lists.offload_move),
        "first_free": (lists.free_first, lists.free_move),
        "first_prefetch": (lists.prefetch_first, lists.prefetch_move),
    }
    columns, length = {"first_access": needs.access_first}, 0
    for name, (first, rows) in parts.items():
        columns[name] = first + length
        length += len(rows)
    return np.concatenate([rows for _, rows in parts.values()]), columns


def _heap(evictable: IntArray, storages: RecordArray) -> RecordArray:
    """Sorted entries are a heap."""
    rows = storages[evictable]
    key = rows["next_access"] - rows["is_small"] * CLASS
    order = np.lexsort((-rows["serial"], -key))
    heap = records(HEAP_ENTRY, ENTRIES_PER_STORAGE * len(storages))
    heap["key"][: len(order)] = key[order]
    heap["serial"][: len(order)] = rows["serial"][order]
    heap["storage"][: len(order)] = evictable[order]
    return heap


def overflow_room(plan: Plan | None, machine: Machine) -> IntArray:
    """Bytes per device beside the plan's arenas; on the host, beside the bounce buffers as well.

    An SSD whose bounce buffer the host budget cannot hold takes no overflow.
    """
    room = machine.capacity_bytes.copy()
    for device in range(1, len(room)):
        is_usable = machine.bounce_bytes[device] <= room[0]
        room[0] -= machine.bounce_bytes[device] if is_usable else 0
        room[device] *= is_usable
    if plan is not None:
        arenas = np.array([planned_arena_bytes(plan, device) for device in machine.devices])
        room = np.minimum(room, machine.capacity_bytes - arenas)
    return np.maximum(room, 0)


def planned_arena_bytes(plan: Plan, device: str) -> int:
    """What a plan reserves on a device, as its metadata say (host: bounce buffers included)."""
    return int(plan.metadata.arena_bytes.get(device, 0))
