"""One rank's part of parallel training: its stage, its shards, its place among the ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from teraio.errors import InputError
from teraio.profiler.models import build_stage
from teraio.profiler.training.loop import RunMicroBatches, accumulate_gradients
from teraio.profiler.training.model_sources import OwnModel, build_source
from teraio.profiler.training.pipeline import Pipeline
from teraio.profiler.training.setup import TrainingSetup
from teraio.profiler.training.sharding import apply_sharding


def build_parallel(setup: TrainingSetup, device: torch.device) -> tuple[nn.Module, RunMicroBatches]:
    """The rank's part of the model and what runs its micro-batches.

    torch.distributed must be initialised with the setup's ranks, for real or by
    :func:`fake_process_group`. Raises InputError where it is not, or for a model that cannot be cut
    in this way.
    """
    mesh = make_mesh(setup, device)
    make_batch = None
    with device:
        if setup.stages == 1 or isinstance(setup.model, OwnModel):
            model, make_batch = build_source(setup)
        else:
            model = build_stage(setup.model, setup.stage, setup.stages, **setup.model_options)
    apply_sharding(model, setup, mesh)
    if setup.stages == 1:
        return model, lambda count: accumulate_gradients(model, setup, device, count, make_batch)
    pipeline = Pipeline(model, setup, device, mesh.get_group("stage"))
    return model, pipeline.run


def make_mesh(setup: TrainingSetup, device: torch.device) -> DeviceMesh:
    """All ranks, as (stage, data, tensor)."""
    if not torch.distributed.is_initialized():
        raise InputError(
            "parallel training: torch.distributed is not initialised; start the ranks with "
            "torchrun and call init_process_group first"
        )
    have = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if have != (setup.rank, setup.world_size):
        raise InputError(
            f"parallel training: the setup is rank {setup.rank} of {setup.world_size}, "
            f"torch.distributed is rank {have[0]} of {have[1]}"
        )
    shape = setup.stages, setup.data_parallel, setup.tensor_parallel
    # The mesh computes with the numbers of its ranks, which fake tensors have not.
    with unset_fake_temporarily():
        return init_device_mesh(device.type, shape, mesh_dim_names=("stage", "data", "tensor"))
