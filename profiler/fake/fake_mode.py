"""Fake tensors on the CPU that stand for a GPU's.

A CPU build of torch cannot make fake CUDA tensors that need gradients (it aborts), so the tensors
are fake CPU tensors, and the trace made of them is labelled ``cuda``. Models call the operators of
the GPU where the CPU has others (attention, dropout).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch._subclasses.fake_tensor import FakeTensorMode

KNOWN_DIFFERENCES = [
    "traced without a GPU, from fake CPU tensors that stand for the GPU's",
    "scratch memory inside operators is known only where it was timed",
    "host tensors (step counters of unfused optimizers) count as the GPU's",
]
"""How a fake trace departs from a measured one, whatever is traced."""


@contextlib.contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Everything that is created inside has shapes but no data."""
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        yield mode
