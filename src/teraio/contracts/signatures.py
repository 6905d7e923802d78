"""Signatures of kernels: by them a run tells whether a kernel is the one its plan expects."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def kernel_signature(op: str, tensors: Sequence[tuple[tuple[int, ...], str]]) -> int:
    """A 63-bit hash of an operator called with tensors of (shape, dtype such as torch.float32).

    Equal in every process and on every machine.
    """
    digest = hashlib.blake2b(repr((op, list(tensors))).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
