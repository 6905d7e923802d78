"""Kernels that no dispatcher shows, seen as one opaque operator each.

Triton launches and functions of C++ extensions that are no registered operators take raw pointers
of their arguments. While a recorder or an executed run is active each such call becomes a kernel
like any other, which reads and may write every tensor among its arguments: what it touches is
resident, held during the call, and stale elsewhere afterwards. Recorder and executor see the same.

Seen: ``kernel[grid](...)`` of Triton (autotuned, heuristic and compiled ones too), and functions of
extension modules, known by the tensors in the signatures that pybind11 writes, whether they were
imported before or are during the run. Whatever else is to be seen goes through :func:`guard`.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any, Self, TypeVar
from unittest import mock

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

from teraio.errors import InputError
from teraio.profiler.dispatch import KernelMode
from teraio.profiler.operators import Operator, OperatorKind

T = TypeVar("T")
Beside = Callable[[list[torch.Tensor], Callable[[], Any]], Any]
"""Runs a call that is part of another kernel, or of no kernel, given the tensors that it takes."""

_TENSOR_TYPES = ("torch.Tensor", "at::Tensor")
_OWN_PACKAGES = ("torch", "triton", "numpy", "teraio")

_active: list[RawKernels] = []


class RawKernels:
    """Sees raw kernels on behalf of a mode; a context manager around the loop that is watched.

    ``beside`` runs calls inside other kernels and in other threads, which are no kernels of their
    own; by default they just run.
    """

    def __init__(self, mode: KernelMode, beside: Beside | None = None) -> None:
        self._mode = mode
        self._beside = beside or _just_run
        self._operators: dict[str, Operator] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            _active.append(self)
            stack.callback(_active.remove, self)
            for module in list(sys.modules.values()):
                self._see_extension(module)
            self._see_imports(stack)
            if _uses_triton(self._mode):
                self._see_triton(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)

    def call(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function as the kernel ``name``; its tensors are its arguments, however nested."""
        mode = self._mode
        tensors = list(_tensors_in((args, kwargs)))
        if mode.is_idle or not tensors:
            return function(*args, **kwargs)
        if _get_current_dispatch_mode() is not mode:
            return self._beside(tensors, lambda: function(*args, **kwargs))

        def run(_: list[torch.Tensor]) -> Any:
            with _pop_mode_temporarily():
                return function(*args, **kwargs)

        operator = self._operators.get(name)
        if operator is None:
            operator = self._operators[name] = _opaque(name)
        return mode._run(run, operator, (tensors,), {})

    def beside(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call what reads pointers without being a kernel."""
        tensors = list(_tensors_in((args, kwargs)))
        return self._beside(tensors, lambda: function(*args, **kwargs))

    # Extensions

    def _see_imports(self, stack: ExitStack) -> None:
        """See the functions of extensions that are imported from now on."""
        loader = importlib.machinery.ExtensionFileLoader
        original = loader.exec_module

        def exec_module(self: Any, module: types.ModuleType) -> None:
            original(self, module)
            if _active:
                _active[-1]._see_extension(module)

        stack.enter_context(mock.patch.object(loader, "exec_module", exec_module))

    def _see_extension(self, module: Any) -> None:
        if not _is_foreign_extension(module):
            return
        for name, function in list(vars(module).items()):
            if _takes_tensors(function):
                setattr(module, name, guard(function, name=f"{module.__name__}.{name}"))

    # Triton

    def _see_triton(self, stack: ExitStack) -> None:
        from triton.compiler import CompiledKernel
        from triton.runtime.interpreter import GridExecutor
        from triton.runtime.jit import JITFunction

        # Interpreted kernels differ between versions in what comes before the executor of a grid.
        for launcher, method in ((JITFunction, "run"), (GridExecutor, "__call__")):
            launch = self._launching(getattr(launcher, method))
            stack.enter_context(mock.patch.object(launcher, method, launch))
        bind = CompiledKernel.__getitem__

        def bound(kernel: Any, grid: Any) -> Callable[..., Any]:
            launch, name = bind(kernel, grid), f"triton.{getattr(kernel, 'name', 'compiled')}"
            return lambda *args, **kwargs: self.call(name, launch, args, kwargs)

        stack.enter_context(mock.patch.object(CompiledKernel, "__getitem__", bound))
        with suppress(ImportError):  # Triton before 3.4 has none.
            self._see_descriptors(stack)

    def _see_descriptors(self, stack: ExitStack) -> None:
        """A descriptor asks for its tensor's pointer only to see whether that is aligned."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        check = TensorDescriptor.__post_init__

        def checked(descriptor: Any) -> None:
            self.beside(check, (descriptor,), {})

        stack.enter_context(mock.patch.object(TensorDescriptor, "__post_init__", checked))

    def _launching(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def launch(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            name = getattr(kernel, "__name__", None) or getattr(kernel.fn, "__name__", "kernel")
            return self.call(f"triton.{name}", functools.partial(run, kernel), args, kwargs)

        return launch


def guard(function: T, name: str | None = None) -> T:
    """A function that takes raw pointers of its tensor arguments, made safe for offloading.

    While a recorder or an executed run is active, a call is one kernel: the tensors among its
    arguments (in lists, tuples and dictionaries too) are on the GPU and stay there until it
    returns, and count as written. At other times it is just called. Of a module all public
    functions are replaced, and the module is returned. Raises InputError for anything else.
    """
    if isinstance(function, types.ModuleType):
        for attribute, value in list(vars(function).items()):
            if callable(value) and not isinstance(value, type) and not attribute.startswith("_"):
                setattr(function, attribute, guard(value, f"{function.__name__}.{attribute}"))
        return function
    if not callable(function):
        raise InputError(f"guard: expected a function or module, got {type(function).__name__}")
    if getattr(function, "_teraio_is_guarded", False):
        return function
    kernel = f"extension.{name or getattr(function, '__qualname__', 'function')}"

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if not _active:
            return function(*args, **kwargs)
        return _active[-1].call(kernel, function, args, kwargs)

    guarded._teraio_is_guarded = True  # type: ignore[attr-defined]
    return guarded  # type: ignore[return-value]


def _opaque(name: str) -> Operator:
    return Operator(
        name=name,
        kind=OperatorKind.KERNEL,
        reads=(),
        writes=(),
        positions={},
        may_resize=False,
        is_collective=False,
    )


def _just_run(_: list[torch.Tensor], call: Callable[[], Any]) -> Any:
    return call()


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Plain tensors inside containers, wrappers (DTensor), and Triton's descriptors of them."""
    if hasattr(value, "__tensor_flatten__"):
        names, _ = value.__tensor_flatten__()
        yield from _tensors_in([getattr(value, name) for name in names])
    elif isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(getattr(value, "base", None), torch.Tensor):
        yield value.base


def _is_foreign_extension(module: Any) -> bool:
    """Whether a module is compiled code of neither PyTorch nor anything that knows no tensors."""
    loader = getattr(getattr(module, "__spec__", None), "loader", None)
    if not isinstance(loader, importlib.machinery.ExtensionFileLoader):
        return False
    return str(module.__name__).partition(".")[0] not in _OWN_PACKAGES


def _takes_tensors(function: Any) -> bool:
    """Whether a compiled function's signature, the first lines of its docstring, names tensors."""
    if not isinstance(function, types.BuiltinFunctionType):
        return False
    text = function.__doc__ or ""
    return any(name in text for name in _TENSOR_TYPES)


def _uses_triton(mode: KernelMode) -> bool:
    """Whether a training may launch Triton kernels: it has it imported, or could on this device."""
    if "triton" in sys.modules:
        return True
    is_gpu = mode.registry.device_type == "cuda"
    return is_gpu and importlib.util.find_spec("triton") is not None
