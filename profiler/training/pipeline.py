"""A rank's part of a 1F1B pipeline, run by PyTorch's own schedule.

The schedule decides the order of everything: it is that of a real run, also where nothing real is
there (fake tensors, a fake process group). What is added here: batches drawn when they are needed,
precision, and word to the recorder of which micro-batch is under way.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from teraio.errors import InputError
from teraio.profiler.announcements import announce_micro_batch, announce_transfer
from teraio.profiler.models import model_config
from teraio.profiler.models.layers import next_token_loss
from teraio.profiler.training.loop import autocast, random_batch
from teraio.profiler.training.setup import TrainingSetup

_PRIVATE_METHODS = ("_initialize_stage", "_step_microbatches")
_LATER_METHOD = "_initialize_pipeline_distributed_state"
"""Of torch 2.15, or 2.14: what a stage receives lives longer there than its fake would tell."""


class Pipeline:
    """One stage of a pipeline and the schedules that run it.

    Raises InputError for fewer micro-batches than stages.
    """

    def __init__(
        self,
        module: nn.Module,
        setup: TrainingSetup,
        device: torch.device,
        group: distributed.ProcessGroup,
    ) -> None:
        _check_pytorch()
        if setup.micro_batches < setup.stages:
            raise InputError(
                f"micro_batches: 1F1B needs at least as many as there are stages "
                f"({setup.stages}), got {setup.micro_batches}"
            )
        self._setup = setup
        self._device = device
        received, returned = _examples(setup)
        self._stage = _Stage(
            module,
            setup.stage,
            setup.stages,
            device,
            input_args=received,
            output_args=returned,
            group=group,
        )
        self._stage.setup = setup
        self._schedules: dict[int, Schedule1F1B] = {}

    def run(self, micro_batches: int) -> None:
        """Forward and backward of all micro-batches.

        Takes at most as many as the setup has: the first call allocates buffers for these.
        """
        self._schedule(self._setup.micro_batches)
        schedule: Any = self._schedule(micro_batches)
        # Before torch 2.10 outputs were always kept, now only if they are asked for.
        known = inspect.signature(schedule._step_microbatches).parameters
        options = {"return_outputs": False} if "return_outputs" in known else {}
        self._stage.clear_runtime_states()
        self._stage.chunks = micro_batches
        try:
            schedule._step_microbatches(target_mbs=[None] * micro_batches, **options)
        finally:
            announce_micro_batch(None)

    def _schedule(self, micro_batches: int) -> Schedule1F1B:
        known = self._schedules.get(micro_batches)
        if known is not None:
            return known
        schedule: Any = _Schedule(self._stage, micro_batches, loss_fn=self._loss)
        self._stage.has_backward = True
        schedule._initialize_stage((), {})
        self._schedules[micro_batches] = schedule
        return self._schedules[micro_batches]

    def _loss(self, logits: Tensor, _: None) -> Tensor:
        targets = random_batch(self._setup, self._device)[1]
        with autocast(self._setup.dtype, self._device):
            return next_token_loss(logits, targets)


def _examples(setup: TrainingSetup) -> tuple[Tensor, Tensor]:
    """Tensors without memory, like those that the stage receives and returns.

    Without them PyTorch would run the stages once to see. Residual streams are in the parameters'
    dtype, logits in that of the matrix product that makes them.
    """
    config = model_config(setup.model)
    shape = setup.micro_batch_size, setup.sequence
    tokens = torch.empty(shape, dtype=torch.int64, device="meta")
    between = torch.empty(*shape, config.hidden, device="meta", requires_grad=True)
    logits_dtype = torch.bfloat16 if setup.dtype == "bf16" else between.dtype
    logits = torch.empty(
        *shape, config.vocabulary, dtype=logits_dtype, device="meta", requires_grad=True
    )
    is_last = setup.stage == setup.stages - 1
    return tokens if setup.stage == 0 else between, logits if is_last else between


class _Stage(PipelineStage):
    """A stage that draws its own tokens and says which micro-batch it works on."""

    setup: TrainingSetup

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        announce_micro_batch(fwd_chunk_id)
        given, *rest = args
        if self.is_first:
            given = (random_batch(self.setup, self.device)[0],)
        with autocast(self.setup.dtype, self.device), warnings.catch_warnings():
            # FSDP warns of operators that would overwrite the stage's output; there are none.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
            return super().forward_one_chunk(fwd_chunk_id, given, *rest, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        announce_micro_batch(bwd_chunk_id)
        return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def scale_grads(self, grad_scale_factor: int) -> None:
        announce_micro_batch(None)
        # A float: how many micro-batches there are makes it no other operator call.
        super().scale_grads(float(grad_scale_factor))  # type: ignore[arg-type]

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        announce_micro_batch(None)
        super().perform_reduce_grad(grad_scale_factor)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[distributed.P2POp]:
        return _announced(super().get_fwd_recv_ops(fwd_chunk_id), "forward", fwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[distributed.P2POp]:
        return _announced(super().get_fwd_send_ops(fwd_chunk_id), "forward", fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[distributed.P2POp]:
        return _announced(super().get_bwd_recv_ops(bwd_chunk_id), "backward", bwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[distributed.P2POp]:
        return _announced(super().get_bwd_send_ops(bwd_chunk_id), "backward", bwd_chunk_id)


def _announced(
    operations: list[distributed.P2POp], phase: str, micro_batch: int
) -> list[distributed.P2POp]:
    for operation in operations:
        announce_transfer(operation.tensor, phase, micro_batch)
    return operations


class _Schedule(Schedule1F1B):
    """1F1B that does not ask ranks that are not there whether they know their shapes."""

    def _warmup_p2p(self, stages: list[Any], *args: Any) -> None:
        """PyTorch 2.12 and later: the stages vote, which a fake group cannot answer."""
        if distributed.get_backend(self._stage.group) != "fake":
            super()._warmup_p2p(stages, *args)
            return
        from torch.distributed.pipelining import _utils

        for stage in stages:
            stage._inference_mode = _utils.InferenceMode.STATIC


def _check_pytorch() -> None:
    known = "teraio knows the schedules of torch 2.11 to 2.13"
    missing = [name for name in _PRIVATE_METHODS if not hasattr(Schedule1F1B, name)]
    if missing:
        raise InputError(
            f"pipeline: PyTorch {torch.__version__} has no Schedule1F1B.{missing[0]}; {known}"
        )
    if hasattr(Schedule1F1B, _LATER_METHOD):
        raise InputError(
            f"pipeline: PyTorch {torch.__version__} has Schedule1F1B.{_LATER_METHOD}, and keeps "
            f"what it receives otherwise; {known}"
        )
