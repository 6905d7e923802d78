"""A training loop whose parameters can step in the backward pass, and plans for it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

import teraio
from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Plan
from teraio.executor.optimizer_in_backward import OptimizerInBackward
from teraio.executor.stepping_order import SteppingOrder
from teraio.planner.plan_building import plan_of_original
from teraio.planner.policies.evict_everything import evict_everything
from teraio.profiler.models import build_model, make_batch
from teraio.profiler.recorder import Recorder
from teraio.profiler.trace_building import build_trace
from teraio.traces.trace import Trace
from teraio.traces.transforms import transform_trace

IN_BACKWARD = "optimizer-in-backward"
STEPS = 5
BUCKET_BYTES = 64 * 1024

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw loop": lambda p: torch.optim.AdamW(p, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "sgd loop": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=False),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
}


class Mixed(torch.nn.Module):
    """Linear layers and a norm: gradients that come one by one and in pairs."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first = torch.nn.Linear(width, width)
        self.norm = torch.nn.LayerNorm(width)
        self.last = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x)))).pow(2).mean()  # type: ignore[no-any-return]


class Training:
    """A loop without anything that the transform refuses."""

    def __init__(
        self,
        model: str = "mixed",
        optimizer: str = "adamw loop",
        micro_batches: int = 2,
        *,
        set_to_none: bool = True,
        two_groups: bool = False,
        device: str = "cpu",
    ) -> None:
        self.name = model
        self.make_optimizer = OPTIMIZERS[optimizer]
        self.micro_batches = micro_batches
        self.set_to_none = set_to_none
        self.two_groups = two_groups
        self.device = device

    def build(self) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Mixed() if self.name == "mixed" else build_model(self.name)
        model.to(self.device)
        parameters: Any = list(model.parameters())
        if self.two_groups:
            matrices = [p for p in parameters if p.dim() > 1]
            rest = [p for p in parameters if p.dim() <= 1]
            parameters = [{"params": matrices}, {"params": rest, "weight_decay": 0.0}]
        return model, self.make_optimizer(parameters)

    def loss(self, model: torch.nn.Module, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        if self.name == "mixed":
            return model(torch.randn(32, 64, generator=generator).to(self.device))  # type: ignore[no-any-return]
        batch = [part.to(self.device) for part in make_batch(self.name, 2, 16, generator)]
        return model(*batch)  # type: ignore[no-any-return]

    def step(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
        optimizer.zero_grad(set_to_none=self.set_to_none)
        total = 0.0
        for micro_batch in range(self.micro_batches):
            loss = self.loss(model, 10 * number + micro_batch)
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    def recorded(self, order: SteppingOrder | None = None) -> Trace:
        """One steady iteration, of the plain loop or with early steps."""
        model, optimizer = self.build()
        recorder = Recorder(device_type=self.device, bucket_bytes=BUCKET_BYTES)
        recorder.names.add_model(model)
        recorder.names.add_optimizer(optimizer)
        with recorder:
            stepping = None if order is None else OptimizerInBackward(recorder, order, [optimizer])
            if stepping is not None:
                stepping.start()
            for number in range(8):
                self.step(model, optimizer, number)
            if stepping is not None:
                stepping.stop()
        return build_trace(recorder)

    def trained(
        self,
        plan: Plan | None = None,
        *,
        step: Callable[[Any, Any, int], float] | None = None,
        is_given: bool = True,
    ) -> tuple[list[float], dict[str, torch.Tensor], Any]:
        """Losses, final parameters and states, and the report of a run under a plan."""
        if self.device != "cpu":
            # What earlier runs leave on a GPU counts in the budget of this one.
            gc.collect()
        model, optimizer = self.build()
        step = step or self.step
        if plan is None:
            losses, report = [step(model, optimizer, n) for n in range(STEPS)], None
        else:
            with teraio.execute(plan, *((model, optimizer) if is_given else ())) as run:
                losses = [step(model, optimizer, n) for n in range(STEPS)]
            report = run.report
        return losses, tensors_of(model, optimizer), report


def tensors_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Parameters and states, on the CPU: what a test keeps must not fill a GPU."""
    tensors = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    for number, state in enumerate(optimizer.state.values()):
        tensors |= {
            f"{number}.{k}": v.cpu().clone() for k, v in state.items() if torch.is_tensor(v)
        }
    return tensors


def assert_same_bits(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    for name, tensor in one[1].items():
        assert torch.equal(tensor, other[1][name]), name


def unmoved_plan(trace: Trace, machine: Callable[..., Hardware]) -> Plan:
    """Nothing moves, only the order changes."""
    return teraio.plan(trace, machine(), planner="ideal", transform=IN_BACKWARD)


def moving_plan(trace: Trace, machine: Callable[..., Hardware]) -> Plan:
    """All that can leave does, whenever it is not used."""
    everything = evict_everything(transform_trace(trace, IN_BACKWARD), machine(), tiers="host")
    return plan_of_original(everything, trace, IN_BACKWARD)
