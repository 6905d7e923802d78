"""The timing file: how long each distinct call took on a real GPU, once for all traces.

One readable JSON file. Entries are found by operator, arguments without what does not change the
work (:func:`teraio.profiler.costs.arguments.mask_arguments`), and whether products ran in TF32.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from teraio.contracts.output import replacing_file
from teraio.errors import InputError
from teraio.profiler.costs.arguments import mask_arguments, product_precision
from teraio.traces.trace import Calls

_FORMAT = "teraio timings"
_VERSION = 1

Key = tuple[str, str, str]
"""Operator, masked arguments, ``tf32`` or the empty text."""


def timing_key(op: str, arguments: str, precision: str) -> Key:
    """Where a call's timing is found; ``arguments`` as in the calls table."""
    return op, mask_arguments(arguments), product_precision(op, arguments, precision)


def keys_of(calls: Calls, precision: str) -> Iterator[tuple[Key, int]]:
    """What each call is found by in a timing file, with its row."""
    for row, (op, text) in enumerate(zip(calls.op.tolist(), calls.arguments.tolist(), strict=True)):
        yield timing_key(op, text, precision), row


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """One call's times.

    ``seconds``: what it takes on the device within a queue of kernels. ``host_seconds``: what the
    host needs to launch it. ``workspace_bytes``: scratch that it holds while it runs.
    """

    op: str
    arguments: str
    precision: str
    seconds: float
    host_seconds: float
    workspace_bytes: int

    @property
    def key(self) -> Key:
        """What it is found by."""
        return self.op, self.arguments, self.precision


@dataclass(frozen=True, kw_only=True)
class TimedMachine:
    """What the times hold for.

    ``host_seconds_per_kernel``: how fast the host feeds the GPU, Python between the kernels
    included, measured over the training of a small model; 0 if unknown.
    """

    gpu: str
    torch_version: str
    cuda_version: str = ""
    driver_version: str = ""
    clocks: str = ""
    teraio_version: str = ""
    method: str = ""
    host_seconds_per_kernel: float = 0.0

    def describe(self) -> str:
        """GPU and torch, in a few words."""
        return f"{self.gpu} (torch {self.torch_version})"


@dataclass(frozen=True)
class Timings:
    """Times of distinct calls on one machine; no two entries are of the same call."""

    machine: TimedMachine
    entries: tuple[Timing, ...] = ()

    @cached_property
    def _by_key(self) -> dict[Key, Timing]:
        return {entry.key: entry for entry in self.entries}

    def __len__(self) -> int:
        return len(self.entries)

    def find(self, op: str, arguments: str, precision: str) -> Timing | None:
        """The timing of a call of the calls table, or None."""
        return self.get(timing_key(op, arguments, precision))

    def get(self, key: Key) -> Timing | None:
        """The timing of this key, or None."""
        return self._by_key.get(key)

    def merge(self, entries: Iterable[Timing]) -> Timings:
        """These and the new ones; where both have a call, the new one counts."""
        merged = {**self._by_key, **{entry.key: entry for entry in entries}}
        return Timings(self.machine, tuple(merged.values()))

    def check_machine(self, machine: TimedMachine, file: str = "timings") -> None:
        """Raise InputError unless they were taken on such a machine: others differ in every row."""
        if (self.machine.gpu, self.machine.torch_version) != (machine.gpu, machine.torch_version):
            raise InputError(
                f"{file}: was timed on {self.machine.describe()}, but this is "
                f"{machine.describe()}; write to another file"
            )

    def save(self, path: str | Path) -> None:
        """Write the file, atomically; one line per entry."""
        lines = [json.dumps(_entry_to_json(entry), sort_keys=True) for entry in self.entries]
        head = {"format": _FORMAT, "version": _VERSION, "machine": asdict(self.machine)}
        text = json.dumps(head, indent=1).removesuffix("\n}") + ',\n "entries": [\n  '
        with replacing_file(Path(path)) as temporary:
            temporary.write_text(text + ",\n  ".join(lines) + "\n ]\n}\n")

    @classmethod
    def load(cls, path: str | Path) -> Timings:
        """Read a file. Raises InputError that names it and what is wrong."""
        try:
            data = json.loads(Path(path).read_text())
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from None
        except ValueError:
            raise InputError(f"{path}: not a timing file (no JSON)") from None
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise InputError(f"{path}: not a timing file of teraio")
        if data.get("version") != _VERSION:
            raise InputError(f"{path}: version {data.get('version')}; this teraio reads {_VERSION}")
        entries = data.get("entries")
        if not isinstance(entries, list):
            raise InputError(f"{path}: entries must be a list")
        machine = _machine_from_json(data.get("machine"), str(path))
        rows = tuple(_entry_from_json(e, f"{path}: entry {i}") for i, e in enumerate(entries))
        return cls(machine, rows)


def as_timings(timings: Timings | str | Path | None) -> Timings | None:
    """The value itself, or what is saved at a path."""
    return Timings.load(timings) if isinstance(timings, (str, Path)) else timings


def _entry_to_json(entry: Timing) -> dict[str, Any]:
    return {**asdict(entry), "arguments": json.loads(entry.arguments)}


def _entry_from_json(data: Any, where: str) -> Timing:
    values = _checked(Timing, data, where, but="arguments")
    numbers = ("seconds", "host_seconds", "workspace_bytes")
    for name in numbers:
        value = values[name]
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0:
            raise InputError(f"{where}: {name} must be a number of at least 0, got {value!r}")
    if not isinstance(values["workspace_bytes"], int):
        raise InputError(f"{where}: workspace_bytes must be an integer")
    if not isinstance(values["arguments"], dict):
        raise InputError(f"{where}: arguments must be an object")
    values["arguments"] = mask_arguments(json.dumps(values["arguments"]))
    return Timing(**values)


def _machine_from_json(data: Any, file: str) -> TimedMachine:
    values = _checked(TimedMachine, data, f"{file}: machine")
    pace = values["host_seconds_per_kernel"]
    if not isinstance(pace, (int, float)) or not math.isfinite(pace) or pace < 0:
        raise InputError(f"{file}: machine: host_seconds_per_kernel must be a number, got {pace!r}")
    return TimedMachine(**values)


def _checked(
    kind: type[Timing] | type[TimedMachine], data: Any, where: str, but: str = ""
) -> dict[str, Any]:
    """The fields of a dataclass from JSON: all there, none unknown, texts where texts belong.

    ``but``: a field whose type the caller checks.
    """
    if not isinstance(data, Mapping):
        raise InputError(f"{where}: must be an object")
    known = {f.name: f for f in fields(kind)}
    for name in known:
        if name not in data:
            raise InputError(f"{where}: {name} is missing")
    for name, value in data.items():
        if name not in known:
            raise InputError(f"{where}: unknown field {name}; written by a newer teraio?")
        if name != but and known[name].type == "str" and not isinstance(value, str):
            raise InputError(f"{where}: {name} must be a text, got {value!r}")
    return dict(data)
