"""GPUs as data: what their makers state, and how much of it kernels reach.

Peaks are those of dense products with float32 accumulation. ``fp32`` runs on the CUDA cores, the
others on the tensor cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from teraio.errors import InputError

GB = 10**9
TERA = 1e12


@dataclass(frozen=True, kw_only=True)
class Efficiencies:
    """Shares of the stated peaks that kernels reach: products and attention by precision.

    The other kernels are bound by memory. Those whose tensors all look alike (shape, strides and
    type) are vectorised and come close to its rate; operators on lists and all others do not.
    """

    matrix: Mapping[str, float]
    attention: Mapping[str, float]
    memory: float
    memory_of_lists: float
    memory_if_uneven: float


@dataclass(frozen=True, kw_only=True)
class GpuSpec:
    """One GPU: memory (bytes, bytes per second), peaks in FLOP/s by precision.

    ``link_rate`` is what collectives move in one direction, in bytes per second. A kernel takes
    ``launch_seconds`` on the device however little it does. ``library_bytes``: what cuBLAS and
    cuBLASLt keep for themselves.
    """

    name: str
    title: str
    memory_bytes: int
    memory_rate: float
    link_rate: float
    peak: Mapping[str, float]
    efficiencies: Efficiencies
    launch_seconds: float = 2e-6
    library_bytes: int = 2 * 8_519_680


# PyTorch gives both libraries a workspace of 32 MiB each on Hopper (measured on one H200, where the
# allocator holds just so much that no tensor has), elsewhere of 8,519,680 bytes (":4096:2:16:8").
HOPPER_LIBRARY_BYTES = 2 * 32 * 2**20

# Measured on one H200 with torch 2.11 and CUDA 13, random data: means over the kernels of one
# training iteration of llama3.2-3b (3 sequences of 2,048), by the time they take. Products of
# 8192 x 8192 matrices reach 0.76 (fp32), 0.82 (TF32) and 0.77 (bf16) of the peak; in TF32 those of
# weight gradients, whose operands are both transposed, reach 0.5. Single products depart from the
# mean by a tenth: tiles that fill the last wave badly are not modelled.
H200_EFFICIENCIES = Efficiencies(
    matrix={"fp32": 0.755, "tf32": 0.60, "bf16": 0.757, "fp16": 0.757},
    attention={"fp32": 0.525, "tf32": 0.071, "bf16": 0.423, "fp16": 0.423},
    memory=0.83,
    memory_of_lists=0.69,
    memory_if_uneven=0.51,
)

# Nobody has measured these here: the H200's shares, transferred.
TRANSFERRED = H200_EFFICIENCIES

# NVIDIA H100 data sheet (SXM5 and NVL columns). It states tensor core rates with 2:4 sparsity,
# which are halved here. NVLink: 900 GB/s (SXM) and 600 GB/s (NVL bridge), both directions together.
_H100_SXM_PEAK = {
    "fp32": 67 * TERA,
    "tf32": 494.5 * TERA,
    "bf16": 989.5 * TERA,
    "fp16": 989.5 * TERA,
}

_GPUS = (
    GpuSpec(
        name="h100-nvl",
        title="NVIDIA H100 NVL",
        memory_bytes=94 * GB,
        memory_rate=3900 * GB,
        link_rate=300 * GB,
        peak={
            "fp32": 60 * TERA,
            "tf32": 417.5 * TERA,
            "bf16": 835.5 * TERA,
            "fp16": 835.5 * TERA,
        },
        efficiencies=TRANSFERRED,
        library_bytes=HOPPER_LIBRARY_BYTES,
    ),
    GpuSpec(
        name="h100-sxm",
        title="NVIDIA H100 SXM5",
        memory_bytes=80 * GB,
        memory_rate=3350 * GB,
        link_rate=450 * GB,
        peak=_H100_SXM_PEAK,
        efficiencies=TRANSFERRED,
        library_bytes=HOPPER_LIBRARY_BYTES,
    ),
    # NVIDIA H200 data sheet: compute as H100 SXM5, 141 GB at 4.8 TB/s, NVLink 900 GB/s.
    GpuSpec(
        name="h200",
        title="NVIDIA H200",
        memory_bytes=141 * GB,
        memory_rate=4800 * GB,
        link_rate=450 * GB,
        peak=_H100_SXM_PEAK,
        efficiencies=H200_EFFICIENCIES,
        library_bytes=HOPPER_LIBRARY_BYTES,
    ),
    # NVIDIA A100 data sheet, 80 GB SXM column: 2,039 GB/s, NVLink 600 GB/s.
    GpuSpec(
        name="a100-80",
        title="NVIDIA A100 80GB SXM",
        memory_bytes=80 * GB,
        memory_rate=2039 * GB,
        link_rate=300 * GB,
        peak={"fp32": 19.5 * TERA, "tf32": 156 * TERA, "bf16": 312 * TERA, "fp16": 312 * TERA},
        efficiencies=TRANSFERRED,
    ),
    # NVIDIA L40S data sheet: 864 GB/s, PCIe 4.0 x16 at 64 GB/s both directions together.
    GpuSpec(
        name="l40s",
        title="NVIDIA L40S",
        memory_bytes=48 * GB,
        memory_rate=864 * GB,
        link_rate=32 * GB,
        peak={
            "fp32": 91.6 * TERA,
            "tf32": 183 * TERA,
            "bf16": 362.05 * TERA,
            "fp16": 362.05 * TERA,
        },
        efficiencies=TRANSFERRED,
    ),
    # NVIDIA Ada GPU architecture whitepaper, appendix A: FP16 and BF16 with FP32 accumulation.
    GpuSpec(
        name="rtx4090",
        title="NVIDIA GeForce RTX 4090",
        memory_bytes=24 * GB,
        memory_rate=1008 * GB,
        link_rate=32 * GB,
        peak={
            "fp32": 82.6 * TERA,
            "tf32": 82.6 * TERA,
            "bf16": 165.2 * TERA,
            "fp16": 165.2 * TERA,
        },
        efficiencies=TRANSFERRED,
    ),
    # NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A; PCIe 5.0 x16.
    GpuSpec(
        name="rtx5090",
        title="NVIDIA GeForce RTX 5090",
        memory_bytes=32 * GB,
        memory_rate=1792 * GB,
        link_rate=64 * GB,
        peak={
            "fp32": 104.8 * TERA,
            "tf32": 104.8 * TERA,
            "bf16": 209.5 * TERA,
            "fp16": 209.5 * TERA,
        },
        efficiencies=TRANSFERRED,
    ),
)

GPUS: dict[str, GpuSpec] = {gpu.name: gpu for gpu in _GPUS}
"""By name."""


def as_gpu(gpu: str | GpuSpec) -> GpuSpec:
    """The value itself, or the one of this name. Raises InputError for an unknown name."""
    if isinstance(gpu, GpuSpec):
        return gpu
    if gpu not in GPUS:
        raise InputError(f"gpu: {gpu!r} is not one of {', '.join(GPUS)}")
    return GPUS[gpu]
