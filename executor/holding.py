"""What the executor knows of one storage, and the records of what happened to storages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from teraio.executor.stores import Transfer
from teraio.executor.tiers import Slot
from teraio.profiler.storages import StorageState


class Arrival(Protocol):
    """What has brought a storage where it lies."""

    def make_stream_wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Let work issued later to ``stream`` (None: the current one) find it there."""
        ...


NO_STREAMS: frozenset[torch.Stream] = frozenset()


class Buried(NamedTuple):
    """The attachment of the StorageState of a storage that has died, with the row that it played.

    It is no Holding and counts as false: who needs one gets a :func:`ghost_of` it.
    """

    row: int
    is_dead: bool = True

    def __bool__(self) -> bool:
        return False


class Holding:
    """The attachment of a StorageState.

    ``arriving`` and ``leaving`` are transfers of its present content; ``superseded`` are writes of
    older content that may still read its memory. ``is_dead``: it was freed, or resized by the user,
    which makes it another. ``is_fixed``: it can never leave. ``is_held``: it must not leave now.
    ``in_flight``: uses under way beside the compute stream (:mod:`uses_in_flight`); ``arrived`` is
    what has brought it where it lies, last; ``shared_with``: streams whose work must end before its
    memory serves another, beside the one that it was allocated on.
    ``stamp`` numbers its places in the eviction order; the newest counts. ``address``: where it
    lies, where that is kept account of (:mod:`gpu_memory`).
    """

    __slots__ = (
        "address",
        "allocated_bytes",
        "arrived",
        "arriving",
        "in_flight",
        "is_dead",
        "is_fixed",
        "is_held",
        "is_resident",
        "last_use",
        "leaving",
        "row",
        "shared_with",
        "slot",
        "stamp",
        "state",
        "superseded",
    )

    def __init__(self, state: StorageState, allocated_bytes: int, *, is_fixed: bool) -> None:
        self.state = state
        self.row = -1
        self.allocated_bytes = allocated_bytes
        self.is_dead = False
        self.is_fixed = is_fixed
        self.is_held = False
        self.is_resident = True
        self.slot: Slot | None = None
        self.arriving: Transfer | None = None
        self.arrived: Arrival | None = None
        self.in_flight = 0
        self.shared_with = NO_STREAMS
        self.leaving: Transfer | None = None
        self.superseded: list[Transfer] | None = None
        self.last_use = 0
        self.stamp = 0
        self.address = 0

    @property
    def must_stay(self) -> bool:
        """Whether it may not even be copied now, or there is nothing to copy."""
        return self.is_fixed or self.is_dead or self.in_flight > 0

    @property
    def can_leave(self) -> bool:
        """Whether giving its memory back would be possible and worth something."""
        return (
            self.is_resident
            and not self.is_dead
            and not self.is_fixed
            and not self.is_held
            and not self.in_flight
            and self.allocated_bytes > 0
            and self.state.reference() is not None
        )


def died(state: StorageState) -> bool:
    """Mark a storage as dead; whether it is accounted for, and not marked yet."""
    attachment = state.attachment
    if attachment is None:
        # Resized again before any kernel: the storage lives on as another generation.
        state.attachment = Buried(-1)
    elif not attachment.is_dead:
        attachment.is_dead = True
        return True
    return False


def parted(state: StorageState) -> Holding:
    """The holding of a storage that has died, which its state does not refer to any more.

    Each would keep the other, thousands in an iteration, until Python looks for garbage.
    """
    holding: Holding = state.attachment
    state.attachment = Buried(holding.row)
    return holding


def ghost_of(state: StorageState) -> Holding:
    """A holding that nothing accounts for, of a storage that has died since it was viewed: the next
    kernel names it all the same. Their states do not refer to ghosts.
    """
    ghost = Holding(state, 0, is_fixed=True)
    ghost.is_dead = True
    ghost.row = -1 if state.attachment is None else state.attachment.row
    return ghost


class TransferRecord(NamedTuple):
    """A transfer for the timeline: its kernel, storage row, channel and cause."""

    transfer: Transfer
    device: str
    kernel: int
    row: int
    cause: str


class Wait(NamedTuple):
    """Time in which the next kernel waited for a transfer; cause: read | memory.

    Seconds are the host's: where a GPU's stream waits the host does not.
    """

    kernel: int
    row: int
    cause: str
    start_seconds: float
    end_seconds: float
    transfer: Transfer | None = None


@dataclass
class Traffic:
    """What was moved off plan, and what happened in the current iteration.

    ``relocated_bytes``: within the GPU, to keep its memory together; ``homeless_requests``: blocks
    for which no room could be made that way; ``allocator_looks``: how often its layout was asked.
    """

    demand_fetches: int = 0
    demand_fetch_bytes: int = 0
    evictions: int = 0
    eviction_bytes: int = 0
    dropped_prefetches: int = 0
    relocated_bytes: int = 0
    homeless_requests: int = 0
    allocator_looks: int = 0
    transfers: list[TransferRecord] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
