"""Models whose blocks run as compiled regions, on real devices and over fake tensors alike."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from teraio.errors import InputError
from teraio.profiler.models import layers


def compile_blocks(model: nn.Module) -> int:
    """Have each block of ``model`` compiled whole when it is first called; how many there are.

    Dispatch modes see a block's forward pass as one operator and its backward pass as another. Over
    fake tensors no code is generated. Names of modules and parameters stay as they are. Raises
    InputError if there are no blocks (now), or if one cannot be compiled whole (when called).
    """
    blocks = find_blocks(model)
    if not blocks:
        raise InputError(
            f"compile_blocks: {type(model).__name__} keeps no blocks in a ModuleList or ModuleDict"
        )
    is_virtual = _is_virtual(model)
    options = _compiler_options(is_virtual=is_virtual)
    copies: dict[FunctionType, FunctionType] = {}
    for name, block in blocks:
        forward = _with_own_code(block.forward, copies)
        compiled = torch.compile(forward, fullgraph=True, dynamic=False, **options)
        block.forward = _naming_failures(compiled, name, is_virtual=is_virtual)
    return len(blocks)


def _with_own_code(
    method: Callable[..., Any], copies: dict[FunctionType, FunctionType]
) -> Callable[..., Any]:
    """The method with a code object of this model's blocks.

    The compiler keeps what it compiled by code object, and refuses the ninth variant of one: the
    blocks of a ninth model of the same class, say, or of the same one on longer sequences.
    """
    function = getattr(method, "__func__", None)
    if not isinstance(method, MethodType) or not isinstance(function, FunctionType):
        return method
    if function not in copies:
        copy = copies[function] = FunctionType(
            function.__code__.replace(),
            function.__globals__,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        copy.__kwdefaults__ = function.__kwdefaults__
    return MethodType(copies[function], method.__self__)


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of the entries of every outermost module list or dictionary."""
    blocks: list[tuple[str, nn.Module]] = []
    for name, child in model.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            found = list(child.named_children())
        else:
            found = find_blocks(child)
        blocks += [(f"{name}.{inner}", module) for inner, module in found]
    return blocks


def _is_virtual(model: nn.Module) -> bool:
    tensors = [*model.parameters(), *model.buffers()]
    return any(isinstance(tensor, FakeTensor) for tensor in tensors)


def _compiler_options(*, is_virtual: bool) -> dict[str, Any]:
    if is_virtual:
        try:
            from teraio.profiler.fake.compiled_regions import compile_without_code
        except (ImportError, AttributeError) as error:
            raise InputError(
                f"compile_blocks: teraio knows the compiler of torch 2.11 to 2.15, not that of "
                f"{torch.__version__}; trace without compiled blocks"
            ) from error
        return {"backend": compile_without_code}
    return {"options": {"wrap_inductor_compiled_regions": True}}


def _naming_failures(
    compiled: Callable[..., Any], name: str, *, is_virtual: bool
) -> Callable[..., Any]:
    """``compiled``, whose failures to compile name the block.

    ``is_virtual``: the block chooses its kernels as for the GPU that fake tensors stand for.
    """
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    @functools.wraps(compiled)
    def forward(*args: Any, **kwargs: Any) -> Any:
        before, layers.compiles_virtual = layers.compiles_virtual, is_virtual
        try:
            return compiled(*args, **kwargs)
        except TorchDynamoException as error:
            raise InputError(
                f"{name}: cannot be compiled as one region: {_reason(error)}"
            ) from error
        except FailOnRecompileLimitHit as error:
            raise InputError(
                f"{name}: was called with inputs of too many shapes to compile each; raise "
                "torch._dynamo.config.recompile_limit"
            ) from error
        finally:
            layers.compiles_virtual = before

    return forward


def _reason(error: Exception) -> str:
    """The first line that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    is_told = len(lines) == 1 or not lines[0].endswith("raised:")
    return lines[0] if is_told else lines[1]
