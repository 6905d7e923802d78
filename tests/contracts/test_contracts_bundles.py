"""Bundles on disk: exact round trips, and every way in which a file can be wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from teraio.contracts.plan import Copies, Plan
from teraio.contracts.table import MISSING, Column, Table, column_names
from teraio.contracts.timeline import Events, Timeline, TimelineMetadata
from teraio.errors import InputError
from teraio.traces.trace import Kernels, Storages, Trace


@pytest.fixture(scope="session")
def small_timeline() -> Timeline:
    events = Events.from_rows(
        [
            (0, 0, "kernel", 0, None, None, 0.0, 1e-3, 0, None),
            (0, 0, "transfer", 3, 1, "host read", 1e-4, 0.1 + 0.2, 2**62 + 1, "prefetch"),
            (0, 0, "stall", 1, 1, None, 1e-3, 2e-3, 0, "read"),
        ]
    )
    metadata = TimelineMetadata(
        source="simulated",
        iteration_seconds=0.1 + 0.2,
        ideal_seconds=1e-3,
        cycle_iterations=1,
        steady=True,
        compute_alone_seconds=1e-3,
        compute_overlapped_seconds=0.0,
        stall_read_seconds=1e-3,
        stall_memory_seconds=0.0,
        stall_host_seconds=0.0,
        gap_seconds=0.0,
        peak_gpu_bytes=2**62 + 1,
        channel_utilisation={"host read": 1 / 3},
        channel_bytes={"host read": 2**62 + 1},
    )
    return Timeline(events=events, metadata=metadata)


def assert_same(a: Any, b: Any) -> None:
    for name, table in a._tables().items():
        assert table.equals(getattr(b, name)), name
    assert a.metadata == b.metadata


def test_a_trace_survives_its_files(small_trace: Trace, tmp_path: Path) -> None:
    small_trace.save(tmp_path / "t.trace")
    loaded = Trace.load(tmp_path / "t.trace")
    assert_same(small_trace, loaded)
    assert loaded.hash == small_trace.hash


def test_a_plan_survives_its_files(small_plan: Plan, tmp_path: Path) -> None:
    options = {"planner": {"limit": 5, "names": ["a"]}, "share": 1 / 3}
    plan = replace(small_plan, metadata=replace(small_plan.metadata, options=options))
    plan.save(tmp_path / "p.plan")
    loaded = Plan.load(tmp_path / "p.plan")
    assert_same(plan, loaded)
    assert loaded.content_hash() == plan.content_hash()
    assert loaded.hardware == plan.hardware


def test_a_timeline_survives_its_files(small_timeline: Timeline, tmp_path: Path) -> None:
    small_timeline.save(tmp_path / "t.timeline")
    loaded = Timeline.load(tmp_path / "t.timeline")
    assert loaded.events.equals(small_timeline.events)
    assert asdict(loaded.metadata) == asdict(small_timeline.metadata)


def test_big_integers_beside_nulls_stay_exact(small_trace: Trace, tmp_path: Path) -> None:
    """A null turns a pandas column into floats, in which 2**62 + 1 is 2**62."""
    big = 2**62 + 1
    signature = small_trace.kernels.signature.copy()
    signature[2] = big
    sequence = small_trace.kernels.group_sequence.copy()
    sequence[3] = big
    assert MISSING in sequence
    kernels = replace(small_trace.kernels, signature=signature, group_sequence=sequence)
    replace(small_trace, kernels=kernels).save(tmp_path / "t.trace")
    loaded = Trace.load(tmp_path / "t.trace").kernels
    assert (loaded.signature[2], loaded.group_sequence[3]) == (big, big)
    frame = loaded.to_pandas()
    assert str(frame.group_sequence.dtype) == "Int64"
    assert frame.group_sequence[3] == big
    assert frame.group_sequence.isna().sum() == len(frame) - 1
    arrow = pq.read_table(tmp_path / "t.trace" / "kernels.parquet")
    assert arrow.column("group_sequence").null_count == len(frame) - 1


def test_the_hash_sees_every_cell_and_the_metadata(small_trace: Trace) -> None:
    seen = {small_trace.hash}
    for name in ("duration_seconds", "workspace_bytes", "module"):
        values = getattr(small_trace.kernels, name).copy()
        values[1] = "x" if name == "module" else values[1] + 1
        changed: dict[str, Any] = {name: values}
        seen.add(replace(small_trace, kernels=replace(small_trace.kernels, **changed)).hash)
    seen.add(replace(small_trace, metadata=replace(small_trace.metadata, model="b")).hash)
    assert len(seen) == 5


def test_text_that_moves_between_cells_changes_the_hash(small_trace: Trace) -> None:
    """Joined without care, ("a", "b c") and ("a b", "c") would be one text."""

    def named(first: str, second: str) -> str:
        module = small_trace.kernels.module.copy()
        module[:2] = [first, second]
        return replace(small_trace, kernels=replace(small_trace.kernels, module=module)).hash

    separator = "\x1f"
    assert named(f"a{separator}b", "c") != named("a", f"b{separator}c")


def rewrite(file: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    pq.write_table(change(pq.read_table(file)), file, write_page_checksum=True)


def edit_block(file: Path, **changes: Any) -> None:
    def change(table: pa.Table) -> pa.Table:
        block = json.loads(table.schema.metadata[b"teraio"]) | changes
        return table.replace_schema_metadata({b"teraio": json.dumps(block)})

    rewrite(file, change)


def flip_a_data_byte(file: Path) -> None:
    """Flip one byte inside the first column chunk's data page."""
    chunk = pq.ParquetFile(file).metadata.row_group(0).column(0)
    content = bytearray(file.read_bytes())
    content[chunk.data_page_offset + chunk.total_compressed_size - 3] ^= 0x10
    file.write_bytes(content)


