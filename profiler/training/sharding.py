"""Tensor parallelism and FSDP2: cuts a model's parameters among ranks, as PyTorch's own tools do.

Tensor parallelism cuts every projection of a Llama's block, whole heads at a time, so that
attention and feed-forward each need one all-reduce in forward and one in backward. Embedding and
head are cut by vocabulary, norms are kept whole on every rank. FSDP cuts what is left of each block
along its rows, gathers a block's parameters when it runs, and scatters its gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from teraio.errors import InputError
from teraio.profiler.models import model_config
from teraio.profiler.models.llama import LlamaConfig, LlamaLayers
from teraio.profiler.models.moe import MoeConfig
from teraio.profiler.training.setup import TrainingSetup


def apply_sharding(model: nn.Module, setup: TrainingSetup, mesh: DeviceMesh) -> None:
    """Replace the model's parameters by this rank's shards of them, in place.

    ``mesh`` has the dimensions "data" and "tensor". Raises InputError for a model that tensor
    parallelism cannot cut.
    """
    if setup.tensor_parallel > 1:
        _cut_layers(model, setup, mesh["tensor"])
    if setup.data_parallel > 1:
        _cut_parameters(model, mesh["data"])


def _cut_layers(model: nn.Module, setup: TrainingSetup, mesh: DeviceMesh) -> None:
    _check_divisible(setup)
    assert isinstance(model, LlamaLayers)
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "norm": Replicated(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    plan = {name: style for name, style in plan.items() if getattr(model, name) is not None}
    parallelize_module(model, mesh, plan)
    if model.config.tied and model.head is not None and model.embedding is not None:
        model.head.weight = model.embedding.weight
    for block in model.blocks:
        parallelize_module(block, mesh, _block_plan())


def _block_plan() -> dict[str, ParallelStyle]:
    columns = ["attention.query", "attention.key", "attention.value"]
    columns += ["feed_forward.gate", "feed_forward.up"]
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("attention.output", "feed_forward.down")}
    plan |= {name: Replicated() for name in ("attention_norm", "feed_forward_norm")}
    # Once per module: the projections' gradients of one input are summed before the all-reduce.
    plan["attention"] = PrepareModuleInput(
        input_layouts=(Replicate(), None, None), desired_input_layouts=(Replicate(), None, None)
    )
    plan["feed_forward"] = PrepareModuleInput(
        input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)
    )
    return plan


class Replicated(ParallelStyle):
    """A module that every rank runs whole, on parameters that are distributed like the others'.

    Optimizers and clipping take lists of parameters, which must all be distributed or none.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def distribute(_: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> Any:
            return tuple(
                DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs
            )

        def localise(_: nn.Module, output: DTensor, __: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, device_mesh, None, distribute, localise)


def _check_divisible(setup: TrainingSetup) -> None:
    config, ranks = model_config(setup.model), setup.tensor_parallel
    if not isinstance(config, LlamaConfig) or isinstance(config, MoeConfig):
        raise InputError(
            f"tensor_parallel: only a Llama can be cut so, not {type(config).__name__}; "
            "use data_parallel or stages"
        )
    sizes = {
        "heads": config.heads,
        "key_value_heads": config.num_key_value_heads,
        "intermediate": config.intermediate,
        "vocabulary": config.vocabulary,
    }
    for name, size in sizes.items():
        if size % ranks:
            raise InputError(f"tensor_parallel: {ranks} ranks cannot share {size} {name} equally")


def _cut_parameters(model: nn.Module, mesh: DeviceMesh) -> None:
    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Members of the outermost lists of modules: the layers, each gathered as a whole."""
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else _blocks(child)
