"""Cyclic lifetimes and identity: storages that outlive an iteration, or reuse an address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from teraio.profiler import profile
from teraio.traces import live_bytes
from teraio.traces.trace import Trace

BATCH, WIDTH = 6, 10
ACTIVATION_BYTES = BATCH * WIDTH * 4


class Loop:
    """A linear layer and SGD; subclasses say what an iteration keeps."""

    def __init__(self) -> None:
        self.model = nn.Linear(WIDTH, WIDTH, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.kept: Any = None

    def iterate(self) -> None:
        raise NotImplementedError


def record(loop: Loop, iterations: int = 7) -> Trace:
    with profile(loop.model, loop.optimizer) as session:
        for _ in range(iterations):
            loop.iterate()
    return session.trace


def rows_born_by(trace: Trace, op: str) -> list[int]:
    births = trace.storages.birth
    kernels = np.flatnonzero(trace.kernels.op == op)
    return [row for row in range(len(trace.storages)) if births[row] in kernels]


def accesses_of(trace: Trace, row: Any) -> list[int]:
    kernels: list[int] = trace.accesses.kernel[trace.accesses.storage == row].tolist()
    return kernels


def test_gradients_die_at_the_end_where_zero_grad_is_last_or_first() -> None:
    """Both free them between the last kernel of an iteration and the first of the next."""

    class ZeroFirst(Loop):
        def iterate(self) -> None:
            self.optimizer.zero_grad()
            self.model(torch.randn(BATCH, WIDTH)).mean().backward()
            self.optimizer.step()

    class ZeroLast(Loop):
        def iterate(self) -> None:
            self.model(torch.randn(BATCH, WIDTH)).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    first, last = record(ZeroFirst()), record(ZeroLast())
    assert first.storages.equals(last.storages)
    assert first.accesses.equals(last.accesses)
    (gradient,) = np.flatnonzero(first.storages.kind == "gradient")
    assert first.storages.name[gradient] == "weight.grad"
    assert first.storages.death[gradient] == first.num_kernels - 1


def test_gradients_that_are_freed_after_the_first_kernels_wrap() -> None:
    class ZeroLate(Loop):
        def iterate(self) -> None:
            data = torch.randn(BATCH, WIDTH)
            self.optimizer.zero_grad()
            self.model(data).mean().backward()
            self.optimizer.step()

    trace = record(ZeroLate())
    (gradient,) = np.flatnonzero(trace.storages.kind == "gradient")
    assert trace.storages.death[gradient] == 0
    assert trace.storages.birth[gradient] > 0


def test_gradients_that_stay_are_persistent() -> None:
    class ZeroInPlace(Loop):
        def iterate(self) -> None:
            self.model(torch.randn(BATCH, WIDTH)).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=False)

    trace = record(ZeroInPlace())
    (gradient,) = np.flatnonzero(trace.storages.kind == "gradient")
    assert trace.is_persistent[gradient]
    assert trace.storages.name[gradient] == "weight.grad"


def test_output_that_lives_on_is_a_full_cycle_and_an_overhang() -> None:
    """``logits = model(x)`` frees the old logits only when the new ones exist."""

    class Logits(Loop):
        def iterate(self) -> None:
            self.kept = self.model(torch.randn(BATCH, WIDTH))
            self.kept.mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    trace = record(Logits())
    cycle, overhang = rows_born_by(trace, "aten.mm.default")[0], len(trace.storages) - 1
    storages = trace.storages
    birth = int(storages.birth[cycle])
    assert trace.kernels.phase[birth] == "forward"
    assert storages.death[cycle] == birth - 1
    assert storages.birth[overhang] == birth
    assert storages.death[overhang] == birth
    assert storages.birth_ordinal[overhang] > storages.birth_ordinal[cycle]
    assert storages.kind[overhang] == "temporary"
    assert accesses_of(trace, overhang) == []
    assert accesses_of(trace, cycle) == [birth, birth + 1]
    beside = live_bytes(trace)[birth] - live_bytes(trace)[birth - 1]
    assert beside == ACTIVATION_BYTES


def test_output_used_in_the_next_iteration_wraps() -> None:
    class Recurrent(Loop):
        def iterate(self) -> None:
            state = torch.zeros(BATCH, WIDTH) if self.kept is None else self.kept
            output = self.model(state.tanh())
            output.mean().backward()
            self.kept = output.detach()
            self.optimizer.step()
            self.optimizer.zero_grad()

    trace = record(Recurrent())
    row = rows_born_by(trace, "aten.mm.default")[0]
    tanh = int(np.flatnonzero(trace.kernels.op == "aten.tanh.default")[0])
    assert tanh in accesses_of(trace, row)
    assert tanh < trace.storages.birth[row]


def test_losses_in_a_list_count_once() -> None:
    """Four bytes an iteration kept for ever are no leak worth refusing."""

    class Losses(Loop):
        def iterate(self) -> None:
            loss = self.model(torch.randn(BATCH, WIDTH)).mean()
            loss.backward()
            self.kept = [*(self.kept or []), loss.detach()]
            self.optimizer.step()
            self.optimizer.zero_grad()

    trace = record(Losses())
    (row,) = rows_born_by(trace, "aten.mean.default")
    assert (trace.storages.death[row] + 1) % trace.num_kernels == trace.storages.birth[row]
    assert "4 bytes" in trace.metadata.known_differences[0]
    old = np.flatnonzero(trace.storages.kind[trace.is_persistent] != "parameter")
    assert all(not accesses_of(trace, row) for row in old)


def test_the_last_two_of_a_growing_list_are_two_rows() -> None:
    class Differences(Loop):
        def iterate(self) -> None:
            loss = self.model(torch.randn(BATCH, WIDTH)).mean()
            self.kept = [*(self.kept or [torch.zeros(())]), loss.detach()]
            torch.sub(self.kept[-1], self.kept[-2])
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    trace = record(Differences(), 8)
    (sub,) = np.flatnonzero(trace.kernels.op == "aten.sub.Tensor")
    read = trace.accesses.take((trace.accesses.kernel == sub) & trace.accesses.reads)
    births = trace.storages.birth[read.storage]
    assert len(set(read.storage.tolist())) == 2
    assert births[0] == births[1]


def test_batches_from_a_list_are_inputs() -> None:
    """Data that exists before the loop and is read in turns makes no iteration irregular."""

    class Batches(Loop):
        def __init__(self) -> None:
            super().__init__()
            self.kept = [torch.randn(BATCH, WIDTH) for _ in range(3)]

        def iterate(self) -> None:
            self.kept.append(self.kept.pop(0))
            self.model(self.kept[0]).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    trace = record(Batches(), 9)
    rows = np.flatnonzero(trace.storages.kind == "input")
    assert (trace.storages.nbytes[rows] == ACTIVATION_BYTES).all()
    assert sum(bool(accesses_of(trace, row)) for row in rows) == 1


# Identity: addresses and ids are reused, views share (hazards V1 to V8)


def test_reused_addresses_are_different_storages() -> None:
    """``y = f(y)``, each y freed in between: as many storages as calls, two alive at most."""

    class Chain(Loop):
        def iterate(self) -> None:
            with torch.no_grad():
                y = torch.randn(BATCH, WIDTH)
                for _ in range(10):
                    y = torch.relu(y)
                del y
            self.model(torch.randn(BATCH, WIDTH)).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    trace = record(Chain())
    rows = rows_born_by(trace, "aten.relu.default")
    assert len(rows) == 10
    births, deaths = trace.storages.birth[rows], trace.storages.death[rows]
    assert (deaths[:-1] == births[1:]).all()
    assert all(len(accesses_of(trace, row)) == 2 for row in rows[:-1])


def test_wrapped_scalars_make_no_spurious_storages() -> None:
    def once() -> Trace:
        torch.manual_seed(0)

        class Scalars(Loop):
            def iterate(self) -> None:
                x = self.model(torch.randn(BATCH, WIDTH))
                for _ in range(8):
                    x = x * 2.0
                x.mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()

        return record(Scalars())

    first, second = once(), once()
    assert first.storages.equals(second.storages)
    assert first.accesses.equals(second.accesses)
    births = first.kernels.op[first.storages.birth[~first.is_persistent]]
    assert (births == "aten.mul.Tensor").sum() == 16


def test_views_count_their_storage_once() -> None:
    class Views(Loop):
        def iterate(self) -> None:
            with torch.no_grad():
                base = torch.zeros(8, 1024)
                parts = [*base.split(2), *base.chunk(2), base.t(), base.view(-1)]
                for part in parts:
                    part.add_(1)
            self.model(torch.randn(BATCH, WIDTH)).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    trace = record(Views())
    (row,) = np.flatnonzero(trace.storages.nbytes == 8 * 1024 * 4)
    assert trace.peak_live_bytes < 2 * 8 * 1024 * 4
    assert len(accesses_of(trace, row)) == 9


def test_a_saved_view_keeps_its_base_until_backward() -> None:
    class SavedView(Loop):
        def iterate(self) -> None:
            hidden = self.model(torch.randn(BATCH, WIDTH))
            view = hidden.transpose(0, 1)
            del hidden
            (view * view).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    trace = record(SavedView())
    row = rows_born_by(trace, "aten.mm.default")[0]
    phases = trace.kernels.phase[accesses_of(trace, row)].tolist()
    assert trace.storages.kind[row] == "activation"
    assert phases[0] == "forward"
    assert phases[-1] == "backward"


def test_gradients_in_one_bucket_are_one_persistent_storage() -> None:
    """DDP's ``gradient_as_bucket_view``: set_to_none ends the alias, not the bucket."""

    class Bucket(Loop):
        def __init__(self) -> None:
            self.model = nn.Linear(2, 3)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.flat = torch.zeros(9)

        def iterate(self) -> None:
            self.flat.zero_()
            self.model.weight.grad = self.flat[:6].view(3, 2)
            self.model.bias.grad = self.flat[6:]
            self.model(torch.randn(4, 2)).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    trace = record(Bucket())
    (row,) = np.flatnonzero(trace.storages.kind == "gradient")
    assert trace.storages.nbytes[row] == 36
    assert trace.is_persistent[row]
    assert trace.storages.name[row] == "weight.grad"


