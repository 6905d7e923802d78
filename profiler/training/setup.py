"""What is trained, and how: everything that decides which kernels an iteration runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, get_args

from teraio.errors import InputError
from teraio.profiler.models import MODELS, model_config
from teraio.profiler.models.layers import AttentionKernel, Checkpointing

Precision: TypeAlias = Literal["fp32", "tf32", "bf16"]
"""``bf16``: autocast, with float32 parameters, gradients and optimizer state. ``tf32``: the kernels
of fp32, their matrix products in TF32."""

OptimizerImplementation: TypeAlias = Literal["fused", "foreach", "for-loop"]


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """One rank's part of a training iteration.

    ``model``: a reference model's name or sizes, or another of the sources in
    :mod:`teraio.profiler.training.model_sources`. ``micro_batch_size`` sequences of ``sequence``
    tokens make a micro-batch, ``micro_batches`` of them an iteration. ``clip_norm``: largest norm
    of all gradients together, None for no clipping. ``checkpoint`` and ``attention`` None: as the
    model's sizes say. ``stages`` > 1: a 1F1B pipeline, of which this rank runs ``stage``.
    ``tensor_parallel`` and ``data_parallel`` (FSDP2) count the ranks that share a layer, or the
    parameters. ``compile_blocks``: each block runs as compiled regions.
    """

    model: Any
    sequence: int
    micro_batch_size: int
    micro_batches: int = 1
    dtype: Precision = "fp32"
    optimizer: Literal["adamw"] = "adamw"
    optimizer_implementation: OptimizerImplementation = "fused"
    clip_norm: float | None = None
    checkpoint: Checkpointing | None = None
    attention: AttentionKernel | None = None
    stages: int = 1
    stage: int = 0
    tensor_parallel: int = 1
    tensor_parallel_rank: int = 0
    data_parallel: int = 1
    data_parallel_rank: int = 0
    compile_blocks: bool = False

    def __post_init__(self) -> None:
        for name in ("sequence", "micro_batch_size", "micro_batches", "stages"):
            _check_at_least_one(name, getattr(self, name))
        for parallel in ("tensor_parallel", "data_parallel"):
            _check_at_least_one(parallel, getattr(self, parallel))
            _check_rank(f"{parallel}_rank", getattr(self, f"{parallel}_rank"), parallel, self)
        _check_rank("stage", self.stage, "stages", self)
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in known:
                raise InputError(f"{name}: {value!r} is not one of {', '.join(known)}")
        if self.compile_blocks and self.tensor_parallel > 1:
            raise InputError(
                "compile_blocks: compiled blocks of tensor-parallel ranks would hide their "
                "collectives; leave one of the two out"
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise InputError(f"clip_norm: must be positive, got {self.clip_norm}")

    @property
    def model_options(self) -> dict[str, Any]:
        """Fields of the model's sizes that this setup replaces."""
        given = {"checkpoint": self.checkpoint, "attention": self.attention}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def world_size(self) -> int:
        """Ranks that train together."""
        return self.stages * self.data_parallel * self.tensor_parallel

    @property
    def tokens(self) -> int:
        """Tokens of an iteration, over all ranks: those of a pipeline or of a layer share them."""
        return self.micro_batches * self.micro_batch_size * self.sequence * self.data_parallel

    @property
    def rank(self) -> int:
        """This rank among them: tensor-parallel ranks are neighbours, stages are furthest apart."""
        within_stage = self.data_parallel_rank * self.tensor_parallel + self.tensor_parallel_rank
        return self.stage * self.data_parallel * self.tensor_parallel + within_stage

    @property
    def warmup_forwards(self) -> int:
        """Forward passes of this stage before its first backward pass, beyond the first (1F1B)."""
        return self.stages - 1 - self.stage

    def describe(self) -> str:
        """The fields that differ from their defaults, in one line."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        defaults = {f.name: f.default for f in fields(self)}
        return ", ".join(f"{k}={v}" for k, v in given.items() if v != defaults[k])


def every_rank(
    *, stages: int = 1, data_parallel: int = 1, tensor_parallel: int = 1
) -> list[dict[str, int]]:
    """Which part each rank plays, as options of :class:`TrainingSetup`, in the order of ranks."""
    return [
        {"stage": stage, "data_parallel_rank": data, "tensor_parallel_rank": tensor}
        for stage in range(stages)
        for data in range(data_parallel)
        for tensor in range(tensor_parallel)
    ]


def make_setup(model: Any, **options: Any) -> TrainingSetup:
    """The setup of these options. Raises InputError for an unknown one."""
    unknown = sorted(set(options) - set(TrainingSetup.__dataclass_fields__))
    if unknown:
        known = ", ".join(TrainingSetup.__dataclass_fields__)
        raise InputError(f"option {unknown[0]}: unknown; there are {known}")
    return TrainingSetup(model=model, **options)


def reference_setup(
    name: str,
    *,
    sequence: int | None = None,
    micro_batch_size: int | None = None,
    options: Mapping[str, Any],
) -> TrainingSetup:
    """The setup of a reference model, with the batch that it trains on unless told otherwise.

    ``options`` are fields of :class:`TrainingSetup`, or replace fields of the model's sizes. Raises
    InputError for an unknown model or field.
    """
    known = TrainingSetup.__dataclass_fields__
    sizes = {field: value for field, value in options.items() if field not in known}
    config = model_config(name, **sizes)
    spec = MODELS[name]
    return TrainingSetup(
        model=config if sizes else name,
        sequence=spec.sequence if sequence is None else sequence,
        micro_batch_size=spec.batch if micro_batch_size is None else micro_batch_size,
        **{field: value for field, value in options.items() if field in known},
    )


_CHOICES: dict[str, tuple[Any, ...]] = {
    "dtype": get_args(Precision),
    "optimizer": ("adamw",),
    "optimizer_implementation": get_args(OptimizerImplementation),
    "checkpoint": get_args(Checkpointing),
    "attention": get_args(AttentionKernel),
}


def _check_at_least_one(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{name}: must be an integer of at least 1, got {value!r}")


def _check_rank(name: str, value: Any, of: str, setup: TrainingSetup) -> None:
    count = getattr(setup, of)
    if not isinstance(value, int) or not 0 <= value < count:
        raise InputError(f"{name}: must be in 0..{count - 1} ({of} = {count}), got {value!r}")
