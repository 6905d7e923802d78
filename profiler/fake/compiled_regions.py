"""Compiled regions without the compiler's last step: what a region takes and returns, and no code.

TorchInductor decides what a compiled region keeps for the backward pass before it generates code:
the graph is captured, differentiated, simplified and cut in two. All of that is left to it here,
so that the regions of a fake trace take and return what the real ones do, in the same order. Only
the generation of code is replaced: a region over fake tensors makes fake outputs, and a dispatch
mode sees it as one operator that bears the name of the real one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._guards import detect_fake_mode
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.utils._python_dispatch import _disable_current_modes

from teraio.profiler.costs.regions import describe_region
from teraio.profiler.fake.region_outputs import OutputLayout

_VIEW_TRACKING = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


class FakeRegion:
    """One compiled graph. Called with a list of inputs, it empties it, as generated code does."""

    def __init__(self, graph: GraphModule, inputs: Sequence[Any]) -> None:
        self._boxed_call = True  # Tells callers to give a list. Wrappers copy no class attributes.
        outputs = _run_graph(graph, inputs)
        self._outputs = OutputLayout(inputs, outputs)
        self.described_call = describe_region(graph, inputs, outputs)

    def __call__(self, inputs: list[Any]) -> Any:
        return _run_region(self, inputs)

    def make_outputs(self, inputs: list[Any]) -> list[Any]:
        """Outputs without values; autograd takes none for a view, like those of generated code."""
        with torch._C._ExcludeDispatchKeyGuard(_VIEW_TRACKING):
            outputs = self._outputs.make(inputs)
        inputs.clear()
        return outputs


def _run_graph(graph: GraphModule, inputs: Sequence[Any]) -> Sequence[Any]:
    # The compiler's fake tensors belong to a mode of its own, which must not meet the active ones.
    with _disable_current_modes(), detect_fake_mode(inputs) or contextlib.nullcontext():
        outputs: Sequence[Any] = graph(*inputs)
    return outputs


class _RegionOperator(HigherOrderOperator):
    """Stands for ``torch.ops.higher_order.inductor_compiled_code``.

    That one cannot be used: under fake tensors it raises (torch 2.11) or forgets which outputs are
    inputs (2.13).
    """

    def __init__(self) -> None:
        super().__init__("teraio_fake_region")  # type: ignore[no-untyped-call]

    def __call__(self, region: FakeRegion, inputs: list[Any]) -> Any:
        return super().__call__(region, inputs)  # type: ignore[no-untyped-call]

    def __str__(self) -> str:
        return "inductor_compiled_code"


_run_region = _RegionOperator()
_run_region.fallthrough(torch._C.DispatchKey.AutogradCPU)  # type: ignore[no-untyped-call]


@_run_region.py_impl(FakeTensorMode)
def _run_fake(mode: FakeTensorMode, region: FakeRegion, inputs: list[Any]) -> list[Any]:
    with mode:
        return region.make_outputs(inputs)


def compile_without_code(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A backend of ``torch.compile`` for fake tensors: TorchInductor's, but for the code."""
    from torch._inductor.compile_fx import compile_fx

    inductor: Any = compile_fx
    # The cache is keyed by the graph, not by who generates the code: it might hold real code.
    with functorch_config.patch(enable_autograd_cache=False):
        compiled: Callable[..., Any] = inductor(graph, inputs, inner_compile=_make_region)
    return compiled


def _make_region(graph: GraphModule, inputs: Sequence[Any], **_: Any) -> FakeRegion:
    return FakeRegion(graph, inputs)
