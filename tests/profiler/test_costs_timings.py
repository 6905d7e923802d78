"""The timing file: written, read again, merged, and refused where it is not what it should be."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from teraio.errors import InputError
from teraio.profiler.costs.timings import TimedMachine, Timing, Timings, as_timings, timing_key

MACHINE = TimedMachine(
    gpu="NVIDIA H200", torch_version="2.11.0", clocks="1980 MHz", host_seconds_per_kernel=1e-5
)
MATRIX = '{"args":[{"tensor":["float32",[4,4],[4,1],0]}],"kwargs":{}}'
SCALED = '{"args":[{"tensor":["float32",[4,4],[4,1],0]},{"float":%s}],"kwargs":{}}'


def timing(op: str, arguments: str, precision: str, seconds: float) -> Timing:
    """An entry as timing makes it."""
    key = timing_key(op, arguments, precision)
    return Timing(
        op=key[0],
        arguments=key[1],
        precision=key[2],
        seconds=seconds,
        host_seconds=1e-6,
        workspace_bytes=512,
    )


@pytest.fixture
def timings() -> Timings:
    """One product, in fp32, and one other kernel."""
    entries = (
        timing("aten.mm.default", MATRIX, "fp32", 2e-3),
        timing("aten.mul.Tensor", SCALED % 0.5, "fp32", 1e-4),
    )
    return Timings(MACHINE, entries)


def test_a_file_gives_back_what_was_written(timings: Timings, tmp_path: Path) -> None:
    path = tmp_path / "h200.timings"
    timings.save(path)
    assert Timings.load(path) == timings
    assert as_timings(path) == as_timings(timings) == timings
    assert as_timings(None) is None
    Timings(MACHINE).save(path)
    assert Timings.load(path) == Timings(MACHINE)


def test_the_file_is_readable_one_entry_a_line(timings: Timings, tmp_path: Path) -> None:
    path = tmp_path / "h200.timings"
    timings.save(path)
    text = path.read_text()
    assert json.loads(text)["machine"]["gpu"] == "NVIDIA H200"
    assert sum("host_seconds" in line and "op" in line for line in text.splitlines()) == 2


def test_a_timing_is_found_whatever_its_floats(timings: Timings) -> None:
    found = timings.find("aten.mul.Tensor", SCALED % 0.125, "bf16")
    assert found is not None
    assert found.seconds == 1e-4
    assert timings.find("aten.mul.Tensor", SCALED % 0.0, "bf16") is None
    assert timings.find("aten.mul.Tensor", MATRIX, "bf16") is None
    assert timings.find("aten.add.Tensor", SCALED % 0.5, "bf16") is None


def test_products_in_tf32_are_entries_of_their_own(timings: Timings) -> None:
    assert timings.find("aten.mm.default", MATRIX, "bf16") is not None
    assert timings.find("aten.mm.default", MATRIX, "tf32") is None
    merged = timings.merge([timing("aten.mm.default", MATRIX, "tf32", 5e-4)])
    found = merged.find("aten.mm.default", MATRIX, "tf32")
    assert found is not None
    assert found.seconds == 5e-4
    assert len(merged) == 3


def test_merging_keeps_what_is_there_and_prefers_what_is_new(timings: Timings) -> None:
    merged = timings.merge([timing("aten.mm.default", MATRIX, "fp32", 9.0)])
    assert [entry.seconds for entry in merged.entries] == [9.0, 1e-4]
    assert [entry.seconds for entry in timings.entries] == [2e-3, 1e-4]


@pytest.mark.parametrize("other", [{"gpu": "NVIDIA L40S"}, {"torch_version": "2.13.0"}])
def test_times_of_different_machines_do_not_mix(timings: Timings, other: dict[str, Any]) -> None:
    timings.check_machine(replace(MACHINE, clocks="1600 MHz"))
    with pytest.raises(InputError, match="write to another file"):
        timings.check_machine(replace(MACHINE, **other), "h200.timings")


def test_what_others_wrote_is_not_replaced(timings: Timings, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("mine")
    with pytest.raises(InputError, match="was not written by teraio"):
        timings.save(path)
    assert path.read_text() == "mine"


def _set(where: str, name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        (data["entries"][0] if where == "entry" else data[where])[name] = value

    return change


def _pop(where: str, name: str) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        (data["entries"][0] if where == "entry" else data).pop(name)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format="other"), "not a timing file of teraio"),
        (lambda d: d.update(version=9), "version 9; this teraio reads 1"),
        (lambda d: d.update(entries={}), "entries must be a list"),
        (lambda d: d.update(machine=[]), "machine: must be an object"),
        (lambda d: d.update(entries=[3]), "entry 0: must be an object"),
        (_pop("", "machine"), "machine: must be an object"),
        (_set("machine", "gpu", 3), "machine: gpu must be a text"),
        (_set("machine", "host_seconds_per_kernel", -1), "host_seconds_per_kernel"),
        (_set("machine", "host_seconds_per_kernel", "1"), "host_seconds_per_kernel"),
        (_set("machine", "future", 1), "machine: unknown field future"),
        (_pop("entry", "seconds"), "entry 0: seconds is missing"),
        (_set("entry", "seconds", -1.0), "entry 0: seconds must be a number"),
        (_set("entry", "seconds", None), "entry 0: seconds must be a number"),
        (_set("entry", "host_seconds", True), "entry 0: host_seconds must be a number"),
        (_set("entry", "workspace_bytes", 0.5), "entry 0: workspace_bytes must be an integer"),
        (_set("entry", "arguments", "{}"), "entry 0: arguments must be an object"),
        (_set("entry", "op", None), "entry 0: op must be a text"),
        (_set("entry", "color", "red"), "entry 0: unknown field color"),
    ],
)
def test_each_fault_of_a_file_is_named(
    timings: Timings, tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    path = tmp_path / "broken.timings"
    timings.save(path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match=message) as error:
        Timings.load(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "seconds: 3", "\ufffe"])
def test_other_files_are_no_timing_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other"
    path.write_text(text)
    with pytest.raises(InputError, match="not a timing file"):
        Timings.load(path)


def test_a_file_that_is_not_there_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.timings: cannot be read"):
        Timings.load(tmp_path / "none.timings")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00teraio")
    with pytest.raises(InputError, match="not a timing file"):
        Timings.load(binary)
