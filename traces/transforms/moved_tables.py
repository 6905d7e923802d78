"""The tables of a trace whose optimizer's kernels have moved as a :class:`KernelOrder` says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from teraio.contracts.plan import Accesses
from teraio.contracts.signatures import kernel_signature
from teraio.contracts.table import MISSING, IntArray
from teraio.traces.period_candidates import UNNAMED
from teraio.traces.trace import UNTRACKED, Kernels, Storages, Trace
from teraio.traces.transforms.kernel_order import KernelOrder

_SEED = "aten.ones_like.default"


def reordered(trace: Trace, order: KernelOrder) -> Trace:
    """The trace with its kernels in the new order, and all that refers to them."""
    parts = _Parts(trace, order)
    accesses = _accesses(trace, order, parts)
    storages = _storages(trace, order, parts)
    return Trace(
        kernels=_kernels(trace, order),
        storages=_renamed(storages, trace, order, accesses),
        accesses=accesses,
        metadata=trace.metadata,
        calls=trace.calls,
    )


# Kernels


def _kernels(trace: Trace, order: KernelOrder) -> Kernels:
    kernels = trace.kernels.take(order.source)
    duration, gap = kernels.duration_seconds.copy(), kernels.gap_before_seconds.copy()
    signature, call = kernels.signature.copy(), kernels.call.copy()
    for (place, unit), new in order.new_of_moved.items():
        if len(order.placed[place]) > 1:
            duration[new] *= order.share(place, unit)
            gap[new] *= order.share(place, unit)
            signature[new] = _signature_of_part(trace, order, place, unit)
            call[new] = MISSING
    return replace(
        kernels,
        kernel=np.arange(len(kernels)),
        duration_seconds=duration,
        gap_before_seconds=gap,
        signature=signature,
        call=call,
    )


def _signature_of_part(trace: Trace, order: KernelOrder, place: int, unit: int) -> int:
    """Of a list operator over scalars, for a unit's alone, if the whole is told by such a list."""
    op = str(trace.kernels.op[order.first + place])
    whole = int(trace.kernels.signature[order.first + place])
    size = len(order.units.parameters[unit])
    total = sum(len(order.units.parameters[u]) for u in order.placed[place])
    for dtype in ("torch.float32", "torch.float64"):
        # The operator's other operand may be a tensor as well, of a default dtype.
        for others in ([], [((), "torch.float32")]):
            if kernel_signature(op, [((), dtype)] * total + others) == whole:
                return kernel_signature(op, [((), dtype)] * size + others)
    return whole


# Storages


class _Parts:
    """Storages born in shared kernels: one part per unit, the first in the place of the whole.

    ``source``: old row of each new one; ``row``: new row by (old row, unit) of the parts;
    ``new_row``: new row of each old one, int64 (S,).
    """

    def __init__(self, trace: Trace, order: KernelOrder) -> None:
        storages = trace.storages
        shared = {p: units for p, units in enumerate(order.placed) if len(units) > 1}
        born = [
            (row, shared[place])
            for row, place in enumerate((storages.birth - order.first).tolist())
            if place in shared
        ]
        added = [(row, unit) for row, units in born for unit in units[1:]]
        last = len(storages) - (len(storages) > 0 and storages.name[-1] == UNTRACKED)
        sources = [np.arange(last), [row for row, _ in added], np.arange(last, len(storages))]
        self.source: IntArray = np.concatenate([np.asarray(s, dtype=np.int64) for s in sources])
        self.new_row: IntArray = np.arange(len(storages))
        self.new_row[last:] += len(added)
        self.row = {(row, units[0]): row for row, units in born}
        self.row |= {pair: last + number for number, pair in enumerate(added)}


def _storages(trace: Trace, order: KernelOrder, parts: _Parts) -> Storages:
    storages = trace.storages
    birth, death = _birth_and_death(trace, order)
    birth, death = birth[parts.source], death[parts.source]
    for (row, unit), new_row in parts.row.items():
        place, last_place = storages.birth[row] - order.first, storages.death[row] - order.first
        birth[new_row] = order.new_of_moved[int(place), unit]
        death[new_row] = order.new_of_moved.get((int(last_place), unit), order.span[unit][1])
    rows = storages.take(parts.source)
    return replace(rows, storage=np.arange(len(rows)), birth=birth, death=death)


def _birth_and_death(trace: Trace, order: KernelOrder) -> tuple[IntArray, IntArray]:
    """New birth and death of every old row; of storages born in shared kernels it is open."""
    storages, first = trace.storages, order.first
    new = np.r_[order.new_of_kept, np.full(trace.num_kernels - first, len(order.source) - 1)]
    # What dies in the optimizer step and was not made there dies where the user's call is: last.
    birth = np.where(storages.birth == MISSING, MISSING, new[storages.birth])
    death = np.where(storages.death == MISSING, MISSING, new[storages.death])
    for row in np.flatnonzero(storages.birth >= first).tolist():
        place, unit = int(storages.birth[row]) - first, order.placed[storages.birth[row] - first][0]
        birth[row] = order.new_of_moved[place, unit]
        # What a function holds until its next turn, or its end, it holds until the unit's end.
        died = int(storages.death[row]) - first
        death[row] = order.new_of_moved.get((died, unit), order.span[unit][1])
        if death[row] < birth[row]:
            death[row] = order.span[unit][1]
    for unit, hook in enumerate(order.hooks):
        if hook.is_early:
            dropped = [s for s in hook.gradients if storages.birth[s] != MISSING]
            death[dropped] = order.span[unit][1]
    _hold_seeds(trace, order, death)
    return birth, death


