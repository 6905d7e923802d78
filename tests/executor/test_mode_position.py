"""Where a run is in its plan, what its kernels will create, and how its time adds up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import teraio
from teraio.executor.output_sizes import OutputSizes
from teraio.executor.plan_position import PlanPosition, RunState
from teraio.planner.policies.evict_everything import evict_everything
from teraio.profiler.dispatch import KernelCall, KernelMode


def follow(planned: str, run: str) -> tuple[PlanPosition, list[int | None]]:
    """Operators are letters. The plan's index of each kernel of the run, None for extra ones."""
    schedule: Any = SimpleNamespace(
        ops=list(planned), signatures=[0] * len(planned), num_kernels=len(planned)
    )
    position, places = PlanPosition(schedule), []
    position.state = RunState.FOLLOWING
    for kernel, name in enumerate(run):
        position.compare(kernel, name, 0)
        places.append(kernel + position.shift if position.is_planned else None)
        position.end_kernel()
    return position, places


PLAN = "abcdefghijklmnopqrstuvwxyz"


def test_extra_kernels_take_no_place() -> None:
    """A metric here and there: everything else is where it was."""
    _, places = follow(PLAN, "ab??c?defg")
    assert places == [0, 1, None, None, 2, None, 3, 4, 5, 6]


def test_kernels_left_out() -> None:
    """After eight that follow each other just ahead in the plan, the run is there."""
    position, places = follow(PLAN, PLAN[3:])
    assert places[:7] == [None] * 7
    assert places[7:] == list(range(10, 26))
    assert position.state is RunState.FOLLOWING


def test_drift_and_recognition() -> None:
    """Too many extra kernels: adrift, until eight in a row are known, wherever that is."""
    _, places = follow(PLAN, "abc" + "?" * 40 + PLAN[12:])
    assert places[:3] == [0, 1, 2]
    assert set(places[3 : 3 + 40 + 7]) == {None}
    assert places[3 + 40 + 7 :] == list(range(19, 26))


def test_shapes_are_reported() -> None:
    """The right operator with other shapes stays in place."""
    schedule: Any = SimpleNamespace(ops=["a", "b"], signatures=[1, 2], num_kernels=2)
    position = PlanPosition(schedule)
    assert position.compare(0, "a", 1) == ""  # Cold: nothing is compared.
    position.state = RunState.FOLLOWING
    assert position.compare(0, "a", 5) == "a has other shapes"
    assert position.is_planned
    assert position.compare(0, "a", 1) == ""
    assert position.compare(2, "c", 1) == "c instead of the end"


class Predictions(KernelMode):
    """Predicted against created bytes of every kernel that has just run."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = OutputSizes()
        self.seen: list[tuple[str, int, int, bool]] = []

    def before_kernel(self, call: KernelCall) -> None:
        """Ask while the call has not run."""
        self.prediction = self.sizes.predict(call)

    def after_kernel(self, call: KernelCall) -> None:
        """Compare with what was born."""
        born = sum(state.nbytes for state in call.born if call.flags.get(state) == 2)
        self.seen.append((call.operator.name, *self.prediction[:1], born, self.prediction[1]))


def test_predicted_sizes() -> None:
    """Exact wherever an operator can be asked; factories, resizes, lists and scalars included."""
    x, grid = torch.ones(8, 4), torch.arange(6.0)
    with Predictions() as mode:
        for size in (3, 30, 300):
            torch.zeros(size, size)
            torch.arange(0.0, size / 10, 0.1)
        x.repeat(5, 2)
        x.mul_(1.5)
        torch.add(x, x, out=torch.empty(0))
        torch._foreach_add([x, grid], 1.0)
        torch.empty(10).resize_(1000)
        torch.native_layer_norm(x, [4], None, None, 1e-5)
        for value in range(50):
            x.mul(value + 0.5)
        remembered = len(mode.sizes._known)
        x.nonzero()
    for name, predicted, born, is_guess in mode.seen[:-1]:
        assert (predicted, is_guess) == (born, False), name
    assert mode.seen[-1][3]
    assert remembered < 25


def test_predictions_run_nothing_else() -> None:
    """A higher-order operator is not called with tensors that have no data; a storage is measured,
    not printed.
    """
    calls = []
    sizes = OutputSizes()
    operator: Any = SimpleNamespace(name="region", is_collective=False, positions={})
    call = KernelCall(lambda x: calls.append(x), operator, (torch.ones(10),), {})
    assert sizes.predict(call) == (40, True, ())
    huge = torch.UntypedStorage(10**7)
    given = KernelCall(torch.ops.aten.set_.source_Storage, operator, (torch.empty(0), huge), {})
    assert sizes.predict(given) == (10**7, True, ())
    assert calls == []


@pytest.mark.parametrize("tiers", ["host", "ssd"])
def test_times_add_up(tiers: Any, loop: Any, train: Any, machine: Any) -> None:
    """Six disjoint parts of every kind make the iteration, and no channel is busier than it."""
    training = loop(train)
    plan = evict_everything(training.trace(), machine(), tiers=tiers)
    model, optimizer = training.made()
    with teraio.execute(plan, model, optimizer) as run:
        for number in range(5):
            train(model, optimizer, number)
            metadata = run.timeline.metadata
            parts = [
                metadata.compute_alone_seconds,
                metadata.compute_overlapped_seconds,
                metadata.stall_read_seconds,
                metadata.stall_memory_seconds,
                metadata.stall_host_seconds,
                metadata.gap_seconds,
            ]
            assert min(parts) >= 0
            assert sum(parts) == pytest.approx(metadata.iteration_seconds, rel=1e-9)
            assert all(0 <= share <= 1 for share in metadata.channel_utilisation.values())
    assert metadata.stall_read_seconds > 0
    assert metadata.compute_alone_seconds > 0
    first = run.timeline.events.start_seconds.min()
    assert first >= 0
