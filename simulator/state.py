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

ABSENT, RESIDENT, LEAVING, AWAY, ARRIVING = 0, 1, 2, 3, 4
"""Status of a storage off plan. LEAVING and ARRIVING hold GPU memory, AWAY has a valid copy."""

PENDING, LEFT, CANCELLED = 0, 1, 2
"""State of a move off plan: LEFT has its copy, CANCELLED has nothing to move."""

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
    "first_access first_birth first_death first_clean first_free first_prefetch first_release"
)
"""One more record than kernels: ``first_*`` of the next kernel ends a kernel's rows.

``gpu_bytes`` as planned, workspace included. Rows of accesses lie in ``Engine.accesses``, all
others in ``Engine.lists``: births and deaths are storages, the rest moves: without a write by
offload_start (clean), all by free_by (free), by prefetch_start in queue order (prefetch), and by
before_kernel those after which the copy goes (release).
"""

ACCESS = _record("storage writes next_access")
"""``next_access``: unrolled kernel of the access that follows, or NEVER."""

STORAGE = _record(
    "allocated_bytes nbytes is_movable next_at_birth first_copy status next_access overflow_device "
    "num_pushes"
)
"""One more record than storages, which ends the last one's copies; ``num_pushes`` into the heap."""

MOVE = _record("storage copy is_tail writes state is_withdrawn is_accepted")
"""``is_withdrawn``: its entry in a write queue is to be skipped; ``is_accepted``: its prefetch has
taken GPU memory."""

COPY = _record("device is_valid")
"""A slot of the plan's that holds, or will hold, the copy of one storage."""

DEVICE = _record("alignment room lowest_room")
"""Overflow room in bytes, and the lowest it was in this iteration."""

CHANNEL = _record(
    "first_entry num_entries head trigger latency "
    "phase purpose move storage for_kernel anchor finish after_stop suspended served "
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

LINK = _record("", "solo_rate duplex_rate left share")
"""One direction of the GPU's link; ``left`` and ``share`` are scratch of the filling."""

HEAP_ENTRY = _record("key storage push")
"""``push``: which of the storage's it was; only the latest entry of a storage counts."""

EVENT = _record("what kernel storage channel start end nbytes cause")

STREAM = _record(
    "num_kernels is_paged capacity now current stage ready opened_at kernel_start kernel_anchor "
    "kernel_finish memory_cause read_cause last_left last_arrived held is_evicting active_mask "
    "rates_are_due heap_size num_events",
    "work factor memory_rate",
)
"""Clock and compute stream. ``ready`` is the end of the gap before the current kernel, which had
its memory at ``opened_at``; ``held`` are GPU bytes of storages; at ``kernel_anchor`` ``work``
picoseconds were left, slowed down by ``factor`` since.
"""

ACCOUNT = _record(
    "alone overlapped stall_read stall_memory gap iteration peak_bytes "
    "demand_fetches demand_fetch_bytes evictions eviction_bytes"
)
"""Sums over one iteration; the first five add up to ``iteration``."""


class Engine(NamedTuple):
    """Everything that an iteration needs; ``stream`` and ``account`` hold one record each.

    ``required[k, c]``: entries that channel c must have served before kernel k may start.
    ``rates[mask]``: fair rates while the channels in the bit mask are active, where
    ``is_known[mask]``. ``slowdown`` is indexed by (reads active) + 2 * (writes active).
    ``demand[c]``: storages whose demand transfers channel c owes. An empty log records nothing.
    """

    stream: RecordArray
    account: RecordArray
    kernels: RecordArray
    accesses: RecordArray
    lists: IntArray
    storages: RecordArray
    moves: RecordArray
    copies: RecordArray
    devices: RecordArray
    channels: RecordArray
    entries: RecordArray
    required: IntArray
    demand: IntArray
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
