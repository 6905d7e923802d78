"""Host memory that a run would take and the machine does not have."""

from __future__ import annotations

from typing import Any

import pytest

import teraio
from teraio.errors import InputError
from teraio.executor import host_room
from teraio.executor.host_room import host_bytes_to_take
from teraio.executor.probing import limits

GIB = 2**30


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what the machine says that it has, and lets nothing grow."""

    def set_available(nbytes: int) -> None:
        for module in (host_room, limits):
            monkeypatch.setattr(module, "available_memory_bytes", lambda: nbytes)
        defaults: Any = limits.check_memory_by_touching.__kwdefaults__
        monkeypatch.setitem(defaults, "patience_seconds", 0.0)

    return set_available


def test_what_a_run_takes(available: Any) -> None:
    """All of its budget; less where only the plan says so much, but never less than it needs."""
    available(100 * GIB)
    assert host_bytes_to_take(80 * GIB, 10 * GIB, is_given=True) == 80 * GIB
    assert host_bytes_to_take(256 * GIB, 10 * GIB, is_given=False) == 90 * GIB
    available(10 * GIB)
    assert host_bytes_to_take(256 * GIB, 1 * GIB, is_given=False) == 9 * GIB


def test_what_is_not_there(available: Any) -> None:
    """Is refused before anything is taken."""
    available(1 * GIB)
    with pytest.raises(
        InputError, match=r"needs 85\.9 GB, this machine has 0 B to give; ask for less"
    ):
        host_bytes_to_take(80 * GIB, 10 * GIB, is_given=True)
    with pytest.raises(InputError, match=r"needs 10\.7 GB"):
        host_bytes_to_take(80 * GIB, 10 * GIB, is_given=False)


def test_a_plan_for_a_larger_machine(case: Any, machine: Any, available: Any) -> None:
    """Runs where what it needs is there, though not the budget it was made for."""
    trace = case().trace()
    hardware = machine(gpu_memory=int(0.7 * trace.peak_allocated_bytes), host_memory="256GB")
    plan = teraio.plan(trace, hardware, planner="greedy")
    available(64 * 2**20)
    outcome, report = case().executed(plan)
    outcome.assert_same(case().plain())
    assert report.moves_found > 0
    with pytest.raises(InputError, match="needs 256 GB"):
        case().executed(plan, host_memory="256GB")
