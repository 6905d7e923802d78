"""How long a plan is played until what is reserved for it is known."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from teraio.contracts.plan import Plan
from teraio.simulator import reserved_memory
from teraio.simulator.reserved_memory import predict_reserved_memory


@pytest.fixture
def growing(monkeypatch: pytest.MonkeyPatch) -> Callable[[set[int]], list[int]]:
    """Let memory grow by a byte in the iterations of these numbers; those that are played."""

    def let_grow(numbers: set[int]) -> list[int]:
        iterations: list[int] = []

        class Growing:
            def __init__(self, *_: Any) -> None:
                self.allocator = SimpleNamespace(
                    allocated_peak_bytes=0, reserved_peak_bytes=0, reserved_bytes=0
                )
                self.moved_bytes = 0

            def iteration(self) -> None:
                self.allocator.reserved_bytes += len(iterations) in numbers
                self.allocator.reserved_peak_bytes = self.allocator.reserved_bytes
                iterations.append(len(iterations))

        monkeypatch.setattr(reserved_memory, "_Played", Growing)
        return iterations

    return let_grow


@pytest.mark.parametrize(
    ("numbers", "num_played"),
    [({0}, 6), (set(), 5), ({0, 4, 9}, 15), (set(range(100)), 24)],
)
def test_until_nothing_has_grown_for_long(
    growing: Callable[[set[int]], list[int]],
    small_plan: Plan,
    numbers: set[int],
    num_played: int,
) -> None:
    """Blocks come to lie a little otherwise each time: room may be missing after many iterations,
    under plans with parameters that step in the backward pass after twenty.
    """
    iterations = growing(numbers)
    found = predict_reserved_memory(small_plan)
    assert len(iterations) == num_played
    assert found.reserved_bytes == len(numbers & set(iterations))


def test_as_many_as_asked_for(growing: Callable[[set[int]], list[int]], small_plan: Plan) -> None:
    """Whatever grows or does not."""
    iterations = growing({0})
    predict_reserved_memory(small_plan, 9)
    assert len(iterations) == 9