def test_tied_weights_are_one_storage_used_first_and_last() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(16, 8)
            self.head = nn.Linear(8, 16, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Any) -> Any:
            return self.head(self.embedding(tokens)).mean()

    class TiedLoop(Loop):
        def __init__(self) -> None:
            self.model = Tied()  # type: ignore[assignment]
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

        def iterate(self) -> None:
            self.model(torch.randint(16, (4,))).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    trace = record(TiedLoop())
    (row,) = np.flatnonzero(trace.storages.kind == "parameter")
    assert trace.storages.name[row] == "embedding.weight"
    used = accesses_of(trace, row)
    modules = trace.kernels.module[used].tolist()
    assert modules[:2] == ["embedding", "head"]
    assert trace.kernels.phase[used[-1]] == "optimizer"


# Storages that user code creates or resizes outside any operator


@pytest.mark.parametrize(
    "make",
    [torch.randn, lambda *shape: torch.from_numpy(np.ones(shape, dtype=np.float32))],
    ids=["torch", "numpy"],
)
def test_foreign_inputs_are_inputs(make: Callable[..., Any]) -> None:
    class Foreign(Loop):
        def iterate(self) -> None:
            self.model(make(BATCH, WIDTH)).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    trace = record(Foreign())
    (row,) = np.flatnonzero(trace.storages.kind == "input")
    assert trace.storages.nbytes[row] == ACTIVATION_BYTES
    assert trace.storages.resizable[row] == (make is torch.randn)


def test_resizing_to_nothing_and_back_is_a_death_and_another_storage() -> None:
    """As FSDP frees its unsharded parameters."""

    class Unsharded(Loop):
        def __init__(self) -> None:
            super().__init__()
            self.kept = torch.zeros(1000)

        def iterate(self) -> None:
            storage = self.kept.untyped_storage()
            storage.resize_(4000)
            self.kept.fill_(1.0)
            self.model(torch.randn(BATCH, WIDTH)).mean().backward()
            storage.resize_(0)
            self.optimizer.step()
            self.optimizer.zero_grad()

    trace = record(Unsharded())
    rows = np.flatnonzero(trace.storages.nbytes == 4000)
    (row,) = rows
    backward = np.flatnonzero(trace.kernels.phase == "backward")
    assert trace.kernels.op[trace.storages.birth[row]] == "aten.fill_.Scalar"
    assert trace.storages.death[row] == backward[-1]
    live = live_bytes(trace)
    assert live[backward[-1]] - live[backward[-1] + 1] >= 4000
    assert "resize_" not in vars(torch.UntypedStorage)
