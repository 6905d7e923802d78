"""Builds a training loop from its description; the same code runs on real and on fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from teraio.profiler.fake.compiled_blocks import compile_blocks
from teraio.profiler.models import model_config
from teraio.profiler.product_precision import product_precision_of
from teraio.profiler.training.model_sources import (
    MakeBatch,
    build_source,
    check_sequence,
    run_model,
)
from teraio.profiler.training.setup import Precision, TrainingSetup

RunMicroBatches = Callable[[int], None]
"""Runs forward and backward of so many micro-batches, and leaves the gradients behind."""


class Training:
    """A model, its optimizer, and what one iteration does with them."""

    def __init__(
        self,
        setup: TrainingSetup,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        run_micro_batches: RunMicroBatches,
    ) -> None:
        self.setup = setup
        self.model = model
        self.optimizer = optimizer
        self._run_micro_batches = run_micro_batches

    def run_iteration(self, micro_batches: int | None = None) -> None:
        """All micro-batches (or so many), then clipping, the optimizer's step, and no gradients."""
        with product_precision_of(self.setup.dtype):
            self._run_micro_batches(micro_batches or self.setup.micro_batches)
            self._clip()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _clip(self) -> None:
        if self.setup.clip_norm is not None:
            nn.utils.clip_grad_norm_(
                self.model.parameters(),
                self.setup.clip_norm,
                # Left to itself, torch asks for exact tensor types and takes fake ones one by one.
                foreach=self.setup.optimizer_implementation != "for-loop",
            )


def build_training(setup: TrainingSetup, device: str | torch.device = "cpu") -> Training:
    """A freshly initialised model on ``device`` and the loop that trains it on random tokens.

    Inside FakeTensorMode nothing is allocated. Parallel training needs torch.distributed
    initialised with the setup's ranks. Raises InputError for what the model cannot do.
    """
    device = torch.device(device)
    check_sequence(setup)
    model, run_micro_batches = _build_rank(setup, device)
    if setup.compile_blocks:
        compile_blocks(model)
    return Training(setup, model, _build_optimizer(setup, model), run_micro_batches)


def _build_rank(setup: TrainingSetup, device: torch.device) -> tuple[nn.Module, RunMicroBatches]:
    if setup.world_size > 1:
        # It takes a second to import, and not every PyTorch has it.
        from teraio.profiler.training.parallel import build_parallel

        return build_parallel(setup, device)
    with device:
        model, make_batch = build_source(setup)
    return model, lambda count: accumulate_gradients(model, setup, device, count, make_batch)


def _build_optimizer(setup: TrainingSetup, model: nn.Module) -> torch.optim.Optimizer:
    implementation = setup.optimizer_implementation
    return torch.optim.AdamW(
        model.parameters(), fused=implementation == "fused", foreach=implementation == "foreach"
    )


def accumulate_gradients(
    model: nn.Module,
    setup: TrainingSetup,
    device: torch.device,
    micro_batches: int,
    make_batch: MakeBatch | None = None,
) -> None:
    """Forward and backward of one micro-batch after another; by default of random tokens."""
    for _ in range(micro_batches):
        batch = _draw_batch(setup, device, make_batch)
        with autocast(setup.dtype, device):
            loss = run_model(model, batch)
        # A float: how many micro-batches there are makes it no other operator call.
        (loss / float(micro_batches)).backward()


def _draw_batch(setup: TrainingSetup, device: torch.device, make_batch: MakeBatch | None) -> Any:
    if make_batch is None:
        return random_batch(setup, device)
    with device:
        return make_batch(setup.micro_batch_size, setup.sequence)


def random_batch(setup: TrainingSetup, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and targets, int64 (micro_batch_size, sequence) each, drawn on the device."""
    vocabulary = model_config(setup.model).vocabulary
    shape = (setup.micro_batch_size, setup.sequence)
    tokens = torch.randint(vocabulary, shape, device=device)
    return tokens, torch.randint(vocabulary, shape, device=device)


@contextlib.contextmanager
def autocast(dtype: Precision, device: torch.device) -> Iterator[None]:
    """Mixed precision where the setup asks for it."""
    if dtype != "bf16":
        yield
        return
    with torch.autocast(device.type, dtype=torch.bfloat16):
        yield
