"""A plan's accesses and moves on unbroken axes, for the checks of ``plan_checks``.

Two axes are used, K being the number of kernels of an iteration.

*Position* of a kernel for a storage: kernels since its birth, 0..K-1 (a persistent storage is born
at kernel 0). Within one life, later means a larger position, whatever wraps over the cut.

*Absolute kernel*: birth + position, so 0..2K-2 within a life; kernel k of the next iteration is
k + K. All kernels of a move lie at or after its ``after_kernel``, in the order of DESIGN: Plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from teraio.contracts.plan import Plan
from teraio.contracts.table import MISSING, BoolArray, IntArray, TextArray


@dataclass(frozen=True)
class OrderedAccesses:
    """Accesses sorted by storage, then position; int64 or bool (accesses,).

    ``version`` counts the storage's write accesses up to and including this one: what the storage
    holds after an access is named by it. ``first`` and ``last`` are the rows, in this order, of the
    storage's first and last access.
    """

    storage: IntArray
    kernel: IntArray
    position: IntArray
    version: IntArray
    first: IntArray
    last: IntArray
    num_kernels: int

    def find(self, storage: IntArray, position: IntArray) -> tuple[IntArray, BoolArray]:
        """Rows of the accesses of ``storage`` at ``position``, and whether there is one at all."""
        rows = np.searchsorted(self._key(self.storage, self.position), self._key(storage, position))
        inside = np.minimum(rows, max(0, len(self.storage) - 1))
        if len(self.storage) == 0:
            return inside, np.zeros(len(inside), dtype=bool)
        found = (self.storage[inside] == storage) & (self.position[inside] == position)
        return inside, found

    def _key(self, storage: IntArray, position: IntArray) -> IntArray:
        return storage * self.num_kernels + position


def order_accesses(plan: Plan) -> OrderedAccesses:
    """Sort a plan's accesses; its tables must have passed the table checks."""
    accesses, num_kernels = plan.accesses, len(plan.kernels)
    position = position_in_life(plan, accesses.storage, accesses.kernel)
    order = np.lexsort((position, accesses.storage))
    storage = accesses.storage[order]
    starts = np.flatnonzero(np.r_[True, storage[1:] != storage[:-1]]) if len(storage) else storage
    sizes = np.diff(np.r_[starts, len(storage)])
    first = np.repeat(starts, sizes)
    writes_before = np.r_[0, np.cumsum(accesses.writes[order])]
    return OrderedAccesses(
        storage=storage,
        kernel=accesses.kernel[order],
        position=position[order],
        version=writes_before[1:] - writes_before[first],
        first=first,
        last=np.repeat(starts + sizes - 1, sizes),
        num_kernels=num_kernels,
    )


def position_in_life(plan: Plan, storage: IntArray, kernel: IntArray) -> IntArray:
    """Kernels between the birth of ``storage`` and ``kernel``, 0..K-1."""
    position: IntArray = (kernel - np.maximum(plan.storages.birth, 0)[storage]) % len(plan.kernels)
    return position


@dataclass(frozen=True)
class Windows:
    """Every move's kernels unrolled from its ``after_kernel``; int64 (moves,).

    ``offload_start`` in [a, a + K - 1] and the others in [a + 1, a + K] for a = after_kernel; for
    a tail ``before_kernel`` and ``prefetch_start`` are MISSING. ``death`` in [a, a + K - 1].
    """

    after: IntArray
    offload_start: IntArray
    free_by: IntArray
    prefetch_start: IntArray
    before: IntArray
    death: IntArray
    is_tail: BoolArray


def unroll_windows(plan: Plan, storage: IntArray) -> Windows:
    """Unroll all moves; ``storage`` is ``moves.storage`` with bad rows replaced by any good one."""
    moves, num_kernels = plan.moves, len(plan.kernels)
    after = moves.after_kernel
    is_tail: BoolArray = moves.before_kernel == MISSING

    def later(kernel: IntArray) -> IntArray:
        result: IntArray = after + 1 + (kernel - after - 1) % num_kernels
        return result

    return Windows(
        after=after,
        offload_start=after + (moves.offload_start - after) % num_kernels,
        free_by=later(moves.free_by),
        prefetch_start=np.where(is_tail, MISSING, later(moves.prefetch_start)),
        before=np.where(is_tail, MISSING, later(moves.before_kernel)),
        death=after + (plan.storages.death[storage] - after) % num_kernels,
        is_tail=is_tail,
    )


@dataclass(frozen=True)
class Absences:
    """The moves whose rows are sound, with absolute kernels; all arrays (sound moves,).

    GPU bytes are missing in [``free_by``, ``back``); the slot is needed until ``until``
    (before_kernel, or the death). ``version`` names what the storage holds while it is away,
    ``versions_in_life`` how often it is written in all. ``row`` is the row in the plan's moves.
    """

    row: npt.NDArray[np.intp]
    storage: IntArray
    device: TextArray
    offset_bytes: IntArray
    writes: BoolArray
    is_persistent: BoolArray
    after: IntArray
    offload_start: IntArray
    free_by: IntArray
    back: IntArray
    until: IntArray
    version: IntArray
    versions_in_life: IntArray


def absences(plan: Plan, windows: Windows, ordered: OrderedAccesses, sound: BoolArray) -> Absences:
    """Lay the sound moves, whose ``after_kernel`` is an access, on the axis of absolute kernels."""
    rows = np.flatnonzero(sound)
    moves, storage = plan.moves, plan.moves.storage[rows]
    birth = plan.storages.birth[storage]
    position = position_in_life(plan, storage, windows.after[rows])
    shift = np.maximum(birth, 0) + position - windows.after[rows]
    access, _ = ordered.find(storage, position)
    is_tail = windows.is_tail[rows]
    death = windows.death[rows]
    return Absences(
        row=rows,
        storage=storage,
        device=moves.device[rows],
        offset_bytes=moves.tier_offset_bytes[rows],
        writes=moves.writes[rows],
        is_persistent=birth < 0,
        after=windows.after[rows] + shift,
        offload_start=windows.offload_start[rows] + shift,
        free_by=windows.free_by[rows] + shift,
        back=np.where(is_tail, death + 1, windows.prefetch_start[rows]) + shift,
        until=np.where(is_tail, death, windows.before[rows]) + shift,
        version=ordered.version[access],
        versions_in_life=ordered.version[ordered.last[access]],
    )
