"""A GPU's stalls: pauses between kernels, explained by the ends of transfers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from teraio.executor.device_stalls import stalls_between
from teraio.executor.holding import Wait


@dataclass
class Ended:
    """A transfer of which only the end is asked."""

    end_seconds: float


def wait(kernel: int, row: int, cause: str, end: float) -> Wait:
    transfer: Any = Ended(end)
    return Wait(kernel, row, cause, 0.0, 0.0, transfer)


def test_a_pause_is_for_memory_first_then_for_reads() -> None:
    """The kernel waits 10 s: until 4 for memory, until 7 for a read, the rest for the host."""
    waits = [wait(1, 2, "read", 7.0), wait(1, 1, "memory", 4.0)]
    kernels = [(0, 0.0, 1.0), (1, 11.0, 12.0)]
    assert stalls_between(0.0, kernels, waits, [0.0, 0.5]) == [
        Wait(1, 1, "memory", 1.5, 4.0),
        Wait(1, 2, "read", 4.0, 7.0),
    ]


def test_without_gaps_all_of_a_pause_counts() -> None:
    kernels = [(0, 0.0, 1.0), (1, 3.0, 4.0)]
    assert stalls_between(0.0, kernels, [wait(1, 2, "read", 3.0)]) == [Wait(1, 2, "read", 1.0, 3.0)]


def test_the_last_transfer_to_end_is_the_cause() -> None:
    """Whatever the order of the waits; before kernel 0 the pause is from the cut."""
    waits = [wait(0, 1, "read", 2.0), wait(0, 2, "read", 3.0), wait(0, 3, "read", 1.0)]
    assert stalls_between(0.5, [(0, 3.0, 4.0)], waits) == [Wait(0, 2, "read", 0.5, 3.0)]


@pytest.mark.parametrize("end", [0.2, 1.000005, float("nan")])
def test_what_ended_before_a_kernel_could_begin_stalls_nothing(end: float) -> None:
    """A launch is no stall, and of what has no end nothing can be said."""
    kernels = [(0, 0.0, 1.0), (1, 1.5, 2.0)]
    assert stalls_between(0.0, kernels, [wait(1, 1, "memory", end)]) == []


def test_waits_of_unknown_transfers_explain_nothing() -> None:
    kernels = [(0, 0.0, 1.0), (1, 1.5, 2.0)]
    assert stalls_between(0.0, kernels, [Wait(1, 1, "memory", 0.0, 1.0)]) == []
