"""Fake tensors on the CPU that stand for a GPU's.

A CPU build of torch cannot make fake CUDA tensors that need gradients (it aborts), so the tensors
are fake CPU tensors, and the trace made of them is labelled ``cuda``. Models call the operators of
the GPU where the CPU has others (attention, dropout).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from teraio.profiler.fake.refusals import GpuAutocastError

KNOWN_DIFFERENCES = [
    "traced without a GPU, from fake CPU tensors that stand for the GPU's",
    "scratch memory inside operators is known only where it was timed",
    "host tensors (step counters of unfused optimizers) count as the GPU's",
]
"""How a fake trace departs from a measured one, whatever is traced."""


@contextlib.contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Everything that is created inside has shapes but no data."""
    with (
        FakeTensorMode(allow_non_fake_inputs=False) as mode,
        _truncated_normals_left_out(),
        _autocast_of_gpus_refused(),
        warnings.catch_warnings(),
    ):
        # PyTorch's own deepcopy looks, and asks its users not to.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        _let_modules_be_converted(mode)
        _let_modules_be_copied(mode)
        yield mode


def _let_modules_be_converted(mode: FakeTensorMode) -> None:
    """``module.to(dtype)`` swaps tensors, which PyTorch refuses while anything else knows them.

    What does is the mode's memory of tensors made from real ones, of which there are none here.
    """
    converter: Any = getattr(mode, "fake_tensor_converter", None)
    if hasattr(converter, "set_tensor_memo"):
        converter.set_tensor_memo = lambda *_: None


def _let_modules_be_copied(mode: FakeTensorMode) -> None:
    """Copies of a fake tensor (``nn.TransformerEncoder`` copies its layer) stay in its mode."""
    mode.__deepcopy__ = lambda _: mode  # type: ignore[attr-defined]


@contextlib.contextmanager
def _truncated_normals_left_out() -> Iterator[None]:
    """``nn.init.trunc_normal_`` draws until it likes the values, of which there are none."""

    def leave(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        return tensor

    with mock.patch.object(nn.init, "_no_grad_trunc_normal_", leave):
        yield


@contextlib.contextmanager
def _autocast_of_gpus_refused() -> Iterator[None]:
    """Autocast for CUDA does nothing to the CPU's tensors: the trace would be in float32."""
    make = torch.autocast.__init__

    def check(context: Any, device_type: str, *args: Any, **options: Any) -> None:
        is_enabled = options.get("enabled", args[1] if len(args) > 1 else True)
        if device_type == "cuda" and is_enabled:
            raise GpuAutocastError("autocast('cuda') among fake tensors")
        make(context, device_type, *args, **options)

    with mock.patch.object(torch.autocast, "__init__", check):
        yield
