"""Invariants of a trace. Each has its own error, which names table, column and row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from teraio.errors import InputError

if TYPE_CHECKING:
    from teraio.traces.trace import Trace

MAX_BYTES = 2**62
"""All storages together stay below it, so that no sum of bytes overflows 64 bits."""

MAX_SECONDS = 1e6
"""An iteration takes less, so that its picoseconds fit into 64 bits with room for stalls."""

MAX_ORDINAL = 2**31


def check_trace(trace: Trace) -> None:
    """Raise InputError for the first invariant that does not hold."""
    _check_metadata(trace)
    _check_kernels(trace)
    _check_storages(trace)
    _check_accesses(trace)
    _check_calls(trace)


def _refuse(bad: npt.NDArray[np.bool_], where: str, values: npt.NDArray[Any], must: str) -> None:
    """Raise for the first row where ``bad`` is true."""
    if bad.any():
        row = int(np.argmax(bad))
        raise InputError(f"{where}, row {row}: {must}, got {values[row]!s}")


def _check_dense(index: npt.NDArray[np.int64], where: str) -> None:
    bad = index != np.arange(len(index))
    _refuse(bad, where, index, "indices must run 0, 1, 2, ... in order")


def _check_metadata(trace: Trace) -> None:
    from teraio.traces.trace import SOURCES

    metadata = trace.metadata
    if metadata.source not in SOURCES:
        raise InputError(f"metadata.source: must be one of {SOURCES}, got {metadata.source!r}")
    if not 0 <= metadata.rank < metadata.world_size:
        raise InputError(
            f"metadata.rank: must be in 0..world_size-1, "
            f"got {metadata.rank} of {metadata.world_size}"
        )
    dispatch = metadata.dispatch_seconds
    if not isinstance(dispatch, (int, float)) or not 0 <= dispatch < float("inf"):
        raise InputError(
            f"metadata.dispatch_seconds: must be finite and not negative, got {dispatch!r}"
        )
    for name in ("micro_batches", "optimizer_steps", "allocator_rounding_bytes"):
        value = getattr(metadata, name)
        if not isinstance(value, int) or value < (0 if name == "optimizer_steps" else 1):
            raise InputError(f"metadata.{name}: must be a positive integer, got {value!r}")
    traced = metadata.traced_micro_batches
    if not isinstance(traced, int) or not 0 <= traced <= metadata.micro_batches:
        raise InputError(
            f"metadata.traced_micro_batches: must be in 0..micro_batches, got {traced!r}"
        )


def _check_kernels(trace: Trace) -> None:
    from teraio.traces.trace import PHASES

    kernels = trace.kernels
    if len(kernels) == 0:
        raise InputError("kernels: a trace needs at least one kernel")
    _check_dense(kernels.kernel, "kernels.kernel")
    _refuse(~np.isin(kernels.phase, PHASES), "kernels.phase", kernels.phase, f"one of {PHASES}")
    for name in ("duration_seconds", "gap_before_seconds"):
        seconds = getattr(kernels, name)
        bad = ~np.isfinite(seconds) | (seconds < 0)
        _refuse(bad, f"kernels.{name}", seconds, "must be finite and not negative")
    if trace.ideal_seconds >= MAX_SECONDS:
        raise InputError(
            f"kernels.duration_seconds: gaps and durations must sum to less than {MAX_SECONDS:g} "
            f"seconds, got {trace.ideal_seconds:g}"
        )
    workspace = kernels.workspace_bytes
    _refuse(workspace < 0, "kernels.workspace_bytes", workspace, "must not be negative")


def _check_storages(trace: Trace) -> None:
    from teraio.traces.trace import KINDS

    storages, num_kernels = trace.storages, trace.num_kernels
    _check_dense(storages.storage, "storages.storage")
    _refuse(~np.isin(storages.kind, KINDS), "storages.kind", storages.kind, f"one of {KINDS}")
    _refuse(storages.nbytes < 0, "storages.nbytes", storages.nbytes, "must not be negative")
    _refuse(
        storages.allocated_bytes < storages.nbytes,
        "storages.allocated_bytes",
        storages.allocated_bytes,
        "must be at least nbytes",
    )
    workspace_bytes = trace.kernels.workspace_bytes.max(initial=0)
    total_bytes = storages.allocated_bytes.sum(dtype=float) + float(workspace_bytes)
    if total_bytes >= MAX_BYTES:
        raise InputError(
            f"storages.allocated_bytes: must sum to less than 2**62 bytes, got {total_bytes:.3g}"
        )
    for name in ("birth", "death"):
        values = getattr(storages, name)
        bad = (values < -1) | (values >= num_kernels)
        _refuse(bad, f"storages.{name}", values, f"must be null or a kernel 0..{num_kernels - 1}")
    half = (storages.birth < 0) != (storages.death < 0)
    _refuse(half, "storages.death", storages.death, "birth and death must both be null, or neither")
    ordinal = storages.birth_ordinal
    no_ordinal = (storages.birth >= 0) & (ordinal < 0)
    _refuse(no_ordinal, "storages.birth_ordinal", ordinal, "must not be null here")
    _refuse(ordinal >= MAX_ORDINAL, "storages.birth_ordinal", ordinal, "must be below 2**31")
    _check_identities(trace)


def _check_identities(trace: Trace) -> None:
    storages = trace.storages
    persistent = trace.is_persistent
    unnamed = persistent & (storages.name == "")
    _refuse(unnamed, "storages.name", storages.name, "a persistent storage needs a name")
    _refuse_repeats(storages.name, persistent, "storages.name", "persistent names must be unique")
    births = storages.birth * (storages.birth_ordinal.max(initial=0) + 1) + storages.birth_ordinal
    must = "no two storages born at one kernel may share an ordinal"
    _refuse_repeats(births, ~persistent, "storages.birth_ordinal", must)


def _refuse_repeats(
    values: npt.NDArray[Any], among: npt.NDArray[np.bool_], where: str, must: str
) -> None:
    rows = np.flatnonzero(among)
    _, first = np.unique(values[rows], return_index=True)
    repeats = np.zeros(len(values), dtype=bool)
    repeats[np.delete(rows, first)] = True
    _refuse(repeats, where, values, must)


def _check_accesses(trace: Trace) -> None:
    accesses, storages = trace.accesses, trace.storages
    num_kernels = trace.num_kernels
    unknown = (accesses.kernel < 0) | (accesses.kernel >= num_kernels)
    _refuse(unknown, "accesses.kernel", accesses.kernel, f"must be in 0..{num_kernels - 1}")
    unknown = (accesses.storage < 0) | (accesses.storage >= len(storages))
    _refuse(unknown, "accesses.storage", accesses.storage, "no such storage")
    backwards = np.zeros(len(accesses), dtype=bool)
    backwards[1:] = np.diff(accesses.kernel) < 0
    _refuse(backwards, "accesses.kernel", accesses.kernel, "rows must be ordered by kernel")
    key = accesses.kernel * max(1, len(storages)) + accesses.storage
    everything = np.ones(len(accesses), dtype=bool)
    must = "a kernel and storage may meet in one row only"
    _refuse_repeats(key, everything, "accesses.storage", must)
    birth, death = storages.birth[accesses.storage], storages.death[accesses.storage]
    outside = (birth >= 0) & (
        (accesses.kernel - birth) % num_kernels > (death - birth) % num_kernels
    )
    must = "access outside the storage's lifetime"
    _refuse(outside, "accesses.kernel", accesses.kernel, must)


def _check_calls(trace: Trace) -> None:
    calls, call = trace.calls, trace.kernels.call
    _check_dense(calls.call, "calls.call")
    unknown = (call < -1) | (call >= len(calls))
    _refuse(unknown, "kernels.call", call, f"must be null or in 0..{len(calls) - 1}")
    for name in ("flops", "read_bytes", "written_bytes"):
        values = getattr(calls, name)
        _refuse(values < 0, f"calls.{name}", values, "must not be negative")
    known = np.flatnonzero(call >= 0)
    differs = np.zeros(len(call), dtype=bool)
    differs[known] = calls.op[call[known]] != trace.kernels.op[known]
    _refuse(differs, "kernels.call", call, "is the call of another operator")
