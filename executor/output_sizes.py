"""How many bytes an operator will create, asked before it runs, for kernels that no plan knows."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

from teraio.profiler.dispatch import KernelCall
from teraio.profiler.operators import Operator, nested_tensors

_SIZE_ARGUMENTS = {"end", "k", "n", "output_size", "pad", "repeats", "size", "steps"}
_MAX_REMEMBERED = 4096


class _CannotAskError(Exception):
    """No meta tensors can stand for the arguments."""


class Prediction(NamedTuple):
    """Bytes beside the inputs, in all, and (``sizes``) of each output; ``is_guess``: the operator
    could not be asked, and ``sizes`` are not known.
    """

    nbytes: int
    is_guess: bool
    sizes: tuple[int, ...]


class OutputSizes:
    """Predicts output bytes with meta tensors, remembered per operator, shapes and scalars.

    Data-dependent operators (``nonzero``), compiled regions and collectives cannot be asked; the
    guess is that they create as many bytes as they read. A storage made without an operator counts
    as created by the ``set_`` that gives it to a tensor. Meta tensors hold no data, so nothing is
    computed and no RNG is consumed.
    """

    def __init__(self, rounding_bytes: int = 1) -> None:
        self._rounding_bytes = rounding_bytes
        self._known: dict[Hashable, Prediction] = {}
        self._depends_on_scalars: dict[str, bool] = {}

    def depends_on_scalars(self, operator: Operator) -> bool:
        """Whether equal input shapes may mean other output sizes (``zeros``, ``repeat``)."""
        known = self._depends_on_scalars.get(operator.name)
        if known is None:
            known = not _SIZE_ARGUMENTS.isdisjoint(operator.positions)
            self._depends_on_scalars[operator.name] = known
        return known

    def predict(self, call: KernelCall) -> Prediction:
        """Bytes that the call's outputs will occupy beside its inputs, rounded as allocated."""
        # A step size changes from step to step and no output with it, except that of arange.
        keeps_floats = not call.flags
        key = (
            call.signature,
            _scalars_of(call.args, keeps_floats),
            _scalars_of(call.kwargs, keeps_floats),
        )
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MAX_REMEMBERED:
                self._known.clear()
            known = self._known[key] = self._ask(call)
        return known

    def _ask(self, call: KernelCall) -> Prediction:
        inputs = list(nested_tensors([call.args, call.kwargs]))
        try:
            if not isinstance(call.func, torch._ops.OpOverload) or call.operator.is_collective:
                raise _CannotAskError
            sizes = _sizes_of_outputs(call)
        # Any failure means only that this operator cannot be predicted (no meta kernel, an output
        # that depends on data); running it for real will tell whether something is wrong.
        except Exception:
            sizes = [t.numel() * t.element_size() for t in inputs]
            sizes += [a.nbytes() for a in call.args if isinstance(a, torch.UntypedStorage)]
            return Prediction(sum(self._rounded(sizes)), is_guess=True, sizes=())
        rounded = tuple(self._rounded(sizes))
        return Prediction(sum(rounded), is_guess=False, sizes=rounded)

    def _rounded(self, sizes: list[int]) -> Iterator[int]:
        rounding = self._rounding_bytes
        return (-(-size // rounding) * rounding for size in sizes)


def _sizes_of_outputs(call: KernelCall) -> list[int]:
    """Bytes of each storage that the call makes or resizes."""
    metas: dict[int, torch.Tensor] = {}

    def to_meta(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return metas.setdefault(id(value), _meta_like(value))
        if isinstance(value, torch.device):
            return torch.device("meta")
        if isinstance(value, torch.Generator):
            return None
        if isinstance(value, torch.UntypedStorage):
            raise _CannotAskError
        return value

    args, kwargs = tree_map(to_meta, (list(call.args), call.kwargs))
    before = {m.untyped_storage()._cdata: m.untyped_storage().nbytes() for m in metas.values()}
    outputs = [*nested_tensors(call.func(*args, **kwargs)), *metas.values()]
    after = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in outputs}
    return [nbytes for address, nbytes in after.items() if before.get(address) != nbytes]


def _meta_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _scalars_of(value: Any, keeps_floats: bool) -> Hashable:
    """What of an argument may decide a size, as a dictionary key."""
    if isinstance(value, (int, str, bool, torch.dtype, torch.device, torch.layout)):
        return value
    if isinstance(value, torch.UntypedStorage):
        return value.nbytes()
    if isinstance(value, float):
        return value if keeps_floats else None
    if isinstance(value, (list, tuple)):
        return tuple(_scalars_of(item, keeps_floats) for item in value)
    if isinstance(value, dict):
        return tuple((key, _scalars_of(item, keeps_floats)) for key, item in value.items())
    return type(value).__name__
