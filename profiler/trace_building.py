"""From a recording to a trace: names, kinds, tables and metadata."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from teraio.contracts.plan import Accesses
from teraio.contracts.table import MISSING, FloatArray, IntArray, TextArray
from teraio.errors import OffloadWarning
from teraio.profiler.dispatch import READ, WRITE
from teraio.profiler.lifetimes import Cycle, CycleBuilder, Row
from teraio.profiler.pace import meet_pace
from teraio.profiler.recorder import Recorder
from teraio.profiler.segments import Segment
from teraio.profiler.workspace import warn_of_unknown_workspace
from teraio.traces.trace import UNTRACKED, Calls, Kernels, Storages, Trace, TraceMetadata


def build_trace(recorder: Recorder, *, model: str = "") -> Trace:
    """The trace of the recorder's first steady iteration.

    Raises InputError if none was seen, or if each iteration leaves more memory behind.
    """
    builder = CycleBuilder(recorder.recording, recorder.records.values())
    cycle = builder.build()
    kernels, calls = _only_used(_kernels(recorder, builder.template), recorder.call_table())
    _name_unnamed(cycle)
    _set_kinds(cycle, kernels)
    numbers = {id(row): number for number, row in enumerate(cycle.rows)}
    return Trace(
        kernels=kernels,
        storages=_storages(recorder, cycle.rows),
        accesses=_accesses(cycle, numbers),
        metadata=_metadata(recorder, kernels, model, cycle.kept_bytes),
        calls=calls,
    )


# Kernels


def _kernels(recorder: Recorder, template: list[Segment]) -> Kernels:
    durations, gaps = _median_times(recorder)
    count = len(durations)
    workspace_bytes = recorder.recording.workspace_bytes
    if workspace_bytes is None:
        if not recorder.recording.has_given_up_workspace:
            warn_of_unknown_workspace("too few iterations ran to spend one on measuring it")
        workspace_bytes = np.zeros(count, dtype=np.int64)
    collectives = [
        segment.collectives.get(kernel) for segment in template for kernel in range(len(segment))
    ]
    return Kernels(
        kernel=np.arange(count),
        op=_texts(_joined(segment.operators for segment in template)),
        module=_texts(_joined(segment.modules for segment in template)),
        phase=_texts(_joined(segment.phases for segment in template)),
        micro_batch=_integers(_micro_batches(template)),
        duration_seconds=durations,
        gap_before_seconds=gaps,
        workspace_bytes=workspace_bytes,
        signature=_integers(_joined(segment.signatures for segment in template)),
        stream=_integers(_streams(_joined(segment.streams for segment in template))),
        group=_texts("" if c is None else c.group for c in collectives),
        group_sequence=_integers(_group_sequences(collectives)),
        peer_rank=_integers(
            MISSING if c is None or c.peer_rank is None else c.peer_rank for c in collectives
        ),
        call=_integers(_joined(s.calls or [MISSING] * len(s) for s in template)),
    )


def _only_used(kernels: Kernels, calls: Calls) -> tuple[Kernels, Calls]:
    """Calls that the trace's kernels make, in order of first appearance there."""
    described = kernels.call[kernels.call != MISSING]
    used, first = np.unique(described, return_index=True)
    used = used[np.argsort(first)]
    number = np.full(len(calls) + 1, MISSING)
    number[used] = np.arange(len(used))
    chosen = replace(calls.take(used), call=np.arange(len(used)))
    return replace(kernels, call=number[kernels.call]), chosen


def _joined(lists: Iterable[list[Any]]) -> list[Any]:
    return [item for part in lists for item in part]


def _integers(values: Iterable[int]) -> IntArray:
    return np.fromiter(values, dtype=np.int64)


def _texts(values: Iterable[str]) -> TextArray:
    return np.array(list(values), dtype=object)


