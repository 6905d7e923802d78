"""How much a probe measures: in full, or roughly and in seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True)
class Effort:
    """Sizes of transfers, working sets (each direction's, in memory and on a disk) and rounds.

    Working sets are larger than what caches hold, ``round_seconds`` is the time of one round of
    transfers (``disk_round_seconds`` on a disk) and ``kernel_seconds`` that of a loop of kernels.
    ``limit_seconds`` ends the rounds of one kind of kernel on a busy machine. ``sustained_seconds``
    is how long each disk is written to.
    """

    sizes: tuple[int, ...]
    memory_bytes: int
    disk_bytes: int
    rounds: int
    round_seconds: float
    disk_round_seconds: float
    kernels: tuple[str, ...]
    kernel_seconds: float
    limit_seconds: float
    sustained_seconds: float


FULL = Effort(
    sizes=(256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * 10**6),
    memory_bytes=512 * MIB,
    disk_bytes=1024 * MIB,
    rounds=5,
    round_seconds=0.25,
    disk_round_seconds=0.25,
    kernels=("fp32 matmul", "bf16 matmul", "elementwise", "attention"),
    kernel_seconds=0.2,
    limit_seconds=15.0,
    sustained_seconds=60.0,
)
QUICK = Effort(
    sizes=(MIB, 4 * MIB, 16 * MIB),
    memory_bytes=64 * MIB,
    disk_bytes=64 * MIB,
    rounds=3,
    round_seconds=0.02,
    disk_round_seconds=0.02,
    kernels=("fp32 matmul", "elementwise"),
    kernel_seconds=0.03,
    limit_seconds=0.8,
    sustained_seconds=0.0,
)
QUICK_GPU = replace(
    QUICK, sizes=(MIB, 8 * MIB, 64 * MIB), disk_bytes=512 * MIB, disk_round_seconds=0.2
)
"""Copies of a GPU are fast enough for sizes at which their rate is the final one; what it offloads
is large, and a virtual disk is not as fast in each of its parts and moments.
"""
