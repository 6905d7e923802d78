"""How many bytes an operator will create, asked before it runs, for kernels that no plan knows."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from teraio.profiler.dispatch import KernelCall
from teraio.profiler.operators import nested_tensors


class OutputSizes:
    """Predicts output bytes with meta tensors, remembered per operator, shapes and scalars.

    Data-dependent operators (``nonzero``) cannot be predicted; they are taken to create as many
    bytes as they read. Meta tensors hold no data, so nothing is computed and no RNG is consumed.
    """

    def __init__(self, rounding_bytes: int = 1) -> None:
        self._rounding_bytes = rounding_bytes
        self._known: dict[tuple[int, str], int] = {}

    def predict_bytes(self, call: KernelCall) -> int:
        """Bytes that the call's outputs will occupy beside its inputs, rounded as allocated."""
        scalars = repr(tree_map(_hide_tensor, (call.args, call.kwargs)))
        key = (call.signature, scalars)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._ask(call)
        return known

    def _ask(self, call: KernelCall) -> int:
        metas: dict[int, torch.Tensor] = {}
        inputs = list(nested_tensors([call.args, call.kwargs]))

        def to_meta(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return metas.setdefault(id(value), _meta_like(value))
            if isinstance(value, torch.device):
                return torch.device("meta")
            if isinstance(value, torch.Generator):
                return None
            return value

        try:
            args, kwargs = tree_map(to_meta, (list(call.args), call.kwargs))
            outputs = list(nested_tensors(call.func(*args, **kwargs)))
            shared = {meta.untyped_storage()._cdata for meta in metas.values()}
            new = {o.untyped_storage()._cdata: o.untyped_storage().nbytes() for o in outputs}
            sizes = [nbytes for address, nbytes in new.items() if address not in shared]
        # Any failure means only that this operator cannot be predicted (no meta kernel, an output
        # that depends on data); running it for real will tell whether something is wrong.
        except Exception:
            sizes = [t.numel() * t.element_size() for t in inputs]
        rounding = self._rounding_bytes
        return sum(-(-size // rounding) * rounding for size in sizes)


def _meta_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _hide_tensor(value: Any) -> Any:
    return "tensor" if isinstance(value, torch.Tensor) else value
