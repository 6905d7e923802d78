"""Training in all the ways that break offloading elsewhere: the same bits, within the budget."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from teraio.planner.policies.evict_everything import evict_everything


def test_views_outlive_their_base(survives: Any, loop: Any, layers: Any, train: Any) -> None:
    """Saved views of dead bases, reshaped and transposed, and an in-place write through one."""

    class Views(layers):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.layers[0](x.view(4, 8, 64))
            view = hidden.transpose(1, 2)
            del hidden
            query = self.layers[1]((view * view).sum(2)).view(4, 8, 8).transpose(0, 1)
            scores = (query @ query.transpose(1, 2)).reshape(-1)
            scores.view(-1)[3:7].mul_(2.0)
            result: torch.Tensor = scores
            return result

    def build() -> Any:
        model = Views()
        return model, torch.optim.AdamW(model.parameters(), foreach=False)

    assert survives(loop(train, build)).drift == 0


def test_a_list_that_keeps_activations(survives: Any, loop: Any, layers: Any, train: Any) -> None:
    """Hazard V9: what the user holds cannot be freed, but it can be moved and comes back whole."""
    kept: list[torch.Tensor] = []

    class Kept(layers):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.relu(layer(x))
                kept.append(x)
            return x

    def build() -> Any:
        kept.clear()
        model = Kept()
        return model, torch.optim.AdamW(model.parameters(), foreach=False)

    def step(model: Any, optimizer: Any, number: int) -> Any:
        del kept[:-3]
        loss = train(model, optimizer, number)
        return loss, [float(x.detach().sum()) for x in kept]

    survives(loop(step, build))


def test_gradients_in_one_flat_bucket(survives: Any, loop: Any, batch: Any) -> None:
    """Hazard V7: every gradient is a view of one storage, which dies by set_to_none."""

    def step(model: Any, optimizer: Any, number: int) -> float:
        optimizer.zero_grad(set_to_none=True)
        parameters = list(model.parameters())
        flat, begin = torch.zeros(sum(p.numel() for p in parameters)), 0
        for parameter in parameters:
            parameter.grad = flat[begin : begin + parameter.numel()].view_as(parameter)
            begin += parameter.numel()
        loss = model(batch(number)).pow(2).mean()
        loss.backward()
        flat.div_(2)
        optimizer.step()
        return float(loss.detach())

    assert survives(loop(step)).drift == 0


def test_autograd_by_hand(survives: Any, loop: Any, layers: Any, batch: Any) -> None:
    """A custom function, both kinds of checkpoint with dropout, hooks, double backward."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            result = x @ weight
            context.save_for_backward(x, weight, result)
            context.twice = result * 2
            return result

        @staticmethod
        def backward(context: Any, *gradients: torch.Tensor) -> Any:
            x, weight, result = context.saved_tensors
            (gradient,) = gradients
            return (gradient * context.twice) @ weight.t(), x.t() @ (gradient + result)

    class Mixed(layers):  # type: ignore[misc]
        def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(torch.relu(self.layers[index](x)), 0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = Product.apply(x, self.layers[0].weight)  # type: ignore[no-untyped-call]
            x = checkpoint(lambda t: self.part(1, t), x, use_reentrant=False)
            return checkpoint(lambda t: self.part(2, t), x, use_reentrant=True)  # type: ignore[no-any-return]

    def build() -> Any:
        model = Mixed()
        return model, torch.optim.AdamW(model.parameters(), foreach=False)

    def step(model: Any, optimizer: Any, number: int) -> float:
        optimizer.zero_grad()
        x = batch(number).requires_grad_()
        y = torch.tanh(torch.nn.functional.linear(x, model.layers[0].weight)).pow(2).mean()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        extra = y + gradient.pow(2).sum()
        extra.backward(retain_graph=True)
        extra.backward()
        hidden = model(batch(number))
        hidden.register_hook(lambda g: g * 1.5)
        loss = hidden.pow(2).mean()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    assert survives(loop(step, build)).drift == 0


def test_sparse_gradients_and_two_optimizers(survives: Any, loop: Any, layers: Any) -> None:
    """Indices and values of sparse tensors are storages of their own, which no argument shows."""

    class Embedded(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(300, 64, sparse=True)
            self.rest = layers()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = self.rest(self.embedding(tokens))
            return hidden

    def build() -> Any:
        model = Embedded()
        sparse = torch.optim.SparseAdam(model.embedding.parameters(), lr=0.01)
        return model, [sparse, torch.optim.AdamW(model.rest.parameters(), foreach=False)]

    def step(model: Any, optimizers: Any, number: int) -> float:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randperm(300, generator=generator)[:180].view(20, 9)
        loss = model(tokens).pow(2).mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return float(loss.detach())

    survives(loop(step, build))


def test_tensor_subclasses(survives: Any, loop: Any, batch: Any) -> None:
    """Jagged tensors wrap others; complex, integer, empty and bool storages move like any."""

    def step(model: Any, optimizer: Any, number: int) -> float:
        optimizer.zero_grad()
        rows = [batch(number, 7), batch(number + 1, 11)]
        x = torch.nested.nested_tensor(rows, layout=torch.jagged)
        for layer in model.layers:
            x = torch.relu(layer(x))
        spectrum = torch.fft.fft(x.values())
        counts = (spectrum.abs() > 1).sum(0) + torch.zeros(0).sum().long()
        loss = (spectrum.conj() * spectrum).real.mean() + counts.float().mean() * 0
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    survives(loop(step))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_strided_nested_tensors_are_refused(loop: Any, train: Any) -> None:
    """With what to do instead."""

    def step(model: Any, optimizer: Any, number: int) -> float:
        torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(2, 4)]) * 2.0
        return 0.0

    with pytest.raises(ValueError, match=r"layout=torch\.jagged"):
        loop(step).trace()


