"""Recomputation only: nothing leaves the GPU; activations are dropped and made again.

Source: activation checkpointing by layer (Chen et al., 2016; ``torch.utils.checkpoint``), for as
many layers, from the first on, as are needed to fit (Megatron-LM's ``recompute-method block`` with
the least ``recompute-num-layers``). The transform ``recompute`` says what is run again.

Limits: whole layers, no choice of cheap operators within them (selective checkpointing); time is
that of the repeated kernels. There are no transfers, so the iteration takes exactly its ideal time
plus theirs. Where parameters, gradients, optimizer state and one layer's activations do not fit,
there is no plan: CapacityError.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Moves, Plan
from teraio.contracts.table import IntArray
from teraio.errors import CapacityError
from teraio.planner.plan_building import build_plan, plan_of_original
from teraio.planner.residency import resident_bytes
from teraio.traces.trace import Trace
from teraio.traces.transforms.recompute import fewest_layers, num_layers, with_recomputation
from teraio.units import format_bytes

NAME = "recompute-only"
TRANSFORM = "recompute"


def plan_recompute_only(trace: Trace, hardware: Hardware, *, bandwidth_share: float = 1.0) -> Plan:
    """The plan that recomputes the fewest layers; ``hardware`` holds the budgets.

    ``bandwidth_share`` changes nothing: there are no transfers. Raises CapacityError if it does not
    fit with every layer recomputed, InputError if the trace has nothing to recompute.
    """
    started = time.perf_counter()
    capacity = hardware.gpu_of_rank(trace.metadata.rank).memory_bytes

    def fits(layers: int) -> bool:
        return bool(_resident(with_recomputation(trace, layers)).max(initial=0) <= capacity)

    layers = fewest_layers(num_layers(trace), fits)
    changed = with_recomputation(trace, layers)
    _check_fits(changed, capacity)
    options = {"layers": layers}
    made = build_plan(
        changed,
        Moves.empty(),
        hardware,
        planner=NAME,
        options={"bandwidth_share": bandwidth_share} | options,
    )
    if layers:
        made = plan_of_original(made, trace, TRANSFORM, options)
    seconds = time.perf_counter() - started
    return replace(made, metadata=replace(made.metadata, planning_seconds=seconds))


def _check_fits(changed: Trace, capacity_bytes: int) -> None:
    """Raise CapacityError that names the kernel if all layers are not enough."""
    resident = _resident(changed)
    kernel = int(np.argmax(resident))
    if resident[kernel] > capacity_bytes:
        needed = int(resident[kernel])
        raise CapacityError(
            f"kernel {kernel} ({changed.kernels.op[kernel]}) needs {needed} bytes "
            f"({format_bytes(needed)}) of GPU memory with all recomputed that can be, but "
            f"{capacity_bytes} ({format_bytes(capacity_bytes)}) are available; under {NAME} "
            "nothing leaves the GPU"
        )


def _resident(trace: Trace) -> IntArray:
    """Bytes per kernel without any move, int64 (K,)."""
    return resident_bytes(
        trace.storages, trace.kernels.workspace_bytes, Moves.empty(), trace.num_kernels
    )