def _median_times(recorder: Recorder) -> tuple[FloatArray, FloatArray]:
    recording = recorder.recording
    period = recording.require_steady().period
    durations, gaps = [], []
    for first in recording.timed:
        times = [
            recording.segment(index).durations_and_gaps_seconds()
            for index in range(first, first + period)
        ]
        durations.append(np.concatenate([duration for duration, _ in times]))
        gaps.append(np.concatenate([gap for _, gap in times]))
    medians = np.median(durations, axis=0), np.median(gaps, axis=0)
    pace = recorder.pace
    return meet_pace(*medians, pace.seconds, may_lengthen=pace.tells_clocks)


def _micro_batches(template: list[Segment]) -> list[int]:
    result: list[int] = []
    before = 0
    for segment in template:
        result += [m if m == MISSING else m + before for m in segment.micro_batches]
        before += max(segment.micro_batches, default=MISSING) + 1
    return result


def _streams(raw: list[int]) -> list[int]:
    """Streams numbered by the kernels that they carry: 0 is the compute stream."""
    ranked = sorted(set(raw), key=lambda stream: (-raw.count(stream), raw.index(stream)))
    number = {stream: rank for rank, stream in enumerate(ranked)}
    return [number[stream] for stream in raw]


def _group_sequences(collectives: list[Any]) -> list[int]:
    next_of_group: dict[str, int] = {}
    result = []
    for collective in collectives:
        if collective is None or collective.is_peer_to_peer:
            result.append(MISSING)
            continue
        sequence = next_of_group.get(collective.group, 0)
        next_of_group[collective.group] = sequence + 1
        result.append(sequence)
    return result


# Storages


def _name_unnamed(cycle: Cycle) -> None:
    """Name persistent storages that have no name by where the iteration first meets them, and list
    them in that order, whatever an earlier iteration met first.
    """
    taken: set[str] = set()
    for row in cycle.rows:
        if row.is_persistent and row.name in taken:
            row.name = ""
        taken.add(row.name)
    unnamed: list[Row] = []
    kernel = position = -1
    for at, row, _ in cycle.access_rows:
        kernel, position = (at, position + 1) if at == kernel else (at, 0)
        if row.is_persistent and not row.name:
            row.name = f"unnamed:{kernel}.{position}"
            unnamed.append(row)
    for number, row in enumerate(r for r in cycle.rows if r.is_persistent and not r.name):
        row.name = f"untouched:{number}"
    moved = set(map(id, unnamed))
    rest = [row for row in cycle.rows if id(row) not in moved]
    first_mortal = next((i for i, row in enumerate(rest) if not row.is_persistent), len(rest))
    cycle.rows = rest[:first_mortal] + unnamed + rest[first_mortal:]


def _set_kinds(cycle: Cycle, kernels: Kernels) -> None:
    used_in_backward = {
        id(row) for kernel, row, _ in cycle.access_rows if kernels.phase[kernel] == "backward"
    }
    for row in cycle.rows:
        row.kind = _kind(row, is_used_in_backward=id(row) in used_in_backward)


def _kind(row: Row, *, is_used_in_backward: bool) -> str:
    record = row.record
    if row.is_overhang:
        return "temporary"
    if record.kind:
        return record.kind
    if record.birth_phase == "other" or (record.is_foreign and record.birth_phase != "optimizer"):
        return "input"
    if row.is_persistent:
        return "optimizer_state" if record.birth_phase == "optimizer" else "buffer"
    is_activation = record.birth_phase == "forward" and is_used_in_backward
    return "activation" if is_activation else "temporary"


