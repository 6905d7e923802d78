"""Recording changes no result, draws no random number and leaves nothing behind."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

from teraio.errors import OffloadWarning
from teraio.profiler import Profile, profile
from teraio.profiler.models import build_model, make_batch
from teraio.profiler.storages import listen_to_resizes, original_resize, stop_listening_to_resizes

STEPS = 7


class Training:
    """A reference model on one fixed batch; ``states`` after each step, and the losses."""

    def __init__(self, model: str, optimizer: dict[str, Any], **overrides: Any) -> None:
        torch.manual_seed(0)
        self.model = build_model(model, layers=2, **overrides)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **optimizer)
        self.batch = make_batch(self.model, 2, 16)
        self.losses: list[torch.Tensor] = []

    def run(self) -> None:
        for _ in range(STEPS):
            loss = self.model(*self.batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.detach())

    def tensors(self) -> list[torch.Tensor]:
        states = [
            value
            for parameter in self.model.parameters()
            for value in self.optimizer.state[parameter].values()
        ]
        return [*self.losses, *self.model.parameters(), *states, torch.get_rng_state()]


@pytest.mark.parametrize(
    ("model", "optimizer", "overrides"),
    [
        ("tiny-llama", {"foreach": True}, {"checkpoint": "reentrant"}),
        ("tiny-llama", {"fused": True}, {"tied": True}),
        ("tiny-gpt2", {"foreach": False}, {"dropout": 0.1, "checkpoint": "non-reentrant"}),
        ("tiny-moe", {"foreach": True}, {}),
    ],
)
def test_bits_are_the_same_with_and_without(
    model: str, optimizer: dict[str, Any], overrides: dict[str, Any]
) -> None:
    """Losses, parameters, optimizer state and the random generator, through dropout and replay."""
    plain = Training(model, optimizer, **overrides)
    plain.run()
    expected = plain.tensors()
    recorded = Training(model, optimizer, **overrides)
    with profile(recorded.model, recorded.optimizer, bucket_bytes=50_000):
        recorded.run()
    found = recorded.tensors()
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_exceptions_of_the_loop_pass_through_and_everything_is_undone() -> None:
    model = nn.Linear(4, 4)

    def loop() -> None:
        with profile(model):
            model(torch.randn(2, 4))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert "resize_" not in vars(torch.UntypedStorage)
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert not _global_optimizer_post_hooks


def test_an_operator_that_fails_is_no_kernel() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with profile(model, optimizer) as session:
        while not session.done:
            data = torch.randn(2, 4)
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                torch.mm(data, data)
            model(data).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert "aten.mm.default" not in session.trace.kernels.op[:2]
    assert session.trace.kernels.op[0] == "aten.randn.default"


def test_the_users_profiler_is_left_alone() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop() -> Profile:
        with profile(model, optimizer) as session:
            while not session.done:
                model(torch.randn(2, 4)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return session

    expected = pytest.warns(OffloadWarning, match="profiler is active already")
    with torch.autograd.profiler.profile() as profiler, expected:
        session = loop()
    assert session.trace.kernels.workspace_bytes.sum() == 0
    assert any(event.name == "aten::addmm" for event in profiler.function_events)


def test_user_modes_inside_the_block_are_kept() -> None:
    """A mode of the user's own above the recorder's: the recorder waits for the end to leave."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            Counting.calls += 1
            return func(*args, **(kwargs or {}))

    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with profile(model, optimizer) as session, Counting() as mode:  # type: ignore[no-untyped-call]
        while not session.done:
            model(torch.randn(2, 4)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.utils._python_dispatch._get_current_dispatch_mode() is mode
        before = Counting.calls
        torch.zeros(3).add_(1)
        assert Counting.calls == before + 2
    assert session.trace.num_kernels > 5
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_resizes_reach_every_listener_and_none_after_the_last_has_left() -> None:
    seen: list[tuple[str, int]] = []

    def first(storage: torch.UntypedStorage) -> None:
        seen.append(("first", storage.nbytes()))

    def second(storage: torch.UntypedStorage) -> None:
        seen.append(("second", storage.nbytes()))

    storage = torch.zeros(4).untyped_storage()
    listen_to_resizes(first)
    listen_to_resizes(second)
    storage.resize_(32)
    original_resize(storage, 0)
    stop_listening_to_resizes(first)
    storage.resize_(8)
    stop_listening_to_resizes(second)
    storage.resize_(0)
    assert seen == [("first", 32), ("second", 32), ("second", 8)]


@pytest.mark.parametrize("reads_inside", [True, False])
def test_a_profile_that_is_kept_keeps_no_model(reads_inside: bool) -> None:
    """Once its trace is made; nothing but counting references frees the model here."""
    training = Training("tiny-llama", {"foreach": False})
    held: list[weakref.ref[Any]] = [weakref.ref(training.model)]
    held.append(weakref.ref(next(training.model.parameters())))
    gc.collect()
    gc.disable()
    try:
        with profile(training.model, training.optimizer) as session:
            training.run()
            if reads_inside:
                assert session.trace.num_kernels > 0
                training.run()
        assert session.trace.num_kernels > 0
        del training
        assert [reference() for reference in held] == [None, None]
    finally:
        gc.enable()
