"""What fake tensors cannot do, in one line: which operator, in which module, and what helps.

Fake tensors have shapes but no values. Code that asks for a value, or whose shapes depend on
values, cannot be traced without a GPU. PyTorch raises exceptions of its own then, which name no
module; here they are noted where they happen, and explained once they have left the user's code,
which may as well catch them. Exceptions of any other kind are the user's and stay as they are.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from teraio.errors import InputError, TeraioError

SCALAR = torch.ops.aten._local_scalar_dense.default
"""What ``.item()``, ``bool()``, ``int()`` and ``float()`` of a tensor call."""

PATIENCE = 100_000
"""So often a value may be assumed in one place: a loop that waits for another would never end."""

_CALLS_USERS_CODE = "teraio.profiler.training"
_ON_A_GPU = "profile it on a GPU with `teraio profile`"
_VALUE = (
    "asks for the value of a tensor (.item(), bool(), int(), format()), which tensors without data "
    "do not have; --assume-scalars (assume_scalars=True) answers 1 where it does not matter, as "
    f"for a loss that is logged; else {_ON_A_GPU}"
)
_DEPENDS = f"its result depends on the values of a tensor, and these have none; {_ON_A_GPU}"
_SHAPE = (
    "the shape of its result depends on the values of a tensor (nonzero, unique, a Boolean index), "
    f"and these have none; use a mask or a fixed size, or {_ON_A_GPU}"
)
_UNSUPPORTED = (
    "PyTorch does not know the shape of its result; give it a fake kernel "
    f"(torch.library.register_fake), or {_ON_A_GPU}"
)
_REAL = (
    "a real tensor meets tensors without data; make every tensor inside the function that makes "
    "the model, or in its forward, not when a module is imported"
)
_NUMPY = f"turns a tensor into numbers (.numpy()), and these have none; {_ON_A_GPU}"
_GPU = (
    "asks for a CUDA device; leave out .cuda(), .to('cuda') and device='cuda' (or use x.device): "
    "the trace is labelled cuda all the same"
)
_AUTOCAST = (
    "calls torch.autocast('cuda'), which tensors without data do not heed; use "
    "torch.autocast(x.device.type), or leave it to --dtype bf16 (dtype='bf16')"
)
_GROUPED = (
    "PyTorch multiplies groups of matrices without data (experts) in bfloat16 only; take a "
    f"reference model (mixtral-8x7b), or {_ON_A_GPU}"
)
_CONVERSION = (
    "this PyTorch cannot convert a module of tensors without data; call "
    "torch.set_default_dtype before it is made instead"
)

# PyTorch raises exceptions of common types for these.
_BY_TEXT = (
    ("no fake impl", _UNSUPPORTED),
    ("'allow_non_fake_inputs'", _REAL),
    ("Mixing fake modes", _REAL),
    (".numpy() is not supported for tensor subclasses", _NUMPY),
    ("unsupported format string passed to FakeTensor", _VALUE),
    ("not linked with support for cuda", _GPU),
    ("not compiled with CUDA enabled", _GPU),
    ("Found no NVIDIA driver", _GPU),
    ("CUDA driver version is insufficient", _GPU),
    ("Expected inputs of BF16 type", _GROUPED),
    ("_apply(): Couldn't swap", _CONVERSION),
)


class GpuRequestError(RuntimeError):
    """Code asked for a CUDA tensor among fake ones: PyTorch without CUDA would end the process."""


class GpuAutocastError(RuntimeError):
    """Code asked for autocast on CUDA, which does nothing to fake tensors."""


@dataclass(frozen=True)
class Place:
    """Where something happened. Every part may be empty."""

    operator: str = ""
    module: str = ""
    phase: str = ""
    line: str = ""

    def __str__(self) -> str:
        where = ", ".join(part for part in (self.phase, self.line) if part)
        text = f"{self.operator} in {self.module}" if self.module else self.operator
        return f"{text} ({where})".strip() if where else text


class Refusals:
    """Answers for values where the user wants that, and explains what went wrong elsewhere.

    ``unread_values_in``: modules of Python in which it makes no difference, whatever the user says.
    """

    def __init__(
        self, *, assume_scalars: bool = False, unread_values_in: frozenset[str] = frozenset()
    ) -> None:
        self.model: nn.Module | None = None
        self._assume_scalars = assume_scalars
        self._unread_values_in = unread_values_in
        self._assumed: Counter[Place] = Counter()
        self._failure: tuple[BaseException, Place] | None = None

    def check_device(self, kwargs: Any) -> None:
        """Raise if an operator is to make a CUDA tensor."""
        device = kwargs.get("device") if kwargs else None
        if device is not None and torch.device(device).type == "cuda":
            raise GpuRequestError("a CUDA tensor among fake ones")

    def scalar(self, tensor: torch.Tensor, place: Place) -> Any:
        """The value of a one-element tensor: its own if it is a known constant, else 1.

        Raises DataDependentOutputException where values are not assumed.
        """
        is_known = getattr(tensor, "constant", None) is not None
        if is_known or not self._may_assume():
            return SCALAR(tensor)
        self._assumed[place] += 1
        if self._assumed[place] > PATIENCE:
            raise InputError(
                f"trace: {place}: a value was assumed {PATIENCE} times; the loop around it seems "
                f"to wait for another value; {_ON_A_GPU}"
            )
        if tensor.dtype == torch.bool:
            return True
        return (1.0 + 0j) if tensor.is_complex() else 1.0 if tensor.is_floating_point() else 1

    def _may_assume(self) -> bool:
        frame = _user_frame()
        module = frame.f_globals.get("__name__", "") if frame is not None else ""
        return self._assume_scalars or module in self._unread_values_in

    def note(self, error: BaseException, place: Place) -> None:
        """Remember where an exception began its way."""
        if self._failure is None or self._failure[0] is not error:
            self._failure = error, place

    def assumptions(self) -> list[str]:
        """One line for each place where a value was assumed, for a trace's known differences."""
        return [
            f"a value was assumed to be 1: {place}, {count} times"
            for place, count in self._assumed.items()
        ]

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turns what fake tensors cannot do into an InputError of one line."""
        try:
            yield
        except TeraioError:
            raise
        except Exception as error:
            reason = _reason(error)
            if reason is None:
                raise
            raise InputError(f"trace: {self._place_of(error)}: {reason}") from error

    def _place_of(self, error: BaseException) -> Place:
        if self._failure is not None and self._failure[0] is error:
            return self._failure[1]
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        ours = [frame for frame in frames if not _is_library(frame)]
        operator = str(getattr(error, "func", "")) or "the model"
        line = _line(ours[-1]) if ours else ""
        return Place(operator, self._module_in(frames), "", line)

    def _module_in(self, frames: list[FrameType]) -> str:
        """The innermost module whose code was running, as the model calls it."""
        if self.model is None:
            return ""
        names: dict[int, str] = {id(part): name for name, part in self.model.named_modules()}
        for frame in reversed(frames):
            name = names.get(id(frame.f_locals.get("self")))
            if name is not None:
                return name
        return ""


class BuildingMode(TorchDispatchMode):
    """Watches over operators while a model is being made, when nothing is recorded yet."""

    def __init__(self, refusals: Refusals) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._refusals = refusals

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        try:
            self._refusals.check_device(kwargs)
            if func is SCALAR:
                return self._refusals.scalar(args[0], self._place(func))
            return func(*args, **(kwargs or {}))
        except Exception as error:
            self._refusals.note(error, self._place(func))
            raise

    def _place(self, func: Any) -> Place:
        return Place(str(func), phase="making the model", line=current_line())


def current_line() -> str:
    """File and line of the innermost code that is neither PyTorch's nor ours."""
    frame = _user_frame()
    return "" if frame is None else _line(frame)


def _reason(error: BaseException) -> str | None:
    if isinstance(error, DataDependentOutputException) and error.func is SCALAR:
        return _VALUE
    for kind, reason in _BY_TYPE.items():
        if isinstance(error, kind):
            return reason
    text = str(error)
    return next((reason for part, reason in _BY_TEXT if part in text), None)


_BY_TYPE: dict[type[BaseException], str] = {
    DynamicOutputShapeException: _SHAPE,
    UnsupportedOperatorException: _UNSUPPORTED,
    DataDependentOutputException: _DEPENDS,
    GpuRequestError: _GPU,
    GpuAutocastError: _AUTOCAST,
}


def _user_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_library(frame):
        if str(frame.f_globals.get("__name__", "")).startswith(_CALLS_USERS_CODE):
            return None  # Further out are those who called us.
        frame = frame.f_back
    return frame


def _is_library(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return name in ("torch", "teraio", "contextlib", "unittest", "")


def _line(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
