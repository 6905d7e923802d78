"""Transform ``recompute``: saved activations are dropped, and made again before they are needed.

Source: activation checkpointing (Chen et al., "Training deep nets with sublinear memory cost",
2016), as ``torch.utils.checkpoint`` does it around each layer: the layer's inputs are kept, and
before its backward pass begins, the forward kernels that its saved tensors depend on run again.
With ``layers`` = N the first N layers are treated so (Megatron's ``--recompute-method block``).

The kernels to run again come from the trace's own producers: see
:mod:`teraio.traces.transforms.recompute_slices`. They are inserted before the first kernel of the
backward pass that uses a dropped storage, of phase backward, with the durations, gaps and
workspaces of the originals. A dropped storage becomes two: one that dies with its last use in the
forward pass, and one that is born again. Inputs live at least until they have been used again.

Limits: a visit that overwrites its own inputs is left alone; batch statistics kept in buffers are
updated twice, as in PyTorch; random-number states cost nothing to keep. A repeated collective takes
its time again, but has no number in its group's sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from teraio.contracts.plan import Accesses
from teraio.contracts.table import MISSING, BoolArray, IntArray
from teraio.errors import InputError
from teraio.traces.trace import Kernels, Storages, Trace
from teraio.traces.transforms.recompute_slices import Slice, find_slices, forward_groups


class _Insertion(NamedTuple):
    """The new order: ``source`` int64 (K',) is each kernel's original, ``again`` bool (K',) says
    that it runs for the second time, ``place`` int64 (K,) is where each original has gone.
    """

    source: IntArray
    again: BoolArray
    place: IntArray


def recompute(trace: Trace, options: Mapping[str, Any]) -> Trace:
    """The trace with recomputation; see the module's text.

    Option ``layers``: how many layers, from the first on (default: all). Raises InputError for
    another option, for a number out of range, and where nothing can be recomputed.
    """
    groups = forward_groups(trace)
    unknown = sorted(set(options) - {"layers"})
    if unknown:
        raise InputError(f"transform recompute: option {unknown[0]!r} is not known")
    layers = options.get("layers", groups.num_layers)
    if isinstance(layers, bool) or not isinstance(layers, int) or layers < 0:
        raise InputError(f"transform recompute: layers must be an integer from 0, got {layers!r}")
    slices = find_slices(trace, groups, layers)
    if not slices and layers:
        raise InputError(
            "transform recompute: the trace has no forward kernels whose outputs the backward "
            "pass uses, so there is nothing to recompute"
        )
    order = _insert(trace.num_kernels, slices)
    clones = _clones(trace, slices, order)
    accesses = _accesses(trace, order, clones)
    return replace(
        trace,
        kernels=_kernels(trace.kernels, order),
        storages=_storages(trace.storages, accesses, order, clones),
        accesses=accesses,
    )


def with_recomputation(trace: Trace, layers: int) -> Trace:
    """The trace with its first ``layers`` layers recomputed; itself if there are none."""
    return recompute(trace, {"layers": layers}) if layers else trace


def num_layers(trace: Trace) -> int:
    """How many layers could be recomputed; 0 where nothing can."""
    groups = forward_groups(trace)
    return groups.num_layers if find_slices(trace, groups, groups.num_layers) else 0


def fewest_layers(most: int, fits: Callable[[int], bool]) -> int:
    """The least number of layers, up to ``most``, for which it fits, by bisection.

    ``most`` if not even that fits: the caller finds out why. Each further layer is taken to lower
    the memory needed; where one does not, the result fits all the same, and may not be the least.
    """
    if most == 0 or fits(0):
        return 0
    if not fits(most):
        return most
    too_few, enough = 0, most
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if fits(middle) else (middle, enough)
    return enough


def _insert(num_kernels: int, slices: list[Slice]) -> _Insertion:
    sizes = np.array([len(part.kernels) for part in slices], dtype=np.int64)
    points = np.array([part.point for part in slices], dtype=np.int64)
    repeated = np.array([k for part in slices for k in part.kernels], dtype=np.int64)
    slice_of = np.repeat(np.arange(len(slices)), sizes)
    # Repeated kernels come before their point, in the order of slices, then in their own.
    position = np.r_[np.arange(num_kernels), np.repeat(points, sizes)]
    is_original = np.r_[np.ones(num_kernels, dtype=bool), np.zeros(len(repeated), dtype=bool)]
    order = np.lexsort((np.r_[np.zeros(num_kernels, np.int64), slice_of], is_original, position))
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    return _Insertion(
        source=np.r_[np.arange(num_kernels), repeated][order],
        again=~is_original[order],
        place=place[:num_kernels],
    )


def _kernels(kernels: Kernels, order: _Insertion) -> Kernels:
    result = kernels.take(order.source)
    return replace(
        result,
        kernel=np.arange(len(result)),
        phase=np.where(order.again, "backward", result.phase),
        group=np.where(order.again, "", result.group),
        group_sequence=np.where(order.again, MISSING, result.group_sequence),
    )


class _Clones(NamedTuple):
    """Storages made again: row ``len(storages) + i`` is the clone of ``original[i]``, sorted.

    ``is_dropped`` bool (clones,): the backward pass uses the clone in the original's place.
    ``is_kept`` bool (clones,): only put out again; whoever reads it finds the original.
    ``birth`` int64 (clones,) is the repeated kernel that makes it.
    """

    original: IntArray
    is_dropped: BoolArray
    is_kept: BoolArray
    birth: IntArray


def _clones(trace: Trace, slices: list[Slice], order: _Insertion) -> _Clones:
    """Clones of all that slices make, and of what else their kernels put out."""
    birth = trace.storages.birth
    again = np.full(trace.num_kernels, -1, dtype=np.int64)
    again[order.source[order.again]] = np.flatnonzero(order.again)
    made = np.array([s for part in slices for s in part.made], dtype=np.int64)
    outputs = np.flatnonzero((birth >= 0) & (again[birth] >= 0))
    original = np.union1d(made, outputs)
    dropped = np.array([s for part in slices for s in part.dropped], dtype=np.int64)
    return _Clones(
        original,
        is_dropped=np.isin(original, dropped),
        is_kept=~np.isin(original, made),
        birth=again[birth[original]],
    )


def _accesses(trace: Trace, order: _Insertion, clones: _Clones) -> Accesses:
    """The accesses in the new order: of the originals, and of the kernels that run again."""
    accesses, num_storages = trace.accesses, len(trace.storages)
    clone_of = np.full(num_storages, -1, dtype=np.int64)
    clone_of[clones.original] = num_storages + np.arange(len(clones.original))
    is_dropped = np.zeros(num_storages, dtype=bool)
    is_dropped[clones.original[clones.is_dropped]] = True
    is_forward = (trace.kernels.phase == "forward").astype(bool)
    moved = is_dropped[accesses.storage] & ~is_forward[accesses.kernel]
    storage = np.where(moved, clone_of[accesses.storage], accesses.storage)
    first = np.searchsorted(accesses.kernel, np.arange(trace.num_kernels + 1))
    places = np.flatnonzero(order.again)
    source = order.source[places]
    sizes = first[source + 1] - first[source]
    rows = np.repeat(first[source] - (np.cumsum(sizes) - sizes), sizes) + np.arange(sizes.sum())
    kernel_again = np.repeat(places, sizes)
    again = accesses.storage[rows]
    is_kept = np.zeros(num_storages, dtype=bool)
    is_kept[clones.original[clones.is_kept]] = True
    makes = trace.storages.birth[again] == accesses.kernel[rows]
    clone = np.where(is_kept[again] & ~makes, -1, clone_of[again])
    # What is only viewed and not made again need not be there.
    kept = (clone >= 0) | accesses.reads[rows] | accesses.writes[rows]
    rows, kernel_again, clone = rows[kept], kernel_again[kept], clone[kept]
    storage_again = np.where(clone >= 0, clone, accesses.storage[rows])
    kernel = np.r_[order.place[accesses.kernel], kernel_again]
    sort = np.argsort(kernel, kind="stable")
    return Accesses(
        kernel=kernel[sort],
        storage=np.r_[storage, storage_again][sort],
        reads=np.r_[accesses.reads, accesses.reads[rows]][sort],
        writes=np.r_[accesses.writes, accesses.writes[rows]][sort],
    )


def _storages(
    storages: Storages, accesses: Accesses, order: _Insertion, clones: _Clones
) -> Storages:
    """The originals with their lifetimes in the new order, then the clones."""
    num_kernels, num_storages = len(order.source), len(storages)
    is_persistent = storages.birth < 0
    birth = np.where(is_persistent, MISSING, order.place[storages.birth])
    death = np.where(is_persistent, MISSING, order.place[storages.death])
    birth = np.r_[birth, clones.birth]
    age = (accesses.kernel - birth[accesses.storage]) % num_kernels
    last_use = np.zeros(len(birth), dtype=np.int64)
    np.maximum.at(last_use, accesses.storage, age)
    # An input lives until it is read again; a dropped original, or a clone on the way to another,
    # only as long as it is used; the clone that takes a dropped one's place dies where that did.
    span = np.maximum((death - birth[:num_storages]) % num_kernels, last_use[:num_storages])
    dropped = clones.original[clones.is_dropped]
    span[dropped] = last_use[dropped]
    clone_span = (death[clones.original] - clones.birth) % num_kernels
    clone_span = np.where(clones.is_dropped, clone_span, last_use[num_storages:])
    death = np.where(birth < 0, MISSING, (birth + np.r_[span, clone_span]) % num_kernels)
    result = storages.take(np.r_[np.arange(num_storages), clones.original])
    return replace(result, storage=np.arange(len(result)), birth=birth, death=death)
