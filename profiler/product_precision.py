"""The precision of float32 matrix products, a switch of the whole process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def product_precision_of(precision: str) -> Iterator[None]:
    """TF32 for float32 matrix products inside, or not; as it was afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
