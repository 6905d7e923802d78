"""How long each call should take on a GPU that nobody has at hand.

seconds = max(FLOPs / (peak x share reached), bytes / (memory rate x share reached)) + launch

Peak and shares are those of the operands' precision (:mod:`teraio.profiler.costs.gpus`). Causal
attention does half of the FLOPs that the calls table counts. Collectives move their bytes over the
link. What launches nothing takes no time; a call whose work is unknown takes as long as a launch.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from teraio.contracts.table import FloatArray
from teraio.profiler.costs.arguments import (
    IS_CAUSAL_POSITION,
    base_name,
    has_opaque_part,
    is_causal,
    product_precision,
    tensors_of,
)
from teraio.profiler.costs.gpus import GpuSpec
from teraio.traces.trace import Calls

_PRECISION_OF_DTYPE = {"bfloat16": "bf16", "float16": "fp16"}
_UNEVEN = {
    "_to_copy",
    "cat",
    "clone",
    "mean",
    "sum",
    "_softmax",
    "_softmax_backward_data",
    "_log_softmax",
    "_log_softmax_backward_data",
}
"""Operators whose output is unlike their input, or that read it more than once."""

_COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")


def roofline_seconds(calls: Calls, gpu: GpuSpec, precision: str) -> FloatArray:
    """Seconds of each call, float64 (calls,). ``precision``: fp32, tf32 or bf16."""
    seconds = np.zeros(len(calls))
    for row in range(len(calls)):
        operator, text = str(calls.op[row]), str(calls.arguments[row])
        arguments = json.loads(text)
        moved_bytes = int(calls.read_bytes[row] + calls.written_bytes[row])
        flops = float(calls.flops[row])
        if operator.startswith(_COLLECTIVE_NAMESPACES):
            seconds[row] = _collective_seconds(calls, row, gpu)
            continue
        if moved_bytes == 0 and flops == 0 and not has_opaque_part(arguments):
            continue
        rate = _reached_flops(operator, text, arguments, gpu, precision)
        if is_causal(operator, arguments):
            flops /= 2
        memory_seconds = moved_bytes / (gpu.memory_rate * _memory_share(operator, arguments, gpu))
        # The kernels of a compiled region follow one another.
        is_region = base_name(operator) == "inductor_compiled_code"
        combined = sum if is_region else max
        seconds[row] = combined((flops / rate, memory_seconds)) + gpu.launch_seconds
    return seconds


def _reached_flops(operator: str, text: str, arguments: Any, gpu: GpuSpec, precision: str) -> float:
    """FLOP/s that this operator's products reach."""
    dtypes = [tensor[0] for tensor in tensors_of(arguments)]
    # A compiled region narrows its float32 inputs itself.
    dtype = "bfloat16" if '"bfloat16"' in text else next(iter(dtypes), "float32")
    kind = product_precision(operator, text, precision) or _PRECISION_OF_DTYPE.get(dtype, "fp32")
    is_attention = base_name(operator) in IS_CAUSAL_POSITION
    shares = gpu.efficiencies.attention if is_attention else gpu.efficiencies.matrix
    # TF32 is allowed, not ordered: where it is no faster (GeForce), libraries keep to float32.
    kinds = ("tf32", "fp32") if kind == "tf32" else (kind,)
    return max(gpu.peak[kind] * shares[kind] for kind in kinds)


def _memory_share(operator: str, arguments: Any, gpu: GpuSpec) -> float:
    """Share of the memory's rate that a kernel of this kind reaches."""
    name = base_name(operator)
    if name.startswith(("_fused_", "_foreach_")):
        return gpu.efficiencies.memory_of_lists
    looks = {json.dumps(tensor[:3]) for tensor in tensors_of(arguments) if tensor[1]}
    if len(looks) > 1 or name in _UNEVEN:
        return gpu.efficiencies.memory_if_uneven
    return gpu.efficiencies.memory


def _collective_seconds(calls: Calls, row: int, gpu: GpuSpec) -> float:
    """All that comes in or goes out, whichever is more; an all-reduce does both in turn."""
    read_bytes, written_bytes = int(calls.read_bytes[row]), int(calls.written_bytes[row])
    is_reduced_in_place = "allreduce" in calls.op[row] or "all_reduce" in calls.op[row]
    crossing = read_bytes + written_bytes if is_reduced_in_place else max(read_bytes, written_bytes)
    return crossing / gpu.link_rate + gpu.launch_seconds if crossing else 0.0
