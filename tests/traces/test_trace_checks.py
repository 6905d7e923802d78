"""Every invariant of a trace, broken once: the error names table, column and row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from teraio.contracts.plan import Accesses
from teraio.contracts.table import MISSING
from teraio.errors import InputError
from teraio.traces.trace import Kernels, Storages, Trace, TraceMetadata, as_trace

NAN = float("nan")

BROKEN_CELLS = [
    # table, row, column, value, message
    ("kernels", 3, "kernel", 7, "kernels.kernel, row 3: indices must run 0, 1, 2, ... in order"),
    ("kernels", 1, "phase", "middle", "kernels.phase, row 1: one of ('forward', 'backward'"),
    ("kernels", 2, "duration_seconds", NAN, "kernels.duration_seconds, row 2: must be finite"),
    ("kernels", 2, "duration_seconds", -1.0, "kernels.duration_seconds, row 2: must be finite"),
    ("kernels", 4, "gap_before_seconds", float("inf"), "kernels.gap_before_seconds, row 4: must"),
    ("kernels", 5, "workspace_bytes", -1, "kernels.workspace_bytes, row 5: must not be negative"),
    ("storages", 2, "storage", 3, "storages.storage, row 2: indices must run"),
    ("storages", 2, "kind", "tensor", "storages.kind, row 2: one of ('parameter'"),
    ("storages", 2, "nbytes", -1, "storages.nbytes, row 2: must not be negative, got -1"),
    ("storages", 2, "allocated_bytes", 2999, "storages.allocated_bytes, row 2: must be at least"),
    ("storages", 3, "birth", 8, "storages.birth, row 3: must be null or a kernel 0..7, got 8"),
    ("storages", 3, "birth", -2, "storages.birth, row 3: must be null or a kernel 0..7, got -2"),
    ("storages", 3, "death", 8, "storages.death, row 3: must be null or a kernel 0..7, got 8"),
    ("storages", 3, "death", MISSING, "storages.death, row 3: birth and death must both be null"),
    ("storages", 3, "birth", MISSING, "storages.death, row 3: birth and death must both be null"),
    ("storages", 3, "birth_ordinal", MISSING, "storages.birth_ordinal, row 3: must not be null"),
    ("storages", 1, "name", "", "storages.name, row 1: a persistent storage needs a name"),
    ("storages", 1, "name", "frozen", "storages.name, row 1: persistent names must be unique"),
    ("storages", 5, "birth_ordinal", 0, "storages.birth_ordinal, row 5: no two storages born"),
    ("storages", 5, "birth_ordinal", 2**62, "storages.birth_ordinal, row 5: must be below 2**31"),
    ("storages", 5, "allocated_bytes", 2**62, "storages.allocated_bytes: must sum to less than"),
    ("kernels", 5, "workspace_bytes", 2**62, "storages.allocated_bytes: must sum to less than"),
    ("kernels", 5, "duration_seconds", 1e6, "kernels.duration_seconds: gaps and durations must"),
    ("accesses", 12, "kernel", 8, "accesses.kernel, row 12: must be in 0..7, got 8"),
    ("accesses", 0, "kernel", -1, "accesses.kernel, row 0: must be in 0..7, got -1"),
    ("accesses", 0, "storage", 7, "accesses.storage, row 0: no such storage, got 7"),
    ("accesses", 5, "kernel", 2, "accesses.kernel, row 5: rows must be ordered by kernel"),
    ("accesses", 1, "storage", 0, "accesses.storage, row 1: a kernel and storage may meet in one"),
    ("accesses", 1, "storage", 3, "accesses.kernel, row 1: access outside the storage's lifetime"),
    ("storages", 4, "death", 2, "accesses.kernel, row 3: access outside the storage's lifetime"),
    ("storages", 5, "birth", 4, "accesses.kernel, row 4: access outside the storage's lifetime"),
]


@pytest.mark.parametrize(
    ("table", "row", "column", "value", "message"),
    BROKEN_CELLS,
    ids=[f"{c[0]}.{c[2]}={c[3]}" for c in BROKEN_CELLS],
)
def test_a_broken_cell_is_named(
    small_trace: Trace, table: str, row: int, column: str, value: Any, message: str
) -> None:
    values = getattr(getattr(small_trace, table), column).copy()
    values[row] = value
    changed: dict[str, Any] = {column: values}
    tables: dict[str, Any] = {table: replace(getattr(small_trace, table), **changed)}
    with pytest.raises(InputError) as caught:
        replace(small_trace, **tables)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


BROKEN_METADATA = [
    ("source", "guessed", "metadata.source: must be one of"),
    ("rank", 1, "metadata.rank: must be in 0..world_size-1, got 1 of 1"),
    ("rank", -1, "metadata.rank: must be in 0..world_size-1"),
    ("world_size", 0, "metadata.rank: must be in 0..world_size-1"),
    ("micro_batches", 0, "metadata.micro_batches: must be a positive integer, got 0"),
    ("traced_micro_batches", 2, "metadata.traced_micro_batches: must be in 0..micro_batches"),
    ("traced_micro_batches", -1, "metadata.traced_micro_batches: must be in 0..micro_batches"),
    ("optimizer_steps", -1, "metadata.optimizer_steps: must be"),
    ("allocator_rounding_bytes", 0, "metadata.allocator_rounding_bytes: must be a positive"),
    ("allocator_rounding_bytes", 0.5, "metadata.allocator_rounding_bytes: must be a positive"),
]


@pytest.mark.parametrize(("name", "value", "message"), BROKEN_METADATA)
def test_broken_metadata_is_named(small_trace: Trace, name: str, value: Any, message: str) -> None:
    changed: dict[str, Any] = {name: value}
    with pytest.raises(InputError) as caught:
        replace(small_trace, metadata=replace(small_trace.metadata, **changed))
    assert message in str(caught.value)


def test_a_trace_without_an_optimizer_step_is_allowed(small_trace: Trace) -> None:
    metadata = replace(small_trace.metadata, optimizer_steps=0)
    assert replace(small_trace, metadata=metadata).num_kernels == 8


def test_a_trace_without_kernels_is_refused() -> None:
    with pytest.raises(InputError, match="at least one kernel"):
        Trace(Kernels.empty(), Storages.empty(), Accesses.empty(), TraceMetadata(source="fake"))


def test_a_trace_without_storages_is_allowed(small_trace: Trace) -> None:
    trace = replace(small_trace, storages=Storages.empty(), accesses=Accesses.empty())
    assert (trace.peak_live_bytes, trace.peak_allocated_bytes) == (0, 64)


def test_a_life_of_a_whole_cycle_may_be_accessed_anywhere(small_trace: Trace) -> None:
    """Born at 5 and freed after 4 of the next iteration: every kernel lies in its life."""
    storages = Storages.from_rows([(0, 1, 1, "temporary", "", 5, 0, 4, "", True)])
    kernels = np.arange(8)
    accesses = Accesses(kernels, np.zeros(8, np.int64), kernels >= 0, kernels == 5)
    assert replace(small_trace, storages=storages, accesses=accesses).peak_live_bytes == 1


def test_as_trace_takes_a_value_or_a_path(small_trace: Trace, tmp_path: Any) -> None:
    small_trace.save(tmp_path / "t.trace")
    assert as_trace(small_trace) is small_trace
    assert as_trace(tmp_path / "t.trace").hash == small_trace.hash
    assert as_trace(str(tmp_path / "t.trace")).hash == small_trace.hash


def test_totals_of_the_small_trace(small_trace: Trace) -> None:
    """Kernel 3 sees everything alive: 1000 + 2000 + 3000 + 4000 + 4000 + 500 + 100 bytes."""
    assert small_trace.peak_live_bytes == 14600
    assert small_trace.peak_allocated_bytes == 1024 + 2048 + 3072 + 4096 + 4096 + 512 + 512 + 64
    assert small_trace.ideal_seconds == pytest.approx(8 * 1.1e-3)
    assert small_trace.is_persistent.tolist() == [True, True, True, False, False, False, True]