def drop_column(file: Path, name: str) -> None:
    rewrite(file, lambda table: table.drop_columns([name]))


def add_column(file: Path, name: str) -> None:
    rewrite(file, lambda table: table.append_column(name, pa.array([0] * len(table))))


def retype_column(file: Path, name: str, dtype: Any) -> None:
    def change(table: pa.Table) -> pa.Table:
        index = table.column_names.index(name)
        return table.set_column(index, name, table.column(name).cast(dtype))

    rewrite(file, change)


def null_cell(file: Path, name: str) -> None:
    def change(table: pa.Table) -> pa.Table:
        index = table.column_names.index(name)
        values = table.column(name).to_pylist()
        values[2] = None
        return table.set_column(index, name, pa.array(values, type=table.column(name).type))

    rewrite(file, change)


def change_cell(file: Path, name: str, value: Any) -> None:
    def change(table: pa.Table) -> pa.Table:
        index = table.column_names.index(name)
        values = table.column(name).to_pylist()
        values[0] = value
        field = table.schema.field(name)
        return table.set_column(index, field, pa.array(values, type=field.type))

    rewrite(file, change)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped byte": (flip_a_data_byte, "kernels.parquet: not readable as Parquet"),
    "truncated": (
        lambda f: f.write_bytes(f.read_bytes()[:-20]) and None,
        "not readable as Parquet",
    ),
    "empty": (lambda f: f.write_bytes(b""), "kernels.parquet: not readable as Parquet"),
    "not Parquet": (lambda f: f.write_text("hello"), "not readable as Parquet"),
    "missing": (lambda f: f.unlink(), "kernels.parquet: missing; the bundle is incomplete"),
    "another kind": (lambda f: edit_block(f, kind="plan"), "holds a plan, not a trace"),
    "newer format": (
        lambda f: edit_block(f, format_version=9),
        "version 9 is not 2, which this teraio reads; update teraio",
    ),
    "another hash": (lambda f: edit_block(f, hash="0"), "belongs to another save"),
    "no block": (
        lambda f: rewrite(f, lambda t: t.replace_schema_metadata({})),
        "kernels.parquet: has no teraio metadata block",
    ),
    "block is no object": (
        lambda f: rewrite(f, lambda t: t.replace_schema_metadata({b"teraio": b"[1]"})),
        "kernels.parquet: has no teraio metadata block",
    ),
    "column gone": (lambda f: drop_column(f, "op"), "column op is missing"),
    "column added": (lambda f: add_column(f, "extra"), "unknown column extra"),
    "column retyped": (
        lambda f: retype_column(f, "kernel", pa.float64()),
        "column kernel must be int, is double",
    ),
    "null where none may be": (lambda f: null_cell(f, "kernel"), "kernel is null in row 2"),
    "cell changed": (
        lambda f: change_cell(f, "duration_seconds", 9.0),
        "the content does not match its hash",
    ),
    "metadata field unknown": (
        lambda f: edit_block(f, metadata={"source": "measured", "colour": "red"}),
        "unknown field colour",
    ),
    "metadata field missing": (lambda f: edit_block(f, metadata={}), "field source is missing"),
    "metadata mistyped": (
        lambda f: edit_block(f, metadata={"source": "measured", "rank": "first"}),
        "t.trace.rank: must be int, got 'first'",
    ),
    "metadata gone": (lambda f: edit_block(f, metadata=None), "expected fields of TraceMetadata"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_and_the_file_named(
    small_trace: Trace, tmp_path: Path, damage: str
) -> None:
    path = tmp_path / "t.trace"
    small_trace.save(path)
    apply, message = DAMAGE[damage]
    apply(path / "kernels.parquet")
    with pytest.raises(InputError) as caught:
        Trace.load(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_flipped_byte_would_pass_without_checksums(small_trace: Trace, tmp_path: Path) -> None:
    """The checksum finds it, not luck: Arrow alone reads the damaged page without complaint, or
    fails in decompression; either way the error of this test is the checksum's.
    """
    path = tmp_path / "t.trace"
    small_trace.save(path)
    flip_a_data_byte(path / "kernels.parquet")
    with pytest.raises(InputError, match=r"(?i)crc|checksum"):
        Trace.load(path)


def test_files_of_two_saves_cannot_be_mixed(small_trace: Trace, tmp_path: Path) -> None:
    one, other = tmp_path / "one.trace", tmp_path / "other.trace"
    small_trace.save(one)
    replace(small_trace, metadata=replace(small_trace.metadata, model="other")).save(other)
    shutil.copy(other / "storages.parquet", one / "storages.parquet")
    with pytest.raises(InputError, match=r"storages.parquet: belongs to another save"):
        Trace.load(one)


def test_a_plan_is_not_read_as_a_trace(small_plan: Plan, tmp_path: Path) -> None:
    small_plan.save(tmp_path / "p.plan")
    with pytest.raises(InputError, match=r"p.plan"):
        Trace.load(tmp_path / "p.plan")
    with pytest.raises(InputError, match="no such plan directory"):
        Plan.load(tmp_path / "none.plan")


def test_columns_must_be_of_one_length_and_kind(small_trace: Trace) -> None:
    with pytest.raises(InputError, match=r"Kernels.op: has 1 rows, but kernel has 8"):
        replace(small_trace.kernels, op=np.array(["x"], dtype=object))
    with pytest.raises(InputError, match=r"Kernels.kernel: needs integers, got float64"):
        Kernels.from_rows([(0.5, *[0] * 12)])
    with pytest.raises(InputError, match=r"Kernels.duration_seconds: not readable as float"):
        replace(small_trace.kernels, duration_seconds=np.array(["x"] * 8))


def test_columns_cannot_be_written_to(small_trace: Trace) -> None:
    with pytest.raises(ValueError, match="read-only"):
        small_trace.kernels.kernel[0] = 5


def test_a_table_owns_its_columns() -> None:
    """Changing the array that a table was made from does not change the table."""
    source = np.arange(2)
    text = np.array(["host", "host"], dtype=object)
    table = Copies(storage=source, tier=text, device=text, tier_offset_bytes=source)
    source[0] = 7
    text[0] = "ssd"
    assert (table.storage[0], table.tier[0]) == (0, "host")


@pytest.mark.parametrize("table", [Kernels, Storages, Events])
def test_schemas_list_the_fields(table: type[Table]) -> None:
    assert column_names(table) == [column.name for column in table.COLUMNS]
    assert all(isinstance(c, Column) and c.meaning for c in table.COLUMNS)


def test_empty_tables_survive(small_plan: Plan, tmp_path: Path) -> None:
    plan = replace(small_plan, moves=small_plan.moves.take(np.zeros(0, dtype=np.int64)))
    plan.save(tmp_path / "p.plan")
    assert len(Plan.load(tmp_path / "p.plan").moves) == 0
