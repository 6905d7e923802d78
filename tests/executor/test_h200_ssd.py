"""The benchmark of the SSD tier: what it says before and after a run, and when it stops."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Plan
from teraio.executor.report import RunReport
from teraio.executor.stores import FileUse
from teraio.traces.trace import Trace
from teraio.units import format_seconds

if TYPE_CHECKING:
    from benchmarks import h200_ssd
else:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
    import h200_ssd

    sys.path.remove(str(Path(__file__).resolve().parents[2] / "benchmarks"))


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What it tells people."""
    lines: list[str] = []
    monkeypatch.setattr(h200_ssd, "say", lines.append)
    return lines


def options(**changed: Any) -> argparse.Namespace:
    """Of the command line."""
    given = {"share": 0.9, "checked_steps": 40, "checked_seconds": math.inf}
    return argparse.Namespace(**(given | changed))


def checked(monkeypatch: pytest.MonkeyPatch, seconds_each: float, **changed: Any) -> dict[str, Any]:
    """A checked run whose steps take so long, on a clock of their own."""
    clock = SimpleNamespace(now=0.0)

    def step(number: int) -> float:
        clock.now += seconds_each
        return 10.0 - number

    def execute(
        plan: Any, setting: Any, options: Any, use: Callable[[Any], Any], **more: Any
    ) -> tuple[Any, Any]:
        assert more == {"verify_transfers": True}
        return SimpleNamespace(verified_reads=7), use(step)

    monkeypatch.setattr(h200_ssd, "execute", execute)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    plan, setting = cast(Any, None), h200_ssd.TOY
    return h200_ssd.checked(plan, 0.5, setting, options(**changed))


def test_a_checked_run_ends_in_time(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    """Steps of 2 s: the 13th is the last one that begins within 25 s, and all 13 count."""
    found = checked(monkeypatch, 2.0, checked_seconds=25.0)
    assert found["losses"] == [10.0 - number for number in range(13)]
    assert found["verified_reads"] == 7
    assert said == [
        "40 checked steps need 20 s and what checking takes",
        "10 checked steps, 2.00 s each; all need 60 s more",
    ]


def test_a_checked_run_without_a_limit_does_all(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    assert len(checked(monkeypatch, 2.0)["losses"]) == 40
    assert said[-1] == "40 checked steps, 2.00 s each; all need 0 s more"


def test_one_checked_step_is_enough(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    found = checked(monkeypatch, 100.0, checked_seconds=1.0)
    assert (found["losses"], found["resident_grown_bytes"]) == ([10.0], 0)
    assert len(said) == 1


def test_rates_of_the_run_stand_beside_those_probed(said: list[str]) -> None:
    """By device; a file that was not read has no rate."""
    hardware = Hardware.preset("cpu")
    ssd = replace(hardware.ssd[0], read_rate=1.6e9, write_rate=2.0e9)
    uses = [
        FileUse(ssd.name, "/disk", "file", 19 * 10**8, 1.0, 58 * 10**8, 2.0),
        FileUse(ssd.name, "/other", "file", 0, 0.0, 10**9, 1.0),
    ]
    report = cast(RunReport, SimpleNamespace(ssd_files=uses))
    h200_ssd.say_rates(report, replace(hardware, ssd=(ssd,)))
    first, other = said
    assert first == (
        f"{ssd.name} in /disk, file: read 1.90 GB/s (probed 1.60 GB/s), written 2.90 GB/s "
        "(probed 2.00 GB/s)"
    )
    assert other == (
        f"{ssd.name} in /other, file: read nothing, written 1.00 GB/s (probed 2.00 GB/s)"
    )


def test_the_prediction_is_by_the_hardware_that_was_probed(
    small_plan: Plan, small_trace: Trace, small_hardware: Hardware, said: list[str]
) -> None:
    """Not by that which the plan was made for, perhaps on another day."""
    near, far = small_hardware.ssd
    slow = replace(near, read_rate=1e5, write_rate=1e5, duplex_read_rate=1e5, duplex_write_rate=1e5)
    probed = replace(small_hardware, ssd=(slow, far))
    planned_for = h200_ssd.predict(small_plan, small_trace, small_hardware, options(share=1.0))
    predicted = h200_ssd.predict(small_plan, small_trace, probed, options(share=1.0))
    assert predicted.iteration_seconds > 2 * planned_for.iteration_seconds
    assert "near as probed: reads and writes 100 kB/s and 100 kB/s, at once" in said[-3]
    assert said[-1].startswith(f"predicted {format_seconds(predicted.iteration_seconds)} a step")


def test_parts_are_clocked(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    times = iter([3.0, 10.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    assert h200_ssd.clocked("probe", lambda: 42)() == 42
    assert said == ["probe begins", "probe took 7.5 s"]
