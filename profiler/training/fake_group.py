"""A process group of one process that plays any rank of any number: nothing is sent anywhere.

What a rank does depends on the others' shapes only, so one process can run the part of each rank in
turn. Results are nonsense wherever they come from another rank; with fake tensors there are none.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import distributed
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from teraio.errors import InputError


@contextlib.contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """torch.distributed as ``rank`` of ``world_size`` sees it, without the other processes.

    Raises InputError where torch.distributed is missing or in use, or for a rank out of range.
    """
    if not distributed.is_available():
        raise InputError(
            f"parallel training: this PyTorch ({torch.__version__}) has no torch.distributed"
        )
    if distributed.is_initialized():
        raise InputError(
            "parallel training: torch.distributed is initialised already "
            f"({distributed.get_backend()}, rank {distributed.get_rank()} of "
            f"{distributed.get_world_size()}); trace outside of it"
        )
    if not 0 <= rank < world_size:
        raise InputError(f"rank: must be in 0..{world_size - 1}, got {rank}")
    report_uncaught = sys.excepthook  # PyTorch puts one in its place that prints the rank.
    distributed.init_process_group("fake", store=_make_store(), rank=rank, world_size=world_size)
    try:
        with contextlib.ExitStack() as stack:
            _take_measures(stack)
            yield
    finally:
        distributed.destroy_process_group()
        sys.excepthook = report_uncaught


# [Note: measures] PyTorch takes fake tensors for a compiler at work and then does other things than
# for a person. What makes this process behave like one rank of a running program is private to
# PyTorch; other versions may need other measures. Tests compare with real groups.


def _measures() -> Iterator[contextlib.AbstractContextManager[Any]]:
    from torch.distributed import _functional_collectives as collectives
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import _sharding_prop

    yield _forgetting()
    # Meshes compute with the numbers of their ranks, which fake tensors do not have.
    yield mock.patch.object(DeviceMesh, "__init__", _outside_fake_mode(DeviceMesh.__init__))
    # Distributed tensors learn shapes from fake ones of their own: those of the caller are kernels.
    yield mock.patch.object(_sharding_prop, "detect_fake_mode", _no_fake_mode)
    # They remember what they have learnt, and wait for a collective where its result is first used.
    asked = collectives._are_we_tracing
    for module in [m for n, m in sys.modules.items() if n.startswith("torch.distributed.")]:
        if getattr(module, "_are_we_tracing", None) is asked:
            yield mock.patch.object(module, "_are_we_tracing", _is_not_compiling)
    yield mock.patch.object(collectives, "_maybe_wrap_tensor", collectives.AsyncCollectiveTensor)
    # Waiting returns the very tensor; for a compiler it returns another.
    wait = torch.ops._c10d_functional.wait_tensor.default
    yield mock.patch.dict(fake_impls.op_implementations_dict, {wait: _return_same})
    # A transfer under way holds what it sends.
    yield mock.patch.object(
        distributed.ProcessGroup, "send", _holding(distributed.ProcessGroup.send)
    )


@contextlib.contextmanager
def _forgetting() -> Iterator[None]:
    """Nothing that PyTorch has learnt about tensors of one group serves another.

    Meshes of two ranks count as equal, so a distributed tensor of the second would otherwise talk
    to the groups of the first.
    """
    _forget()
    try:
        yield
    finally:
        _forget()


def _forget() -> None:
    from torch.distributed.tensor import DTensor, _redistribute

    FakeTensorMode.cache_clear()
    _redistribute._gen_transform_infos.cache_clear()
    learnt: Any = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    learnt.cache.cache_clear()
    # PyTorch 2.10 and later remember the same a second time.
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()


def _outside_fake_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


def _no_fake_mode(*_: Any) -> None:
    return None


def _is_not_compiling() -> bool:
    return False


def _return_same(_: FakeTensorMode, __: Any, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _holding(send: Callable[..., Any]) -> Callable[..., Any]:
    """``ProcessGroup.send`` whose work keeps the tensors alive as long as it lives itself."""

    def call(group: distributed.ProcessGroup, tensors: list[Any], *args: Any) -> Any:
        work = send(group, tensors, *args)
        weakref.finalize(work, tensors.clear)
        return work

    return call


def _take_measures(stack: contextlib.ExitStack) -> None:
    try:
        for measure in _measures():
            stack.enter_context(measure)
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"parallel training: PyTorch {torch.__version__} is not made like those that teraio "
            f"knows, 2.11 to 2.15 ({error})"
        ) from error


def _make_store() -> Any:
    """A store that stores nothing. Importing its module, one of torch's tests', makes "fake" known
    as a backend.
    """
    try:
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as error:
        raise InputError(
            f"parallel training: PyTorch {torch.__version__} has no fake process group; teraio "
            "knows the one of torch 2.11 to 2.15"
        ) from error
    return FakeStore()
