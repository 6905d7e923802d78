"""A plan prepared for execution: what to do at each kernel, found by one list look-up."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from teraio.contracts.plan import Plan, UnrolledMoves
from teraio.contracts.table import MISSING, IntArray
from teraio.simulator.caching_allocator import MIB
from teraio.simulator.compaction import relocatable_rows

UNNAMED_PREFIX = "unnamed:"
NEVER = 2**62
"""Distance to the next use of a storage that is not used again before it dies."""


class PlannedMove(NamedTuple):
    """One move as the executor needs it. Offsets and sizes in bytes."""

    storage: int
    device: str
    offset_bytes: int
    nbytes: int
    writes: bool


@dataclass(frozen=True)
class Schedule:
    """Action tables indexed by kernel, and the identities that bind storages to plan rows.

    Attributes: ``offloads_after``, ``frees_before``, ``prefetches_before``: moves per kernel, in
    the static order of the queues; ``need_bytes``: births and workspace per kernel, as allocated;
    ``requests``: those of more than 1 MiB one by one, in their order; ``may_move``: whether each
    storage may be moved within the GPU (:mod:`teraio.simulator.compaction`); ``row_of_birth``:
    (kernel, ordinal) to storage row; ``row_of_name``; ``row_of_first_touch``: (kernel, position
    among what it touches) to row, for persistent storages without a name.
    """

    ops: list[str]
    signatures: list[int]
    offloads_after: list[list[PlannedMove]]
    frees_before: list[list[PlannedMove]]
    prefetches_before: list[list[PlannedMove]]
    need_bytes: list[int]
    requests: list[list[int]]
    may_move: list[bool]
    row_of_birth: dict[tuple[int, int], int]
    row_of_name: dict[str, int]
    row_of_first_touch: dict[int, list[tuple[int, int]]]
    uses: list[list[int]]
    lives_on: list[bool]
    num_kernels: int

    def distance_to_next_use(self, row: int, kernel: int) -> int:
        """Kernels from ``kernel`` to the next access of a storage by trace position.

        NEVER if it dies before it is used again.
        """
        uses = self.uses[row]
        index = bisect_right(uses, kernel)
        if index < len(uses):
            return uses[index] - kernel
        if uses and self.lives_on[row]:
            return uses[0] + self.num_kernels - kernel
        return NEVER


def prepare_schedule(plan: Plan) -> Schedule:
    """Action tables of a plan whose structure was checked."""
    num_kernels = len(plan.kernels)
    unrolled = plan.moves.unrolled(num_kernels)
    moves = _planned_moves(plan)
    storages = plan.storages
    uses: list[list[int]] = [[] for _ in range(len(storages))]
    for kernel, storage in zip(
        plan.accesses.kernel.tolist(), plan.accesses.storage.tolist(), strict=True
    ):
        uses[storage].append(kernel)
    named = [(name, row) for row, name in enumerate(storages.name.tolist()) if name]
    requests = _requests(plan, uses)
    return Schedule(
        ops=plan.kernels.op.tolist(),
        signatures=plan.kernels.signature.tolist(),
        offloads_after=_by_kernel(moves, unrolled.offload_start, num_kernels, _age(unrolled)),
        frees_before=_by_kernel(moves, unrolled.free_by, num_kernels, _age(unrolled)),
        prefetches_before=_by_kernel(
            moves, unrolled.prefetch_start, num_kernels, _urgency(unrolled)
        ),
        need_bytes=[sum(sizes) for sizes in requests],
        requests=[[size for size in sizes if size > MIB] for sizes in requests],
        may_move=relocatable_rows(plan),
        row_of_birth=_births(plan, uses),
        row_of_name={n: row for n, row in named if not n.startswith(UNNAMED_PREFIX)},
        row_of_first_touch=_first_touches(named),
        uses=uses,
        # A lifetime that wraps is used again after the cut too; distances then only look nearer.
        num_kernels=num_kernels,
        lives_on=[
            birth == MISSING or death < birth
            for birth, death in zip(storages.birth.tolist(), storages.death.tolist(), strict=True)
        ],
    )


def _planned_moves(plan: Plan) -> list[PlannedMove]:
    moves = plan.moves
    columns = (moves.storage, moves.device, moves.tier_offset_bytes, moves.nbytes, moves.writes)
    return [PlannedMove(*row) for row in zip(*(c.tolist() for c in columns), strict=True)]


def _age(unrolled: UnrolledMoves) -> IntArray:
    """Offloads issued after the same kernel leave in the order in which they became inactive."""
    age: IntArray = unrolled.after_kernel - unrolled.offload_start
    return age


def _urgency(unrolled: UnrolledMoves) -> IntArray:
    """Prefetches issued before the same kernel arrive in the order in which they are needed."""
    urgency: IntArray = unrolled.before_kernel - unrolled.prefetch_start
    return urgency


def _by_kernel(
    moves: list[PlannedMove], kernel: IntArray, num_kernels: int, order: IntArray
) -> list[list[PlannedMove]]:
    table: list[list[PlannedMove]] = [[] for _ in range(num_kernels)]
    for row in np.lexsort((np.arange(len(moves)), order)):
        if kernel[row] != MISSING:
            table[kernel[row] % num_kernels].append(moves[row])
    return table


def _requests(plan: Plan, uses: list[list[int]]) -> list[list[int]]:
    """Bytes of the births of each kernel as they come, then its workspace."""
    storages = plan.storages
    requests: list[list[int]] = [[] for _ in range(len(plan.kernels))]
    sizes, births = storages.allocated_bytes.tolist(), storages.birth.tolist()
    for row in np.argsort(storages.birth_ordinal, kind="stable").tolist():
        if births[row] != MISSING and uses[row]:
            requests[births[row]].append(sizes[row])
    for kernel, workspace_bytes in enumerate(plan.kernels.workspace_bytes.tolist()):
        if workspace_bytes:
            requests[kernel].append(workspace_bytes)
    return requests


def _births(plan: Plan, uses: list[list[int]]) -> dict[tuple[int, int], int]:
    storages = plan.storages
    births = zip(storages.birth.tolist(), storages.birth_ordinal.tolist(), strict=True)
    return {
        (kernel, ordinal): row
        for row, (kernel, ordinal) in enumerate(births)
        if kernel != MISSING and uses[row]
    }


def _first_touches(named: list[tuple[str, int]]) -> dict[int, list[tuple[int, int]]]:
    touches: dict[int, list[tuple[int, int]]] = {}
    for name, row in named:
        if name.startswith(UNNAMED_PREFIX):
            kernel, _, position = name.removeprefix(UNNAMED_PREFIX).partition(".")
            touches.setdefault(int(kernel), []).append((int(position), row))
    return touches
