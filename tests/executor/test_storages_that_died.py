"""Storages that die where somebody still speaks of them: viewed before, listed, or noted twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.executor.allocator_chaos import ROWS, Chaos
from tests.executor.test_residency import KIB, Bench

from teraio.errors import StoreError
from teraio.executor.execution import RunReport
from teraio.executor.holding import Buried, Holding
from teraio.executor.placement import Placement
from teraio.executor.storage_memory import StorageMemory

Survives = Callable[..., RunReport]


@pytest.fixture
def bench() -> Iterator[Bench]:
    """One bench, closed afterwards."""
    made = Bench()
    yield made
    made.tiers.close()


class Dropping(torch.optim.SGD):
    """Looks at each gradient after its last kernel, and drops it."""

    def step(self, closure: Any = None) -> Any:
        """Plain gradient descent."""
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-0.01)
                    parameter.grad.view(-1)
                    parameter.grad = None


def test_viewed_and_dropped_before_an_iteration_ends(
    loop: Any, layers: Any, survives: Survives, train: Any
) -> None:
    """The next iteration's first kernel names it, though its death is accounted for by then."""

    def build() -> Any:
        model = layers()
        return model, Dropping(model.parameters(), lr=0.01)

    survives(loop(train, build=build))


def test_made_elsewhere_viewed_and_dropped(
    loop: Any, survives: Survives, train: Any, batch: Any
) -> None:
    """What the kernel before an iteration's end has not seen was born and has died all the same."""

    def look(optimizer: Any, *_: Any) -> None:
        # As of a data loader: no dispatch mode sees where it comes from.
        with torch._C._DisableTorchDispatch():
            made = torch.ones(4096)
        made.view(-1)

    def step(model: Any, optimizer: Any, number: int) -> float:
        handle = optimizer.register_step_post_hook(look)
        try:
            return float(train(model, optimizer, number))
        finally:
            handle.remove()

    survives(loop(step), is_counted_late=True)


def test_resized_twice_between_kernels(
    loop: Any, survives: Survives, train: Any, batch: Any
) -> None:
    """The size in between was never anybody's: to evict it would take what lies there now."""

    def step(model: Any, optimizer: Any, number: int) -> float:
        scratch = batch(number) * 2
        storage = scratch.untyped_storage()
        nbytes = storage.nbytes()
        storage.resize_(16 * nbytes)
        storage.resize_(nbytes)
        scratch.copy_(batch(number))
        loss = float(train(model, optimizer, number))
        return loss + float(scratch.sum())

    survives(loop(step), is_counted_late=True)


def test_a_ghost_is_not_accounted_for(bench: Bench) -> None:
    """It has the row that it played, never leaves, and its state does not keep it."""
    tensor, holding = bench.add(16)
    other, other_holding = bench.add(16)
    residency, state = bench.residency, holding.state
    holding.row = 7
    # From now on an order is kept, in which two of the same storage cannot be compared.
    assert residency.order.pop(residency.holdings(), ()) is not None
    del tensor
    residency.bury()
    ghost = residency.adopt(state)
    assert (ghost.row, ghost.is_dead, ghost.must_stay) == (7, True, True)
    assert state.attachment == Buried(7)
    residency.require((ghost, other_holding))
    for one in (ghost, residency.adopt(state), holding):
        residency.order.note_use(one)
    assert list(residency.holdings()) == [other_holding]
    bench.assert_books()
    assert other.nbytes == 16 * KIB


def test_dead_before_it_was_accounted_for(bench: Bench) -> None:
    """Nothing would ever take back what were counted for it."""
    tensor = torch.ones(16 * KIB, dtype=torch.uint8)
    state, _ = bench.registry.find_or_add(tensor, lambda: (0, 0, 0), is_foreign=True)
    assert state is not None
    del tensor
    assert bench.residency.adopt(state).is_dead
    assert not bench.residency.holdings()
    bench.assert_books()


def test_a_death_that_is_noted_twice_counts_once(bench: Bench) -> None:
    """Before and after it was accounted for."""
    _kept, _ = bench.add(16)
    tensor, holding = bench.add(16)
    del tensor
    bench.residency.note_death(holding.state)
    bench.assert_books()
    bench.residency.note_death(holding.state)
    bench.assert_books()


class Collecting(StorageMemory):
    """Python collects garbage while memory is allocated, and the account is brought up to date."""

    def __init__(self, bench: Bench, garbage: list[torch.Tensor]) -> None:
        self._bench, self._garbage = bench, garbage

    def allocate(self, holding: Holding, storage: torch.UntypedStorage) -> None:
        """One storage less."""
        self._garbage.pop()
        self._bench.residency.bury()
        super().allocate(holding, storage)


def _away(bench: Bench, count: int) -> list[torch.Tensor]:
    tensors = []
    for number in range(count):
        tensor, holding = bench.add(4, number)
        bench.residency.offload(holding, bench.slot(4 * number, 4))
        bench.residency.release(holding)
        tensors.append(tensor)
    return tensors


def test_garbage_dies_while_a_run_takes_its_places(bench: Bench, small_plan: Any) -> None:
    """What the plan does not know comes back all the same."""
    tensors = _away(bench, 3)
    bench.residency.memory = Collecting(bench, [bench.add(1)[0] for _ in range(3)])
    Placement(small_plan).establish(bench.residency, [None] * len(small_plan.storages))
    bench.residency.restore()
    assert [int(tensor.sum()) for tensor in tensors] == [0, 4 * KIB, 8 * KIB]
    bench.assert_books()


def test_garbage_dies_while_what_is_lost_is_marked(bench: Bench) -> None:
    """Nothing is left without memory at a run's end."""
    tensors = _away(bench, 3)
    garbage = [bench.add(1)[0] for _ in range(6)]
    bench.gate.fails = True
    bench.residency.memory = Collecting(bench, garbage)
    with pytest.raises(StoreError, match="device is gone"):
        bench.residency.end()
    assert all(bool((tensor == 0xFF).all()) for tensor in tensors)


def test_the_account_is_lost_while_ranges_are_compared() -> None:
    """A plug comes to lie where none was expected; what was listed before is asked for no more."""
    chaos = Chaos(0, surprises=False)
    for _ in range(30):
        chaos.birth()
    memory = chaos.memory
    memory._may_move = [True] * ROWS
    assert memory._look()
    listed = [begin for begin, _ in memory.blocks]
    assert any(memory.can_move(begin) for begin in listed)
    memory._lose()
    assert not any(memory.can_move(begin) for begin in listed)


@pytest.mark.parametrize("seed", [35, 58, 239])
def test_surprises_while_ranges_are_compared(seed: int) -> None:
    """Seeds under which the account is lost between two ranges that are looked at."""
    chaos = Chaos(seed, surprises=True)
    for _ in range(250):
        chaos.random.choice(chaos.events)()
