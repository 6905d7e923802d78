"""Broken inputs through the command line: one line that names the place, exit code 2, no output.

Every row of the tables below is one kind of damage. A trace goes through ``show``, a machine
through ``plan``, a plan through ``verify`` and ``simulate``, a foreign file through ``import``.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import tomllib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tomli_w
from click.testing import CliRunner, Result

from teraio.cli import main
from teraio.contracts.bundle import FORMAT_VERSIONS, content_hash, save_bundle
from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Plan
from teraio.traces.trace import Trace


@pytest.fixture
def folder(tmp_path: Path, small_trace: Trace, small_plan: Plan, small_hardware: Hardware) -> Path:
    """A folder with a good trace, plan and machine, of which a test damages one."""
    small_trace.save(tmp_path / "t.trace")
    small_plan.save(tmp_path / "p.plan")
    small_hardware.save(tmp_path / "h.toml")
    return tmp_path


def content_of(folder: Path) -> dict[str, str]:
    """Every path below a folder, and what it holds."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else "folder"
        for path in folder.rglob("*")
    }


def run(folder: Path, *arguments: str) -> Result:
    """Run one command; arguments with a dot that stand in the folder become paths."""
    paths = [
        str(folder / text) if "." in text and not text.startswith("-") else text
        for text in arguments
    ]
    return CliRunner().invoke(main, paths)


def assert_refused(folder: Path, arguments: tuple[str, ...], parts: tuple[str, ...]) -> None:
    before = content_of(folder)
    result = run(folder, *arguments)
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("teraio: error: ")
    for part in parts:
        assert part in lines[0]
    assert content_of(folder) == before


# Damage to files -------------------------------------------------------------------------------


