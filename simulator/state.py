"""What the engine works on: arrays of records, one record per kernel, storage, channel, ...

Times are integer picoseconds since the iteration's cut, kernel indices are those of the iteration,
devices are numbered host first, then the SSDs, channels 2 * device + direction. Records keep the
compiled functions' signatures short, which is most of the time that numba takes to compile them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from teraio.contracts.table import BoolArray, FloatArray, IntArray

RecordArray = npt.NDArray[np.void]

NEVER = 2**60
"""A time or a kernel position that does not come."""

READ, WRITE = 0, 1
"""Directions: the parity of a channel's number."""

IDLE, LATENCY, BYTES = 0, 1, 2
"""Phases of a channel. Only transfers in BYTES count for rates, overlap and slowdown."""

PLANNED, DEMAND = 0, 1
"""Purposes of a transfer: the plan's, or to let the kernel run that waits (fetch, eviction)."""

FREES, ROOM, READS, RUNNING = 0, 1, 2, 3
"""Stages of a kernel: it waits for moves to leave, for room (off plan), for storages; it runs."""

ABSENT, RESIDENT, AWAY, ARRIVING = 0, 1, 2, 3
"""Status of a storage off plan. ARRIVING holds GPU memory, AWAY has a copy."""

DONE, STUCK, NO_CAPACITY, NO_VICTIM = 0, 1, 2, 3
"""How an iteration ended."""

KERNEL_EVENT, TRANSFER_EVENT, STALL_EVENT, MEMORY_EVENT = 0, 1, 2, 3
READ_STALL, MEMORY_STALL, OFFLOAD, PREFETCH, DEMAND_FETCH, EVICTION = 0, 1, 2, 3, 4, 5
"""Codes of an event's ``what`` and ``cause``."""


def _record(integers: str, floats: str = "") -> np.dtype[Any]:
    fields = [(name, np.int64) for name in integers.split()]
    return np.dtype([*fields, *((name, np.float64) for name in floats.split())])


KERNEL = _record(
    "duration gap gpu_bytes workspace_bytes "
    "first_access first_birth first_death first_offload first_free first_prefetch"
)
"""One more record than kernels: ``first_*`` of the next kernel ends a kernel's rows.

``gpu_bytes`` as planned, workspace included. Rows of accesses lie in ``Engine.accesses``, all
others in ``Engine.lists``: births and deaths are storages, the rest moves: by offload_start and by
prefetch_start, both in queue order, and by free_by.
"""

ACCESS = _record("storage writes next_access")
"""``next_access``: unrolled kernel of the access that follows, or NEVER."""

STORAGE = _record(
    "allocated_bytes nbytes is_movable is_small next_at_birth birth_rank first_copy "
    "status next_access is_fresh serial num_leaving overflow_device overflow_offset num_pushes"
)
"""One more record than storages, which ends the last one's copies.

``is_fresh``: fetched ahead of its use, which is yet to come. ``serial`` grows with the moment of
birth. ``num_leaving``: writes of it that are queued or under way; its memory cannot go before.
``overflow_device`` holds a copy that the plan does not know (MISSING: none), in a gap of the arenas
at ``overflow_offset``, or with MISSING beside them. ``num_pushes`` into the heap.
"""

MOVE = _record("storage copy writes num_issued is_accepted")
"""``num_issued``: entries in its write queue that are to be served; ``is_accepted``: its prefetch
has taken GPU memory, and its entry in the read queue is to be served.
"""

COPY = _record("device begin end is_valid")
"""Bytes of a device that the plan has for the copy of one storage. It is valid from the moment at
which its write is issued (the storage's ``num_leaving`` tells whether that is over).
"""

PLACE = _record("copy storage begin end reach")
"""A row of ``copies`` in the order of devices and offsets; ``reach``: highest end on that device up
to here.
"""

DEVICE = _record("alignment room lowest_room arena_bytes first_place")
"""Overflow room in bytes, and the lowest it was in this iteration; where the plan's arena ends. One
more record than devices, which ends the last one's places.
"""

CHANNEL = _record(
    "first_entry num_entries head trigger latency "
    "phase purpose cause move storage for_kernel anchor finish after_stop suspended served "
    "started segment_bytes finished_at demand_head demand_end busy moved_bytes",
    "solo_rate duplex_rate memory_weight remaining rate",
)
"""A transfer in BYTES had ``remaining`` bytes to go at ``anchor`` and moves at ``rate`` since, so
its finish depends on its own history only. ``after_stop`` bytes follow after a pause that a demand
fetch asked for; ``suspended`` bytes of the head of the queue wait for that to end. ``served``
counts entries of the queue, from the first of this iteration (negative: of the one before);
``head`` is the row of the next one, and ``trigger`` the kernel that it waits for.
"""

ENTRY = _record("move storage nbytes trigger for_kernel")
"""A planned transfer. Offloads start after kernel ``trigger``, prefetches before it."""

ERRAND = _record("storage cause")
"""A transfer outside the static order; ``cause``: of its event."""

LINK = _record("", "solo_rate duplex_rate left share")
"""One direction of the GPU's link; ``left`` and ``share`` are scratch of the filling."""

HEAP_ENTRY = _record("key serial storage push")
"""``push``: which of the storage's it was; only the latest entry of a storage counts."""

EVENT = _record("what kernel storage channel start end nbytes cause")

STREAM = _record(
    "num_kernels is_paged capacity now current stage ready opened_at kernel_start kernel_anchor "
    "kernel_finish memory_cause read_cause last_left last_arrived held evicted num_aside "
    "num_in_gaps active_mask rates_are_due heap_size num_events",
    "work factor memory_rate",
)
"""Clock and compute stream. ``ready`` is the end of the gap before the current kernel, which had
its memory at ``opened_at``; ``held`` are GPU bytes of storages; at ``kernel_anchor`` ``work``
picoseconds were left, slowed down by ``factor`` since. ``evicted``: the storage whose memory is to
go next, or MISSING.
"""

ACCOUNT = _record(
    "alone overlapped stall_read stall_memory gap iteration peak_bytes "
    "demand_fetches demand_fetch_bytes evictions eviction_bytes dropped_prefetches"
)
"""Sums over one iteration; the first five add up to ``iteration``."""


class Engine(NamedTuple):
    """Everything that an iteration needs; ``stream`` and ``account`` hold one record each.

    ``required[k, c]``: entries that channel c must have served before kernel k may start.
    ``rates[mask]``: fair rates while the channels in the bit mask are active, where
    ``is_known[mask]``. ``slowdown`` is indexed by (reads active) + 2 * (writes active).
    ``demand[c]``: transfers that channel c owes beside its queue. ``aside``: storages that no
    device has room for, while others are asked; ``in_gaps``: those with a copy in a gap of the
    arenas, in the order of devices and offsets. An empty log records nothing.
    """

    stream: RecordArray
    account: RecordArray
    kernels: RecordArray
    accesses: RecordArray
    lists: IntArray
    storages: RecordArray
    moves: RecordArray
    copies: RecordArray
    places: RecordArray
    devices: RecordArray
    channels: RecordArray
    entries: RecordArray
    required: IntArray
    demand: RecordArray
    aside: IntArray
    in_gaps: IntArray
    heap: RecordArray
    links: RecordArray
    rates: FloatArray
    is_known: BoolArray
    slowdown: FloatArray
    log: RecordArray


def records(dtype: np.dtype[Any], length: int, **columns: Any) -> RecordArray:
    """Zeroed records with some columns set."""
    result = np.zeros(length, dtype=dtype)
    for name, values in columns.items():
        result[name] = values
    return result