@pytest.mark.parametrize("micro_batches", [1, 3, 6])
def test_other_numbers_of_micro_batches(
    micro_batches: int, survives: Any, loop: Any, batch: Any
) -> None:
    """Hazards I7 and I8: planned for four, gradients clipped."""

    def steps_of(count: int) -> Any:
        def step(model: Any, optimizer: Any, number: int) -> float:
            optimizer.zero_grad()
            for index in range(count):
                (model(batch(number * 10 + index)).pow(2).mean() / count).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            return float(norm)

        return step

    report = survives(loop(steps_of(micro_batches), profiled=steps_of(4)))
    assert report.drift > 0


def test_evaluation_schedules_and_averages(
    survives: Any, loop: Any, layers: Any, batch: Any
) -> None:
    """Inference between forward and backward and between steps, a schedule, an EMA of weights."""

    def build() -> Any:
        model = layers()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        optimizer.average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average)  # type: ignore[attr-defined]
        optimizer.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)  # type: ignore[attr-defined]
        return model, optimizer

    def step(model: Any, optimizer: Any, number: int, evaluations: Any = None) -> Any:
        optimizer.zero_grad()
        loss = model(batch(number)).pow(2).mean()
        with torch.no_grad():
            count = number if evaluations is None else evaluations
            inside = sum(float(model(batch(100 + i)).sum()) for i in range(count))
        loss.backward()
        optimizer.step()
        optimizer.schedule.step()
        optimizer.average.update_parameters(model)
        with torch.no_grad():
            return float(loss), inside, float(optimizer.average(batch(99)).sum())

    survives(loop(step, build, profiled=lambda m, o, i: step(m, o, i, 0)))