def edit_file(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return damage


def remove(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def flip_a_data_byte(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        chunk = pq.ParquetFile(folder / name).metadata.row_group(0).column(0)
        end = chunk.data_page_offset + chunk.total_compressed_size
        content = bytearray((folder / name).read_bytes())
        content[end - 3] ^= 0x10
        (folder / name).write_bytes(content)

    return damage


def edit_table(name: str, change: Callable[[pa.Table], pa.Table]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        table = change(pq.read_table(folder / name))
        pq.write_table(table, folder / name, write_page_checksum=True)

    return damage


def edit_block(name: str, **fields: Any) -> Callable[[Path], None]:
    def change(table: pa.Table) -> pa.Table:
        block = json.loads(table.schema.metadata[b"teraio"]) | fields
        return table.replace_schema_metadata({b"teraio": json.dumps(block)})

    return edit_table(name, change)


def set_cell(name: str, table: str, row: int, column: str, value: Any) -> Callable[[Path], None]:
    """A bundle whose hash and checksums are right, but one cell is not."""

    def damage(folder: Path) -> None:
        kind: type[Trace] | type[Plan] = Trace if name.endswith(".trace") else Plan
        whole = kind.load(folder / name)
        tables = whole._tables()
        values = getattr(tables[table], column).copy()
        values[row] = value
        cell: dict[str, Any] = {column: values}
        tables[table] = replace(tables[table], **cell)
        save_bundle(folder / name, name.split(".")[-1], tables, whole.metadata)

    return damage


def set_metadata(name: str, **fields: Any) -> Callable[[Path], None]:
    """A bundle whose hash and checksums are right, but a field of the metadata is not."""

    def damage(folder: Path) -> None:
        kind: type[Trace] | type[Plan] = Trace if name.endswith(".trace") else Plan
        whole = kind.load(folder / name)
        block = {
            "kind": name.split(".")[-1],
            "format_version": FORMAT_VERSIONS[name.split(".")[-1]],
            "metadata": asdict(whole.metadata) | fields,
        }
        known = {name: value for name, value in fields.items() if hasattr(whole.metadata, name)}
        metadata: Any = whole.metadata
        block["hash"] = content_hash(whole._tables(), replace(metadata, **known))
        for file in (folder / name).iterdir():
            table = pq.read_table(file).replace_schema_metadata({b"teraio": json.dumps(block)})
            pq.write_table(table, file, write_page_checksum=True)

    return damage


def swap_in_another_save(folder: Path) -> None:
    other = folder / "other.trace"
    trace = Trace.load(folder / "t.trace")
    replace(trace, metadata=replace(trace.metadata, model="other")).save(other)
    shutil.copy(other / "accesses.parquet", folder / "t.trace" / "accesses.parquet")
    shutil.rmtree(other)


def swap_in_the_trace(folder: Path) -> None:
    shutil.rmtree(folder / "p.plan")
    shutil.copytree(folder / "t.trace", folder / "p.plan")


def set_machine(**fields: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        data = tomllib.loads((folder / "h.toml").read_text()) | fields
        (folder / "h.toml").write_text(tomli_w.dumps(data))

    return damage


def text_edit(old: str, new: str) -> Callable[[Path], None]:
    def change(content: bytes) -> bytes:
        assert old.encode() in content
        return content.replace(old.encode(), new.encode(), 1)

    return edit_file("h.toml", change)


KERNELS, STORAGES, MOVES = (
    "t.trace/kernels.parquet",
    "t.trace/storages.parquet",
    "p.plan/moves.parquet",
)

BROKEN_TRACES: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "does not exist": (remove("t.trace"), ("t.trace: no such trace directory",)),
    "is a file": (
        lambda folder: (remove("t.trace")(folder), (folder / "t.trace").write_text("x"))[0],
        ("t.trace: ",),
    ),
    "lacks a file": (remove(STORAGES), ("storages.parquet: missing",)),
    "truncated": (edit_file(KERNELS, lambda b: b[:-20]), ("kernels.parquet: not readable",)),
    "empty file": (edit_file(KERNELS, lambda b: b""), ("kernels.parquet: not readable",)),
    "flipped byte": (flip_a_data_byte(KERNELS), ("kernels.parquet: not readable",)),
    "not Parquet": (edit_file(STORAGES, lambda b: b"hello"), ("storages.parquet: not readable",)),
    "newer format": (edit_block(KERNELS, format_version=9), ("kernels.parquet", "version 9")),
    "another kind": (edit_block(KERNELS, kind="timeline"), ("kernels.parquet", "a timeline")),
    "two saves mixed": (swap_in_another_save, ("accesses.parquet: belongs to another save",)),
    "column missing": (
        edit_table(KERNELS, lambda t: t.drop_columns(["op"])),
        ("kernels.parquet", "column op is missing"),
    ),
    "column of another type": (
        edit_table(KERNELS, lambda t: t.set_column(0, "kernel", t.column(0).cast(pa.float64()))),
        ("kernels.parquet", "column kernel must be int"),
    ),
    "metadata field mistyped": (
        set_metadata("t.trace", world_size="two"),
        ("t.trace.world_size: must be int",),
    ),
    "metadata field unknown": (set_metadata("t.trace", mood=1), ("unknown field mood",)),
    "kernels not dense": (
        set_cell("t.trace", "kernels", 2, "kernel", 5),
        ("t.trace: kernels.kernel, row 2",),
    ),
    "negative duration": (
        set_cell("t.trace", "kernels", 2, "duration_seconds", -1.0),
        ("t.trace: kernels.duration_seconds, row 2",),
    ),
    "duration not a number": (
        set_cell("t.trace", "kernels", 2, "duration_seconds", float("nan")),
        ("t.trace: kernels.duration_seconds, row 2",),
    ),
    "unknown phase": (
        set_cell("t.trace", "kernels", 2, "phase", "nap"),
        ("t.trace: kernels.phase, row 2",),
    ),
    "negative size": (
        set_cell("t.trace", "storages", 1, "nbytes", -1),
        ("t.trace: storages.nbytes, row 1",),
    ),
    "size beyond 64 bits in sum": (
        set_cell("t.trace", "storages", 1, "allocated_bytes", 2**62),
        ("t.trace: storages.allocated_bytes",),
    ),
    "death after the last kernel": (
        set_cell("t.trace", "storages", 3, "death", 8),
        ("t.trace: storages.death, row 3",),
    ),
    "two persistent storages of one name": (
        set_cell("t.trace", "storages", 1, "name", "frozen"),
        ("t.trace: storages.name, row 1",),
    ),
    "access of an unknown storage": (
        set_cell("t.trace", "accesses", 0, "storage", 70),
        ("t.trace: accesses.storage, row 0",),
    ),
    "access outside the lifetime": (
        set_cell("t.trace", "accesses", 1, "storage", 3),
        ("t.trace: accesses.kernel, row 1", "lifetime"),
    ),
}


@pytest.mark.parametrize("damage", BROKEN_TRACES)
def test_a_broken_trace_is_refused(folder: Path, damage: str) -> None:
    apply, parts = BROKEN_TRACES[damage]
    apply(folder)
    assert_refused(folder, ("show", "t.trace"), parts)


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "t.trace", "--hardware", "h.toml", "-o", "new.plan"),
        ("simulate", "t.trace", "--hardware", "h.toml", "--timeline", "new.json"),
        ("simulate", "t.trace", "p.plan"),
        ("verify", "t.trace", "p.plan"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_every_command_refuses_a_broken_trace(folder: Path, arguments: tuple[str, ...]) -> None:
    edit_file(KERNELS, lambda content: content[:-20])(folder)
    assert_refused(folder, arguments, ("kernels.parquet: not readable",))


BROKEN_MACHINES: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "neither file nor preset": (remove("h.toml"), ("h.toml: neither a hardware file nor",)),
    "not TOML": (text_edit("[host]", "[host"), ("h.toml: not readable as TOML",)),
    "not text": (edit_file("h.toml", lambda b: b"\xff\xfe\x00"), ("h.toml: not a text file",)),
    "no GPU": (set_machine(gpu=[]), ("h.toml: hardware: needs at least one [[gpu]]",)),
    "GPU that is no list": (set_machine(gpu=3), ("h.toml: gpu: must be a list",)),
    "unknown field": (text_edit("memory_rate", "memory_speed"), ("h.toml: host: unknown field",)),
    "zero rate": (text_edit("read_rate = 2000000.0", "read_rate = 0"), ("h.toml: near.read_rate",)),
    "negative rate": (
        text_edit("read_rate = 2000000.0", "read_rate = -5"),
        ("h.toml: near.read_rate",),
    ),
    "rate without sense": (
        text_edit("read_rate = 2000000.0", 'read_rate = "fast"'),
        ("h.toml: near.read_rate: cannot read 'fast'",),
    ),
    "unknown link": (text_edit('link = "pcie"', 'link = "x"'), ("h.toml: gpu gpu 0.link",)),
    "unreachable GPU index": (text_edit("    1,", "    7,"), ("h.toml: ssd far.gpus",)),
    "infinite latency": (
        text_edit("latency_seconds = 0.0002", "latency_seconds = inf"),
        ("h.toml: near.latency_seconds",),
    ),
}


@pytest.mark.parametrize("damage", BROKEN_MACHINES)
def test_a_broken_machine_is_refused(folder: Path, damage: str) -> None:
    apply, parts = BROKEN_MACHINES[damage]
    apply(folder)
    assert_refused(folder, ("plan", "t.trace", "--hardware", "h.toml", "-o", "new.plan"), parts)
    assert_refused(folder, ("simulate", "t.trace", "--hardware", "h.toml"), parts)


BROKEN_PLANS: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "does not exist": (remove("p.plan"), ("p.plan: no such plan directory",)),
    "is a trace": (swap_in_the_trace, ("p.plan: is a trace, not a plan",)),
    "truncated": (edit_file(MOVES, lambda b: b[:-20]), ("moves.parquet: not readable",)),
    "flipped byte": (flip_a_data_byte(MOVES), ("moves.parquet: not readable",)),
    "lacks a file": (remove("p.plan/copies.parquet"), ("copies.parquet: missing",)),
    "edited without its hash": (
        edit_table(MOVES, lambda t: t.slice(0, 3)),
        ("p.plan: the content does not match its hash",),
    ),
    "metadata field missing": (
        edit_block(MOVES, metadata={"planner": "x"}),
        ("p.plan", "field trace_hash is missing"),
    ),
    "budget mistyped": (
        set_metadata("p.plan", gpu_memory_bytes="all of it"),
        ("p.plan.gpu_memory_bytes: must be int",),
    ),
}
for file in ("kernels", "storages", "accesses", "copies"):
    # The metadata is read from the first file, moves, but must be the same save in all.
    BROKEN_PLANS[f"another hash in {file}"] = (
        edit_block(f"p.plan/{file}.parquet", hash="0"),
        (f"{file}.parquet: belongs to another save",),
    )


@pytest.mark.parametrize("command", ["verify", "simulate"])
@pytest.mark.parametrize("damage", BROKEN_PLANS)
def test_a_broken_plan_is_refused(folder: Path, damage: str, command: str) -> None:
    apply, parts = BROKEN_PLANS[damage]
    apply(folder)
    assert_refused(folder, (command, "t.trace", "p.plan"), parts)


INVALID_PLANS: dict[str, tuple[Callable[[Path], None], str]] = {
    "unknown storage": (set_cell("p.plan", "moves", 5, "storage", 99), "no storage 99"),
    "kernel out of range": (set_cell("p.plan", "moves", 5, "free_by", 99), "free_by"),
    "freed after its prefetch": (set_cell("p.plan", "moves", 5, "free_by", 6), "free_by 6"),
    "unknown device": (set_cell("p.plan", "moves", 5, "device", "tape"), "tape"),
    "wrong size": (set_cell("p.plan", "moves", 5, "nbytes", 1), "nbytes"),
    "hardware unreadable": (set_metadata("p.plan", hardware="gpu = 3"), "gpu"),
    "of another trace": (set_metadata("p.plan", trace_hash="0" * 64), "trace"),
}


@pytest.mark.parametrize("damage", INVALID_PLANS)
def test_a_readable_plan_that_is_wrong_is_an_answer_of_verify(folder: Path, damage: str) -> None:
    """Exit code 1, the answer is no: the file itself can be read."""
    apply, part = INVALID_PLANS[damage]
    apply(folder)
    result = run(folder, "verify", "t.trace", "p.plan", "--json")
    assert result.exit_code == 1, (result.output, result.exception)
    answer = json.loads(result.stdout)
    assert not answer["valid"]
    assert any(part in violation["message"] for violation in answer["violations"])


@pytest.mark.parametrize(
    "damage", ["unknown storage", "kernel out of range", "freed after its prefetch"]
)
def test_a_plan_without_sense_is_not_simulated(folder: Path, damage: str) -> None:
    INVALID_PLANS[damage][0](folder)
    assert_refused(folder, ("simulate", "t.trace", "p.plan"), ("moves.", "row 5"))


def packed(data: object) -> bytes:
    return gzip.compress(json.dumps(data).encode())


BROKEN_FOREIGN_FILES: dict[str, tuple[bytes | None, tuple[str, ...]]] = {
    "does not exist": (None, ("f.json.gz",)),
    "not gzip": (b"hello", ("f.json.gz",)),
    "truncated": (packed({"tensors": []})[:-6], ("f.json.gz",)),
    "not JSON": (gzip.compress(b"hello"), ("f.json.gz",)),
    "not an object": (packed([1, 2]), ("f.json.gz",)),
    "no clock": (packed({"tensors": {}, "kernels": {}}), ("f.json.gz", "clock_hz")),
    "no tensors": (packed({"clock_hz": 1}), ("f.json.gz", "tensors")),
}


@pytest.mark.parametrize("damage", BROKEN_FOREIGN_FILES)
def test_a_broken_foreign_file_is_refused(folder: Path, damage: str) -> None:
    content, parts = BROKEN_FOREIGN_FILES[damage]
    if content is not None:
        (folder / "f.json.gz").write_bytes(content)
    assert_refused(folder, ("import", "g10", "f.json.gz", "-o", "new.trace"), parts)


@pytest.mark.parametrize("name", ["thesis.txt", "t.trace/notes"])
def test_an_output_never_replaces_what_is_not_ours(folder: Path, name: str) -> None:
    (folder / name).write_text("mine")
    target = name.split("/")[0]
    arguments = ("plan", "t.trace", "--hardware", "h.toml", "-o", target)
    assert_refused(folder, arguments, (target,))


def test_an_output_in_a_missing_folder_is_refused_before_any_work(folder: Path) -> None:
    arguments = ("plan", "t.trace", "--hardware", "h.toml", "-o", "none/new.plan")
    assert_refused(folder, arguments, ("none does not exist",))


@pytest.mark.parametrize("option", ["--gpu-memory", "--host-memory"])
def test_a_size_without_sense_is_bad_usage(folder: Path, option: str) -> None:
    before = content_of(folder)
    result = run(folder, "plan", "t.trace", "--hardware", "h.toml", option, "much", "-o", "n.plan")
    assert result.exit_code == 2
    assert option in result.stderr
    assert "cannot read 'much'" in result.stderr
    assert content_of(folder) == before


def test_the_good_folder_passes(folder: Path) -> None:
    """Else all the refusals above might be for another reason."""
    for arguments in (("show", "t.trace"), ("verify", "t.trace", "p.plan")):
        result = run(folder, *arguments)
        assert result.exit_code == 0, (result.output, result.exception)