def _hold_seeds(trace: Trace, order: KernelOrder, death: IntArray) -> None:
    """Ones that backward passes began with die when the call returns, after its last hooks."""
    storages = trace.storages
    end = int(np.flatnonzero(trace.kernels.phase == "backward").max(initial=-1)) + 1
    last = [order.span[u][1] for u, hook in enumerate(order.hooks) if hook.boundary == end]
    born = np.flatnonzero((storages.death == end - 1) & (storages.birth != MISSING))
    seeds = born[trace.kernels.op[storages.birth[born]] == _SEED]
    if last:
        death[seeds] = max(last)


def _renamed(storages: Storages, trace: Trace, order: KernelOrder, accesses: Accesses) -> Storages:
    """Names that tell where the iteration first meets a storage, made anew."""
    names = storages.name.copy()
    rows = [row for row, name in enumerate(names.tolist()) if name.startswith(UNNAMED)]
    for row in rows:
        mine = np.flatnonzero(accesses.storage == row)
        if len(mine):
            kernel = accesses.kernel[mine[0]]
            position = mine[0] - np.searchsorted(accesses.kernel, kernel)
            names[row] = f"{UNNAMED}{kernel}.{position}"
    return replace(storages, name=names)


# Accesses


def _accesses(trace: Trace, order: KernelOrder, parts: _Parts) -> Accesses:
    old = trace.accesses
    views = _pending_views(trace, order)
    pending = np.array(sorted(views), dtype=np.int64)
    is_pending = np.zeros(len(old), dtype=bool)
    is_pending[pending] = ~(old.reads | old.writes)[pending]
    kept = np.flatnonzero((old.kernel < order.first) & ~is_pending)
    rows = [(kept, order.new_of_kept[old.kernel[kept]], parts.new_row[old.storage[kept]])]
    moved = np.flatnonzero((old.kernel >= order.first) & ~is_pending)
    rows.append(_moved_accesses(trace, order, parts, moved))
    kernels = np.array([views[row] for row in pending.tolist()], dtype=np.int64)
    # Views come first among what a kernel touches.
    rows.insert(0, (pending, kernels, parts.new_row[old.storage[pending]]))
    is_used = np.ones(sum(len(source) for source, _, _ in rows), dtype=bool)
    is_used[: len(pending)] = False
    source, kernel, storage = (np.concatenate(column) for column in zip(*rows, strict=True))
    by_kernel = np.argsort(kernel, kind="stable")
    source, kernel, storage = source[by_kernel], kernel[by_kernel], storage[by_kernel]
    is_used = is_used[by_kernel]
    key = kernel * max(1, len(parts.source)) + storage
    _, first, merged = np.unique(key, return_index=True, return_inverse=True)
    reads, writes = np.zeros(len(first), dtype=bool), np.zeros(len(first), dtype=bool)
    np.logical_or.at(reads, merged, is_used & old.reads[source])
    np.logical_or.at(writes, merged, is_used & old.writes[source])
    in_order = np.argsort(first)
    kept_rows = first[in_order]
    return Accesses(kernel[kept_rows], storage[kept_rows], reads[in_order], writes[in_order])


def _moved_accesses(
    trace: Trace, order: KernelOrder, parts: _Parts, rows: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """(old row, new kernel, new storage) of the optimizer's accesses; of parts, several times."""
    old, owner = trace.accesses, order.units.owner
    found: list[tuple[int, int, int]] = []
    for row, place, storage in zip(
        rows.tolist(),
        (old.kernel[rows] - order.first).tolist(),
        old.storage[rows].tolist(),
        strict=True,
    ):
        units = order.placed[place]
        mine = owner[storage]
        for unit in units if len(units) == 1 or mine not in units else (int(mine),):
            part = parts.row.get((storage, unit), int(parts.new_row[storage]))
            found.append((row, order.new_of_moved[place, unit], part))
    table = np.array(found, dtype=np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def _pending_views(trace: Trace, order: KernelOrder) -> dict[int, int]:
    """New kernel of each storage viewed before a hook, whose step makes it resident now.

    By old row. What a kernel touches is told in order, views first, and that of a gradient is made
    right before its hook. So all that stands before it was viewed before, whatever the kernel does
    with it itself.
    """
    accesses, storages, first = trace.accesses, trace.storages, order.first
    pending: dict[int, int] = {}
    for kernel in {hook.boundary for hook in order.hooks} | {first}:
        begin, end = np.searchsorted(accesses.kernel, [kernel, kernel + 1])
        units = [u for u, h in enumerate(order.hooks) if h.boundary == kernel and h.is_early]
        units.sort(key=lambda u: order.hooks[u].rank)
        for row in range(begin, end):
            storage = accesses.storage[row]
            if storages.birth[storage] == kernel:
                continue
            is_view = not accesses.reads[row] and not accesses.writes[row]
            unit = next((u for u in units if order.hooks[u].rank >= row), None)
            if unit is not None:
                pending[row] = order.span[unit][0]
            elif is_view and kernel == first and order.units.owner[storage] not in order.placed[0]:
                # The user's own step has no kernels left: whatever runs last takes it along.
                pending[row] = order.span[units[-1]][0] if units else len(order.source) - 1
    return pending
