"""Moves as the simulator needs them, after the checks without which it would simulate nonsense.

The verifier (``teraio.verify``) judges plans, and says everything that is wrong with one. Here is
what the engine relies on: indices that exist, windows in order, periods of this very trace.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from teraio.contracts.hardware import HOST
from teraio.contracts.plan import Moves, Plan
from teraio.contracts.table import MISSING, BoolArray, IntArray
from teraio.errors import InputError
from teraio.simulator.machine_arrays import Machine
from teraio.simulator.trace_arrays import access_order
from teraio.traces.trace import Trace


class PlannedMoves(NamedTuple):
    """Checked moves, (moves,); kernel indices are unrolled from ``after_kernel``.

    ``device`` counts the machine's devices. ``end`` is before_kernel, or for a tail the death.
    """

    storage: IntArray
    device: IntArray
    tier_offset_bytes: IntArray
    nbytes: IntArray
    writes: BoolArray
    is_tail: BoolArray
    after_kernel: IntArray
    offload_start: IntArray
    free_by: IntArray
    prefetch_start: IntArray
    end: IntArray


def check_moves(trace: Trace, plan: Plan, machine: Machine) -> PlannedMoves:
    """The plan's moves for this trace. Raises InputError that names the row and what is wrong."""
    moves = plan.moves
    _check_same_trace(trace, plan)
    _check_indices(trace, moves)
    unrolled = moves.unrolled(trace.num_kernels)
    is_tail: BoolArray = moves.before_kernel == MISSING
    end = _period_ends(trace, moves, is_tail)
    _refuse(
        ~is_tail & (unrolled.before_kernel != end),
        "before_kernel",
        moves.before_kernel,
        "must be the storage's next access after after_kernel",
    )
    planned = PlannedMoves(
        storage=moves.storage,
        device=_devices(moves, machine),
        tier_offset_bytes=moves.tier_offset_bytes,
        nbytes=moves.nbytes,
        writes=moves.writes,
        is_tail=is_tail,
        after_kernel=moves.after_kernel,
        offload_start=unrolled.offload_start,
        free_by=unrolled.free_by,
        prefetch_start=unrolled.prefetch_start,
        end=end,
    )
    _check_windows(moves, planned)
    _check_repeats(trace, moves)
    return planned


def _refuse(bad: npt.NDArray[np.bool_], column: str, values: npt.NDArray[Any], must: str) -> None:
    if bad.any():
        row = int(np.argmax(bad))
        raise InputError(f"moves.{column}, row {row}: {must}, got {values[row]!s}")


def _check_same_trace(trace: Trace, plan: Plan) -> None:
    pairs = (
        ("kernels", len(plan.kernels), trace.num_kernels),
        ("storages", len(plan.storages), len(trace.storages)),
    )
    for what, of_plan, of_trace in pairs:
        if of_plan != of_trace:
            raise InputError(
                f"plan: made for another trace; it has {of_plan} {what}, the trace {of_trace}"
            )
    if not np.array_equal(plan.storages.nbytes, trace.storages.nbytes):
        raise InputError("plan: made for another trace; sizes in storages.nbytes differ")


def _check_indices(trace: Trace, moves: Moves) -> None:
    num_kernels, num_storages = trace.num_kernels, len(trace.storages)
    outside = (moves.storage < 0) | (moves.storage >= num_storages)
    _refuse(outside, "storage", moves.storage, f"must be in 0..{num_storages - 1}")
    for name in ("after_kernel", "offload_start", "free_by", "prefetch_start", "before_kernel"):
        values = getattr(moves, name)
        outside = (values < 0) | (values >= num_kernels)
        if name in ("prefetch_start", "before_kernel"):
            outside &= values != MISSING
        _refuse(outside, name, values, f"must be a kernel in 0..{num_kernels - 1}")
    half = (moves.prefetch_start == MISSING) != (moves.before_kernel == MISSING)
    must = "must be null exactly if before_kernel is"
    _refuse(half, "prefetch_start", moves.prefetch_start, must)
    other_size = moves.nbytes != trace.storages.nbytes[moves.storage]
    _refuse(other_size, "nbytes", moves.nbytes, "must be the nbytes of the row's storage")
    fixed = ~trace.storages.resizable[moves.storage]
    _refuse(fixed, "storage", moves.storage, "is not resizable and cannot move")


def _devices(moves: Moves, machine: Machine) -> IntArray:
    device = np.full(len(moves), MISSING, dtype=np.int64)
    for number, name in enumerate(machine.devices):
        device[(moves.device == name).astype(bool)] = number
    _refuse(
        device == MISSING, "device", moves.device, f"must be one of {machine.devices} of this rank"
    )
    tiers = np.array([HOST, "ssd"], dtype=object)
    mismatch = moves.tier != tiers[np.minimum(device, 1)]
    _refuse(mismatch, "tier", moves.tier, "must be the tier of the row's device")
    return device


def _period_ends(trace: Trace, moves: Moves, is_tail: BoolArray) -> IntArray:
    """Unrolled kernel that ends each move's period: the next access, or the death for a tail."""
    order, storages, num_kernels = access_order(trace), trace.storages, trace.num_kernels
    birth = np.maximum(storages.birth, 0)[moves.storage]
    position = (moves.after_kernel - birth) % num_kernels
    keys = order.storage * num_kernels + order.position
    wanted = moves.storage * num_kernels + position
    row = np.minimum(np.searchsorted(keys, wanted), max(len(keys) - 1, 0))
    is_access = keys[row] == wanted if len(keys) else np.zeros(len(moves), dtype=bool)
    _refuse(~is_access, "after_kernel", moves.after_kernel, "must be an access of the storage")
    is_last, persistent = order.is_last[row], trace.is_persistent[moves.storage]
    goes_on = ~is_last | persistent
    must = "must not be null, the storage is accessed again"
    _refuse(is_tail & goes_on, "before_kernel", moves.before_kernel, must)
    must = "must be null, the storage is never accessed again"
    _refuse(~is_tail & ~goes_on, "before_kernel", moves.before_kernel, must)
    first_row = np.searchsorted(keys, moves.storage * num_kernels)
    following = np.minimum(row + 1, max(len(keys) - 1, 0))
    steps = np.where(
        is_last,
        num_kernels + order.position[first_row] - position,
        order.position[following] - position,
    )
    life = (storages.death[moves.storage] - moves.after_kernel) % num_kernels
    end: IntArray = moves.after_kernel + np.where(is_tail, life, steps)
    return end


def _check_windows(moves: Moves, planned: PlannedMoves) -> None:
    must = "must come after offload_start"
    _refuse(planned.free_by <= planned.offload_start, "free_by", moves.free_by, must)
    late = planned.is_tail & (planned.free_by > planned.end)
    _refuse(late, "free_by", moves.free_by, "must not come after the storage's death")
    returns = ~planned.is_tail
    early = returns & (planned.prefetch_start <= planned.free_by)
    _refuse(early, "prefetch_start", moves.prefetch_start, "must come after free_by")
    late = returns & (planned.prefetch_start > planned.end)
    must = "must not come after before_kernel"
    _refuse(late, "prefetch_start", moves.prefetch_start, must)


def _check_repeats(trace: Trace, moves: Moves) -> None:
    key = moves.storage * trace.num_kernels + moves.after_kernel
    in_order = np.sort(key)
    if (in_order[1:] != in_order[:-1]).all():
        return
    _, first = np.unique(key, return_index=True)
    repeats = np.ones(len(key), dtype=bool)
    repeats[first] = False
    _refuse(repeats, "storage", moves.storage, "a second move for the same inactive period")