def test_other_shapes_and_other_layers(survives: Any, loop: Any, train: Any, batch: Any) -> None:
    """Hazards I4 and I5: batches of other sizes, layers left out, a mask larger than planned."""

    def step(model: Any, optimizer: Any, number: int) -> float:
        optimizer.zero_grad()
        rows = 16 + 16 * (number % 3)
        x = batch(number, rows)
        for index, layer in enumerate(model.layers):
            if index == 0 or (index + number) % 2:
                x = torch.relu(layer(x))
        mask = torch.zeros(rows, rows)
        loss = (mask @ x + x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    report = survives(loop(step, profiled=lambda m, o, _: step(m, o, 0)), 7)
    assert report.drift > 0


def test_skipped_steps(survives: Any, loop: Any, layers: Any, batch: Any) -> None:
    """Hazard I2: the scaler skips steps, the first of all too; nothing waits for ever."""

    def build() -> Any:
        model = layers()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        optimizer.scaler = torch.amp.GradScaler("cpu")  # type: ignore[attr-defined]
        return model, optimizer

    def step(model: Any, optimizer: Any, number: int) -> str:
        optimizer.zero_grad()
        loss = model(batch(number)).pow(2).mean() * (float("inf") if number in (0, 4) else 1.0)
        optimizer.scaler.scale(loss).backward()
        optimizer.scaler.step(optimizer)
        optimizer.scaler.update()
        return str(float(loss.detach()))

    survives(loop(step, build, profiled=lambda m, o, i: step(m, o, i + 10)), 7)


def test_replaced_tensors(survives: Any, loop: Any, train: Any) -> None:
    """``.data`` swaps, ``set_``, ``grad = None``, checkpoints loaded inside the run (hazard I1)."""
    saved: dict[str, Any] = {}

    def step(model: Any, optimizer: Any, number: int) -> float:
        if number == 2:
            saved["model"] = copy.deepcopy(model.state_dict())
            saved["optimizer"] = copy.deepcopy(optimizer.state_dict())
        if number == 3:
            for parameter in model.parameters():
                parameter.data = parameter.data * 1.5
                parameter.grad = None
        if number == 4:
            with torch.no_grad():
                model.layers[0].weight.set_(model.layers[0].weight.detach().clone())
        if number == 5:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        return float(train(model, optimizer, number))

    survives(loop(step, profiled=train), 7, is_counted_late=True)


def test_a_resumed_run_follows_its_plan_at_once(
    loop: Any, layers: Any, train: Any, machine: Any
) -> None:
    """Hazard I1: the state exists, and the first step lacks what ended the step before."""

    def build() -> Any:
        model = layers()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for number in range(2):
            train(model, optimizer, number)
        return model, optimizer

    resumed = loop(train, build)
    plain, _ = resumed.run()
    result, report = resumed.run(plan=evict_everything(resumed.trace(), machine(), tiers="both"))
    assert plain[0] == result[0]
    assert report.warm_up_steps == 0
    assert report.drift <= 8, report.first_drift


def test_resized_storages(survives: Any, loop: Any, train: Any) -> None:
    """``resize_`` of tensors and storages, ``out=`` and ``set_`` that grow: other storages then."""

    def step(model: Any, optimizer: Any, number: int) -> Any:
        grown, raw = torch.ones(2000) * number, torch.full((3000,), 2.0)
        loss = train(model, optimizer, number)
        grown.resize_(5000)
        grown[2000:] = 1
        total = torch.empty(0)
        torch.add(grown, grown, out=total)
        raw.untyped_storage().resize_(16000)
        alias = torch.empty(0).set_(raw.untyped_storage(), 0, (3000,))  # type: ignore[call-overload]
        return loss, float(total.sum()), float(alias.sum()), float(raw.sum())

    survives(loop(step, profiled=train), is_counted_late=True)


def test_fixed_storages(survives: Any, loop: Any, batch: Any) -> None:
    """NumPy's memory, shared memory: never moved, never harmed."""

    def step(model: Any, optimizer: Any, number: int) -> float:
        optimizer.zero_grad()
        foreign = torch.from_numpy(batch(number).numpy().copy())
        shared = batch(number + 1).share_memory_()
        loss = (model(foreign) + model(shared)).pow(2).mean()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    survives(loop(step), is_counted_late=True)
