"""What a benchmark has found so far, in a file: a killed run loses nothing, the next goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

Value = TypeVar("Value")


class Findings:
    """Named values, written to a JSON file with every one that is added; without one only kept.

    What the file holds already counts as found, unless it is of another ``subject`` (options that
    decide what is measured): then it starts anew.
    """

    def __init__(self, path: Path | None, subject: Mapping[str, Any]) -> None:
        self._path = path
        self.values: dict[str, Any] = {}
        # As the file has it: tuples are lists there.
        subject = json.loads(json.dumps(dict(subject), default=str))
        if path is not None and path.exists():
            found = json.loads(path.read_text())
            if found.get("subject") == subject:
                self.values = found
        self.values["subject"] = subject

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def get(self, name: str, default: Any) -> Any:
        """The value of this name, or the default."""
        return self.values.get(name, default)

    def add(self, name: str, value: Any) -> None:
        """Note a value, in place of an earlier one of this name, and write the file."""
        self.values[name] = value
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_name(self._path.name + ".part")
        temporary.write_text(json.dumps(self.values, indent=1, default=str) + "\n")
        temporary.replace(self._path)

    def find(self, name: str, measure: Callable[[], Value]) -> Value:
        """The value of this name: an earlier run's, else measured now and added."""
        if name not in self.values:
            self.add(name, measure())
        found: Value = self.values[name]
        return found


def kept(path: Path | None, load: Callable[[Path], Value], make: Callable[[], Value]) -> Value:
    """What lies at ``path``, else made now and saved there (``.save``); None keeps nothing."""
    if path is not None and path.exists():
        return load(path)
    made = make()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        made.save(path)  # type: ignore[attr-defined]
    return made
