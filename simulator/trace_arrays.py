"""A trace as flat arrays for the engine; made once per trace and kept beside it."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from teraio.contracts.table import BoolArray, FloatArray, IntArray
from teraio.simulator.state import NEVER
from teraio.traces.lifetimes import live_bytes
from teraio.traces.trace import Trace
from teraio.units import PICOSECONDS_PER_SECOND


class KernelTimes(NamedTuple):
    """Picoseconds and allocated bytes (workspace not included) per kernel, int64 (K,)."""

    duration: IntArray
    gap: IntArray
    live_bytes: IntArray


class Residency(NamedTuple):
    """Who needs what when. ``*_first`` are offsets of kernels into the lists after them.

    ``access_next``, ``next_at_birth`` and ``next_at_cut`` are unrolled kernel indices of the access
    that follows, or NEVER; after the last access of a life that wraps around the cut, of the first
    one in the next life, as in the executor. ``required_bytes`` is what each kernel needs with all
    else evicted.
    """

    is_movable: BoolArray
    is_alive_at_cut: BoolArray
    access_first: IntArray
    access_storage: IntArray
    access_writes: BoolArray
    access_next: IntArray
    birth_first: IntArray
    birth_storage: IntArray
    next_at_birth: IntArray
    death_first: IntArray
    death_storage: IntArray
    next_at_cut: IntArray
    required_bytes: IntArray


class AccessOrder(NamedTuple):
    """Accesses ordered by storage, then by position in its life (persistent: from kernel 0)."""

    storage: IntArray
    kernel: IntArray
    position: IntArray
    row: IntArray
    is_last: BoolArray


_TIMES: WeakKeyDictionary[Trace, KernelTimes] = WeakKeyDictionary()
_ORDERS: WeakKeyDictionary[Trace, AccessOrder] = WeakKeyDictionary()
_RESIDENCIES: WeakKeyDictionary[Trace, Residency] = WeakKeyDictionary()


def picoseconds(seconds: FloatArray) -> IntArray:
    """Rounded up to whole picoseconds, int64, so that no iteration is faster than ideal.

    The thousandth absorbs the error of the product.
    """
    return np.ceil(seconds * PICOSECONDS_PER_SECOND - 1e-3).astype(np.int64)


def kernel_times(trace: Trace) -> KernelTimes:
    """Durations, gaps and live bytes of a trace; the same arrays at every call."""
    if trace not in _TIMES:
        _TIMES[trace] = KernelTimes(
            duration=picoseconds(trace.kernels.duration_seconds),
            gap=picoseconds(trace.kernels.gap_before_seconds),
            live_bytes=live_bytes(trace, allocated=True),
        )
    return _TIMES[trace]


def access_order(trace: Trace) -> AccessOrder:
    """Accesses storage by storage; the same arrays at every call."""
    if trace not in _ORDERS:
        accesses = trace.accesses
        birth = np.maximum(trace.storages.birth, 0)[accesses.storage]
        position = (accesses.kernel - birth) % trace.num_kernels
        row = np.lexsort((position, accesses.storage))
        storage = accesses.storage[row]
        is_last = np.ones(len(row), dtype=bool)
        is_last[:-1] = storage[1:] != storage[:-1]
        _ORDERS[trace] = AccessOrder(storage, accesses.kernel[row], position[row], row, is_last)
    return _ORDERS[trace]


def residency(trace: Trace) -> Residency:
    """Accesses, births and deaths by kernel; the same arrays at every call."""
    if trace not in _RESIDENCIES:
        _RESIDENCIES[trace] = _build_residency(trace)
    return _RESIDENCIES[trace]


def _build_residency(trace: Trace) -> Residency:
    storages, accesses, num_kernels = trace.storages, trace.accesses, trace.num_kernels
    births, deaths = np.flatnonzero(storages.birth >= 0), np.flatnonzero(storages.death >= 0)
    birth_order, birth_first = group_by(storages.birth[births], num_kernels)
    death_order, death_first = group_by(storages.death[deaths], num_kernels)
    is_movable = storages.resizable & (storages.allocated_bytes > 0)
    return Residency(
        is_movable=is_movable,
        is_alive_at_cut=_is_alive_at_cut(trace),
        access_first=np.searchsorted(accesses.kernel, np.arange(num_kernels + 1)),
        access_storage=accesses.storage,
        access_writes=accesses.writes,
        access_next=_next_accesses(trace),
        birth_first=birth_first,
        birth_storage=births[birth_order],
        next_at_birth=_next_at_birth(trace),
        death_first=death_first,
        death_storage=deaths[death_order],
        next_at_cut=_next_at_cut(trace),
        required_bytes=_required_bytes(trace, is_movable),
    )


def _is_alive_at_cut(trace: Trace) -> BoolArray:
    result: BoolArray = trace.is_persistent | (trace.storages.death < trace.storages.birth)
    return result


def group_by(keys: IntArray, num_groups: int) -> tuple[IntArray, IntArray]:
    """Rows ordered by key (stable), and the offset of each key's first row, (num_groups + 1,).

    Keys must be in 0..num_groups-1.
    """
    order = np.argsort(keys, kind="stable")
    first = np.zeros(num_groups + 1, dtype=np.int64)
    np.cumsum(np.bincount(keys, minlength=num_groups), out=first[1:])
    return order.astype(np.int64), first


def _next_accesses(trace: Trace) -> IntArray:
    """Unrolled kernel of the access after each row of ``accesses``, or NEVER."""
    order, num_kernels = access_order(trace), trace.num_kernels
    result = np.full(len(order.row), NEVER)
    inner = np.flatnonzero(~order.is_last)
    result[inner] = order.kernel[inner] + order.position[inner + 1] - order.position[inner]
    last = np.flatnonzero(order.is_last & _is_alive_at_cut(trace)[order.storage])
    first_position = order.position[_first_rows(order)][np.cumsum(order.is_last) - order.is_last]
    result[last] = order.kernel[last] + num_kernels + first_position[last] - order.position[last]
    in_trace_order = np.empty_like(result)
    in_trace_order[order.row] = result
    return in_trace_order


def _first_rows(order: AccessOrder) -> npt.NDArray[np.intp]:
    is_first = np.ones(len(order.row), dtype=bool)
    is_first[1:] = order.is_last[:-1]
    return np.flatnonzero(is_first)


def _next_at_birth(trace: Trace) -> IntArray:
    """Unrolled kernel of the first access in each life, (S,)."""
    order = access_order(trace)
    rows = _first_rows(order)
    result = np.full(len(trace.storages), NEVER)
    birth = np.maximum(trace.storages.birth[order.storage[rows]], 0)
    result[order.storage[rows]] = birth + order.position[rows]
    return result


def _next_at_cut(trace: Trace) -> IntArray:
    """First access at or after kernel 0 of what is alive at the cut, or NEVER, (S,)."""
    accesses = trace.accesses
    result = np.full(len(trace.storages), NEVER)
    np.minimum.at(result, accesses.storage, accesses.kernel)
    return result


def _required_bytes(trace: Trace, is_movable: BoolArray) -> IntArray:
    """Allocated bytes that no eviction can spare each kernel, workspace included, (K,)."""
    storages, accesses = trace.storages, trace.accesses
    required = trace.kernels.workspace_bytes.copy()
    rows = is_movable[accesses.storage]
    np.add.at(required, accesses.kernel[rows], storages.allocated_bytes[accesses.storage[rows]])
    at_birth = accesses.kernel == storages.birth[accesses.storage]
    is_untouched = is_movable & (storages.birth >= 0)
    is_untouched[accesses.storage[at_birth]] = False
    np.add.at(required, storages.birth[is_untouched], storages.allocated_bytes[is_untouched])
    fixed = np.where(is_movable, 0, storages.allocated_bytes)
    crosses_cut = trace.is_persistent | (storages.death < storages.birth)
    transient = ~trace.is_persistent
    delta = np.zeros(trace.num_kernels + 1, dtype=np.int64)
    np.add.at(delta, storages.birth[transient], fixed[transient])
    np.add.at(delta, storages.death[transient] + 1, -fixed[transient])
    required += int(fixed[crosses_cut].sum()) + np.cumsum(delta[:-1])
    return required
