"""Training without a plan in benchmarks/h200.py: its speed, and the losses that plans must give.

Measured once on a machine and kept in the output folder: its speed holds until that machine is
started anew, its losses wherever GPU and versions are the same.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.h200_figures import memory_text
    from benchmarks.h200_rows import Setting, boot_id, say
    from benchmarks.h200_training import (
        HostMemory,
        Trainee,
        checksum,
        forget_memory,
        made_on,
        peaks,
        run_exactly,
        run_window,
    )
else:  # A script's own folder is on its path, the repository's root is not.
    from h200_figures import memory_text
    from h200_rows import Setting, boot_id, say
    from h200_training import (
        HostMemory,
        Trainee,
        checksum,
        forget_memory,
        made_on,
        peaks,
        run_exactly,
        run_window,
    )

from teraio.units import format_seconds


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Iterations of a run: ``exact`` ones first, with deterministic algorithms, whose losses are
    compared bit by bit; then ``warm_up`` and ``timed`` ones as the setting has them.
    """

    exact: int
    warm_up: int
    timed: int


@dataclass(frozen=True, kw_only=True)
class Plain:
    """Training without a plan.

    ``exact_losses``: those of the exact steps, from the first weights on; ``exact_seconds`` of one
    such step; ``exact_checksum`` that of the parameters after them. ``window``: the timed steps, as
    a row has them, empty if they were not run; ``losses`` and ``checksum``: of all of it.
    ``runs_agree``: whether a second run was the same to the bit, None if there was none.
    """

    boot: str
    made_on: str
    exact_losses: list[float]
    exact_seconds: float | None
    exact_checksum: int
    window: dict[str, Any]
    losses: list[float]
    checksum: int
    memory: dict[str, int]
    runs_agree: bool | None

    @property
    def step_seconds(self) -> float:
        """The ideal."""
        seconds: float = self.window["step_seconds"]
        return seconds

    def as_row(self) -> dict[str, Any]:
        """The figures of the ideal's row."""
        more = {"runs_agree": self.runs_agree, "boot": self.boot}
        return self.window | self.memory | more | {"exact_step_seconds": self.exact_seconds}

    def save(self, path: Path) -> None:
        """Keep it for later commands."""
        path.write_text(json.dumps(asdict(self), indent=1))

    def agrees(self, other: Plain, exact: int, *, whole: bool) -> bool:
        """Whether the exact steps were the same, or with ``whole`` the whole runs."""
        if whole:
            return are_same(self.losses, other.losses) and self.checksum == other.checksum
        return (
            are_same(self.exact_losses[:exact], other.exact_losses[:exact])
            and self.exact_checksum == other.exact_checksum
        )


def load_plain(path: Path) -> Plain | None:
    """What an earlier command kept there, if any."""
    return Plain(**json.loads(path.read_text())) if path.exists() else None


class PlainTraining:
    """Runs without a plan, as few as are needed beside what an earlier command has kept."""

    def __init__(self, setting: Setting, steps: Steps, kept: Plain | None) -> None:
        self._setting = setting
        self._steps = steps
        same_place = kept is not None and kept.made_on == made_on(setting.device)
        self._kept = kept if same_place else None
        self._again: Plain | None = None

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to run."""
        kept = self._kept
        return kept is not None and kept.boot == boot_id() and not self._lacks_losses

    @property
    def _lacks_losses(self) -> bool:
        kept = self._kept
        if kept is None or self._setting.exact:
            return kept is None or len(kept.losses) < self._num_steps
        return len(kept.exact_losses) < self._steps.exact

    @property
    def _num_steps(self) -> int:
        return self._steps.exact + self._steps.warm_up + self._steps.timed

    @property
    def _is_compared(self) -> bool:
        return self._steps.exact > 0 or self._setting.exact

    def run_for_comparison(self) -> None:
        """The run whose speed does not matter: it may share the machine with other work."""
        if self._is_compared and self._lacks_losses:
            steps = self._steps if self._setting.exact else replace(self._steps, warm_up=0, timed=0)
            self._again = self._run(steps)

    def run(self) -> Plain:
        """The timed run, or what was kept of it; whether both runs agree."""
        kept, again = self._kept, self._again
        if kept is not None and self.is_complete:
            say(f"ideal {format_seconds(kept.step_seconds)}, measured before on this machine")
            return kept
        if kept is not None and not self._lacks_losses and not self._setting.exact:
            timed = self._run(replace(self._steps, exact=0))
            timed = replace(
                timed,
                exact_losses=kept.exact_losses,
                exact_seconds=kept.exact_seconds,
                exact_checksum=kept.exact_checksum,
                runs_agree=kept.runs_agree,
            )
        else:
            timed = self._run(self._steps)
        if again is not None:
            agree = timed.agrees(again, self._steps.exact, whole=self._setting.exact)
            say(f"two plain runs agree bit for bit: {agree}")
            timed = replace(timed, runs_agree=agree)
        say(f"ideal {format_seconds(timed.step_seconds)} {memory_text(timed.memory)}")
        return timed

    def _run(self, steps: Steps) -> Plain:
        device = self._setting.device
        forget_memory(device)
        host = HostMemory()
        trainee = Trainee(self._setting)
        exact_losses, exact_seconds = run_exactly(trainee.step, steps.exact, device)
        exact = [float(loss) for loss in exact_losses]
        exact_checksum = checksum(trainee.model) if steps.exact else 0
        window: dict[str, Any] = {}
        losses = exact
        if steps.timed:
            measured = run_window(trainee.step, steps.warm_up, steps.timed, device, steps.exact)
            window = measured.as_row()
            losses = exact + window["losses"]
        return Plain(
            boot=boot_id(),
            made_on=made_on(device),
            exact_losses=exact,
            exact_seconds=exact_seconds,
            exact_checksum=exact_checksum,
            window=window,
            losses=losses,
            checksum=checksum(trainee.model),
            memory=peaks(device) | host.as_row(),
            runs_agree=None,
        )


def are_same(losses: Sequence[float], others: Sequence[float]) -> bool:
    """Whether they have the same bits, also where a loss is not a number."""
    return [float(x).hex() for x in losses] == [float(x).hex() for x in others]
