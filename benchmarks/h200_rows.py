"""Rows of benchmarks/h200.py: what identifies one, where it is kept, how a process hands it on.

A measured process prints lines for people, and each row as one line ``ROW {...}`` as soon as it is
measured, so that a later crash or a limit of time takes nothing away.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from teraio.profiler.training.setup import OptimizerImplementation, Precision

Row = dict[str, Any]

KEY = ("setting", "contender", "budget_share", "transform")
"""The fields that identify a row; measuring one again replaces it."""

SWAP_FOLDER = "swap"
"""In the output folder: what contenders keep on the disk while they train, removed afterwards."""

_MARK = "ROW "


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained: the same in every line of a table.

    ``exact``: deterministic algorithms, so that losses can be compared bit for bit. ``compiled``:
    each block is a compiled region.
    """

    model: str = "bench-3.4b"
    dtype: Precision = "fp32"
    micro_batch_size: int = 3
    sequence: int = 2048
    optimizer: OptimizerImplementation = "foreach"
    compiled: bool = False
    exact: bool = False
    device: str = "cuda"

    @property
    def title(self) -> str:
        """In a few words, such as ``bench-3.4b, fp32, 3 x 2048 tokens, eager, AdamW foreach``."""
        blocks = "compiled blocks" if self.compiled else "eager"
        exact = ", deterministic algorithms" if self.exact else ""
        return (
            f"{self.model}, {self.dtype}, {self.micro_batch_size} x {self.sequence} tokens, "
            f"{blocks}, AdamW {self.optimizer}{exact}"
        )

    @property
    def name(self) -> str:
        """For files and the command line, such as ``bench-3.4b-fp32-3x2048-foreach-exact``."""
        parts = [self.model, self.dtype, f"{self.micro_batch_size}x{self.sequence}", self.optimizer]
        parts += ["compiled"] * self.compiled + ["exact"] * self.exact
        return "-".join(parts)

    def as_key(self) -> dict[str, Any]:
        """The fields, as they stand in a row."""
        return asdict(self)


class Contender(NamedTuple):
    """What is measured in a setting. ``budget_share``: of the peak without offloading."""

    name: str
    budget_share: float | None = None
    transform: str | None = None

    @property
    def label(self) -> str:
        """For the command line and files, such as ``teraio-0.6-optimizer-in-backward``."""
        share = [] if self.budget_share is None else [f"{self.budget_share:g}"]
        return "-".join([self.name, *share, *([self.transform] if self.transform else [])])

    def key(self, setting: Mapping[str, Any]) -> Row:
        """The identifying fields of its row."""
        values = (dict(setting), self.name, self.budget_share, self.transform)
        return dict(zip(KEY, values, strict=True))


def is_of(row: Mapping[str, Any], key: Mapping[str, Any]) -> bool:
    """Whether a row is the one of this key."""
    return all(row.get(name) == key[name] for name in KEY)


def load_rows(path: Path) -> list[Row]:
    """The rows of a file; none if there is no such file."""
    if not path.exists():
        return []
    rows: list[Row] = json.loads(path.read_text())["rows"]
    return rows


def add_row(rows: Sequence[Row], new: Row) -> list[Row]:
    """The rows with a new one in place of the one of its key, unless only the new one failed."""
    known = [row for row in rows if is_of(row, new)]
    if "failed" in new and any("failed" not in row for row in known):
        return list(rows)
    return [row for row in rows if not is_of(row, new)] + [new]


def save_rows(rows: Sequence[Row], path: Path) -> None:
    """Write beside and swap in, so that an interrupted run leaves a whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps({"rows": list(rows)}, indent=1) + "\n")
    temporary.replace(path)


def boot_id() -> str:
    """Which start of which machine this is: what was measured since then is of this very one."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else "unknown"


def kept_ideal(path: Path) -> float | None:
    """Seconds of a step without a plan, of a file of :mod:`h200_plain` made since this machine was
    started; None if there is no such file.
    """
    plain = json.loads(path.read_text()) if path.exists() else {"boot": None}
    if plain["boot"] != boot_id() or not plain["window"]:
        return None
    return float(plain["window"]["step_seconds"])


def emit(contender: Contender, found: Mapping[str, Any]) -> None:
    """Hand a measured row to the process that waits for it."""
    print(_MARK + json.dumps({"of": list(contender), "found": dict(found)}), flush=True)


def say(text: str) -> None:
    """A line for people, at once."""
    print(text, flush=True)


def run_apart(
    script: Path,
    order: Mapping[str, Any],
    *,
    timeout_seconds: float,
    on_row: Callable[[Contender, Row], None],
) -> str | None:
    """Run a script on an order in a process of its own; None, or why it ended early.

    Its rows are handed to ``on_row`` as they come, its other lines are printed. At the limit it is
    ended; compilers that it started end by themselves. It stays in the caller's process group, so
    that what ends the caller ends it too.
    """
    child = subprocess.Popen(
        [sys.executable, "-u", str(script), json.dumps(order)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    timed_out = threading.Event()

    def end() -> None:
        timed_out.set()
        child.kill()

    timer = threading.Timer(timeout_seconds, end)
    timer.start()
    try:
        last_line = _pass_on(child, on_row)
        code = child.wait()
    finally:
        timer.cancel()
        if child.poll() is None:
            child.kill()
            child.wait()
    if timed_out.is_set():
        return f"stopped after {timeout_seconds:g} s"
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return last_line or f"exit code {code}" if code else None


def _pass_on(child: subprocess.Popen[str], on_row: Callable[[Contender, Row], None]) -> str:
    """Print and parse what the child says; its last line, which names the error if it failed."""
    last_line = ""
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith(_MARK):
            message = json.loads(line.removeprefix(_MARK))
            on_row(Contender(*message["of"]), message["found"])
        else:
            print(f"    {line}", end="", flush=True)
            last_line = line.strip() or last_line
    return last_line
