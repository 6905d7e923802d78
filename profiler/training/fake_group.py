"""A process group of one process that plays any rank of any number: nothing is sent anywhere.

What a rank does depends on the others' shapes only, so one process can run the part of each rank in
turn. Results are nonsense wherever they come from another rank; with fake tensors there are none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import distributed

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
    _register_backend()
    distributed.init_process_group(
        "fake", store=distributed.HashStore(), rank=rank, world_size=world_size
    )
    try:
        yield
    finally:
        distributed.destroy_process_group()


def _register_backend() -> None:
    """Make the backend known. It lives in a module of torch's tests, which registers it."""
    try:
        import torch.testing._internal.distributed.fake_pg
    except ImportError as error:
        raise InputError(
            f"parallel training: this PyTorch ({torch.__version__}) has no fake process group; "
            "teraio knows the one of torch 2.9 to 2.13"
        ) from error