def _storages(recorder: Recorder, rows: list[Row]) -> Storages:
    """The cycle's rows, then named tensors that no kernel uses, then what nobody knows."""
    columns: list[tuple[Any, ...]] = []
    for row in rows:
        record = row.record
        resizable = record.resizable and not row.is_pinned
        place = (row.birth, row.birth_ordinal, row.death)
        description = (record.nbytes, row.kind, row.name)
        columns.append((*description, *place, _dtype_name(record.dtype), resizable))
    taken = {row.name for row in rows if row.is_persistent}
    nowhere = (None, None, None)
    for tensor in recorder.unseen:
        if tensor.name not in taken:
            description = (tensor.nbytes, tensor.kind, tensor.name)
            columns.append((*description, *nowhere, _dtype_name(tensor.dtype), tensor.resizable))
    if recorder.untracked_bytes:
        columns.append((recorder.untracked_bytes, "buffer", UNTRACKED, *nowhere, None, False))
    return Storages.from_rows(
        [
            (number, nbytes, recorder.allocated_bytes(nbytes), *rest)
            for number, (nbytes, *rest) in enumerate(columns)
        ]
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _accesses(cycle: Cycle, numbers: dict[int, int]) -> Accesses:
    flags = _integers(flags for _, _, flags in cycle.access_rows)
    return Accesses(
        kernel=_integers(kernel for kernel, _, _ in cycle.access_rows),
        storage=_integers(numbers[id(row)] for _, row, _ in cycle.access_rows),
        reads=flags & READ != 0,
        writes=flags & WRITE != 0,
    )


# Metadata


def _metadata(recorder: Recorder, kernels: Kernels, model: str, kept_bytes: int) -> TraceMetadata:
    models, optimizers = recorder.names.models, recorder.names.optimizers
    period = recorder.recording.require_steady().period
    rank, world_size = _rank_and_world_size()
    return TraceMetadata(
        source=recorder.source,
        device=recorder.device_label,
        torch_version=str(torch.__version__),
        allocator_rounding_bytes=recorder.allocator_rounding_bytes,
        rank=rank,
        world_size=world_size,
        micro_batches=max(1, int(kernels.micro_batch.max(initial=0)) + 1),
        optimizer_steps=period if recorder.has_optimizer_steps else 0,
        bucket_bytes=recorder.bucket_bytes,
        dispatch_seconds=_dispatch_seconds(recorder, len(kernels)),
        model=model or (type(models[0]).__name__ if models else ""),
        optimizer=", ".join(dict.fromkeys(type(o).__name__ for o in optimizers)),
        optimizer_implementation=_optimizer_implementation(kernels),
        attention_kernel=_attention_kernel(kernels),
        known_differences=_known_differences(recorder, kept_bytes),
    )


def _known_differences(recorder: Recorder, kept_bytes: int) -> list[str]:
    differences = []
    if kept_bytes:
        differences.append(
            f"the script keeps {kept_bytes} bytes of each iteration for ever; they count once"
        )
    by_shape = recorder.recording.shape_difference
    if by_shape is not None:
        text = f"shapes depend on the data, and this is one iteration of many: {by_shape}"
        differences.append(text)
        warnings.warn(f"{text}; what a plan misses is fetched on demand", OffloadWarning, 3)
    return differences


def _dispatch_seconds(recorder: Recorder, num_kernels: int) -> float:
    """Seconds that watching added to each kernel, where nothing hides them."""
    pace, recording = recorder.pace.seconds, recorder.recording
    if pace is None or recorder.device_type == "cuda":
        return 0.0
    period = recording.require_steady().period
    watched_seconds = min(
        sum(recording.segment(first + i).watched_seconds for i in range(period))
        for first in recording.timed
    )
    return max(0.0, watched_seconds - pace) / num_kernels


def _rank_and_world_size() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    # A script may have left its group by now; launchers such as torchrun say the same.
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def _optimizer_implementation(kernels: Kernels) -> str:
    names = set(kernels.op[kernels.phase == "optimizer"].tolist())
    if not names:
        return ""
    if any(name.startswith("aten._fused_") for name in names):
        return "fused"
    return "foreach" if any(name.startswith("aten._foreach_") for name in names) else "for-loop"


def _attention_kernel(kernels: Kernels) -> str:
    """The kernel of ``scaled_dot_product_attention``, e.g. flash; "" where it was not called."""
    pattern = re.compile(r"aten\._scaled_dot_product_(?:fused_)?(\w+?)_?(?:attention|\.)(\w*)")
    for name in dict.fromkeys(kernels.op.tolist()):
        match = pattern.match(name)
        if match and "backward" not in name:
            return match[1] + match[2]
    return ""
