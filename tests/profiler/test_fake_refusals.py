"""What fake tensors cannot do is said in one line that names operator, module and remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from teraio.errors import InputError
from teraio.profiler.fake.recording import record
from teraio.profiler.training import TrainingSetup
from teraio.traces.trace import Trace

REAL = torch.ones(8)
"""Made when this module is imported, as a script's constants are."""


@torch.library.custom_op("teraio_tests::shapeless", mutates_args=())
def shapeless(x: Tensor) -> Tensor:
    """An operator whose author has not said what shape it returns."""
    return x.clone()


class AsksInBackward(torch.autograd.Function):
    """Looks at a gradient's value."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * gradients[0].sum().item()


class Model(nn.Module):
    """Two layers, of which the second does what the test wants."""

    def __init__(self, act: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), Acting(act)])

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Acting(nn.Module):
    """Does something with its input, and passes on what comes of it if that is a tensor."""

    def __init__(self, act: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        result = self.act(x)
        return x + result.sum() if isinstance(result, Tensor) else x


def record_model(make: Callable[[], Any], **options: Any) -> Trace:
    setup = TrainingSetup(model=make, sequence=4, micro_batch_size=2)
    return record(setup, **options)


def record_acting(act: Callable[[Tensor], Any], **options: Any) -> Trace:
    return record_model(lambda: Model(act), **options)


def assert_one_line(error: BaseException, *parts: str) -> None:
    text = str(error)
    assert "\n" not in text
    for part in parts:
        assert part in text, text


ASKS_FOR_A_VALUE: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 0),
    "int": lambda x: int(x.sum()),
    "tolist": lambda x: x.tolist(),
}


@pytest.mark.parametrize("act", ASKS_FOR_A_VALUE.values(), ids=ASKS_FOR_A_VALUE)
def test_asking_for_a_value_is_refused(act: Callable[[Tensor], Any]) -> None:
    with pytest.raises(InputError) as caught:
        record_acting(act)
    place = "aten._local_scalar_dense.default in layers.1 (forward, test_fake_refusals.py:"
    assert_one_line(caught.value, place, "--assume-scalars", "teraio profile")


OTHER_REFUSALS: dict[str, tuple[Callable[[Tensor], Any], str, str]] = {
    "equal": (lambda x: torch.equal(x, x + 1), "aten.equal.default", "depends on the values"),
    "nonzero": (lambda x: torch.nonzero(x), "aten.nonzero.default", "shape of its result"),
    "where": (lambda x: torch.where(x > 0)[0], "aten.nonzero.default", "shape of its result"),
    "mask": (lambda x: x[x > 0], "aten.index.Tensor", "shape of its result"),
    "masked_select": (
        lambda x: torch.masked_select(x, x > 0),
        "aten.masked_select.default",
        "shape of its result",
    ),
    "unique": (lambda x: torch.unique(x), "aten._unique2.default", "shape of its result"),
    "unsupported": (
        lambda x: shapeless(x.detach()),
        "teraio_tests.shapeless.default",
        "torch.library.register_fake",
    ),
    "real": (lambda x: x + REAL, "aten.add.Tensor", "a real tensor meets"),
    "real view": (lambda x: REAL.view(2, 4), "aten.view.default", "a real tensor meets"),
    "cuda": (lambda x: torch.zeros(8, device="cuda"), "aten.zeros.default", "asks for a CUDA"),
}


@pytest.mark.parametrize(("act", "operator", "reason"), OTHER_REFUSALS.values(), ids=OTHER_REFUSALS)
def test_operators_without_an_answer_are_refused(
    act: Callable[[Tensor], Any], operator: str, reason: str
) -> None:
    for options in ({}, {"assume_scalars": True}):
        with pytest.raises(InputError) as caught:
            record_acting(act, **options)
        assert_one_line(caught.value, f"{operator} in layers.1 (forward", reason)


OUTSIDE_OPERATORS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "numpy": (lambda x: x.detach().numpy(), ".numpy()"),
    "format": (lambda x: f"{x.sum():.3f}", "format()"),
    "autocast": (lambda x: torch.autocast("cuda"), "torch.autocast('cuda')"),
}


@pytest.mark.parametrize(("act", "reason"), OUTSIDE_OPERATORS.values(), ids=OUTSIDE_OPERATORS)
def test_what_is_no_operator_is_refused_with_its_line(
    act: Callable[[Tensor], Any], reason: str
) -> None:
    with pytest.raises(InputError) as caught:
        record_acting(act)
    assert_one_line(caught.value, "in layers.1 (test_fake_refusals.py:", reason)


def test_moving_to_a_gpu_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        record_acting(lambda x: x.cuda())
    assert_one_line(caught.value, "in layers.1 (", "leave out .cuda()")


def test_a_refusal_in_backward_names_the_module_of_the_gradient() -> None:
    with pytest.raises(InputError) as caught:
        record_acting(lambda x: AsksInBackward.apply(x))  # type: ignore[no-untyped-call]
    place = "aten._local_scalar_dense.default in layers.1 (backward, test_fake_refusals.py:"
    assert_one_line(caught.value, place)


def test_a_refusal_while_the_model_is_made() -> None:
    def make() -> nn.Module:
        rates = [rate.item() for rate in torch.linspace(0, 1, 4)]
        return Model(lambda x: rates)

    with pytest.raises(InputError) as caught:
        record_model(make)
    assert_one_line(caught.value, "_local_scalar_dense", "(making the model, test_fake_refusals.py")
    assert record_model(make, assume_scalars=True).num_kernels > 0


def test_assumed_scalars_are_listed_with_their_places() -> None:
    seen: list[Any] = []

    def act(x: Tensor) -> None:
        seen.extend([x.sum().item(), int(x.long().sum()), bool(x.sum() > 0)])

    trace = record_acting(act, assume_scalars=True)
    assert set(map(type, seen)) == {float, int, bool}
    assert set(seen) == {1}
    told = [line for line in trace.metadata.known_differences if "assumed to be 1" in line]
    assert len(told) == 1
    assert "aten._local_scalar_dense.default in layers.1 (forward, test_fake_refus" in told[0]
    assert told[0].endswith(f"{len(seen)} times")
    assert (trace.kernels.op == "aten._local_scalar_dense.default").sum() == 3


def test_a_known_constant_is_no_assumption() -> None:
    seen: list[float] = []
    trace = record_acting(lambda x: seen.append(torch.tensor(3.0).item()))
    assert set(seen) == {3.0}
    assert not any("assumed" in line for line in trace.metadata.known_differences)


def test_a_loop_that_waits_for_another_value_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teraio.profiler.fake.refusals.PATIENCE", 10)

    def act(x: Tensor) -> None:
        while bool(x.sum() > 0):
            pass

    with pytest.raises(InputError, match="assumed 10 times"):
        record_acting(act, assume_scalars=True)


def test_code_may_catch_what_pytorch_raises() -> None:
    def act(x: Tensor) -> float:
        try:
            return float(x.sum())
        except RuntimeError:
            return 0.0

    assert record_acting(act).num_kernels > 0


@pytest.mark.parametrize("error", [ValueError("mine"), KeyError("mine"), RuntimeError("mine")])
def test_other_exceptions_stay_as_they_are(error: Exception) -> None:
    def act(x: Tensor) -> None:
        try:
            x.sum().item()
        except RuntimeError:
            raise error from None

    with pytest.raises(type(error)) as caught:
        record_acting(act)
    assert caught.value is error


def test_a_shape_error_stays_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="broadcast") as caught:
        record_acting(lambda x: x + torch.ones(3))
    assert not isinstance(caught.value, InputError)


def test_torch_is_as_before_after_a_refusal() -> None:
    with pytest.raises(InputError):
        record_acting(lambda x: x.sum().item())
    assert type(torch.ones(2)) is Tensor
    assert float(nn.init.trunc_normal_(torch.zeros(64)).abs().max()) > 0
    record_acting(lambda x: None)  # No mode is left behind.
