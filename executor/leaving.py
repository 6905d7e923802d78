"""The end of a run whose model does not fit back: what is away loses its memory, not its shape.

A tensor without memory (on the meta device) refuses every use with a message; one whose storage
was merely left empty would be read as garbage, or end the process.
"""

from __future__ import annotations

import torch
from torch import nn

from teraio.executor.mode import ExecutorMode

ON_EXIT = ("restore", "discard")


def let_go(mode: ExecutorMode) -> int:
    """Give up the named tensors (parameters, buffers, gradients, optimizer state) that are away.

    They are on the meta device afterwards; one that others refer to is empty instead. Number of
    bytes that were given up.
    """
    lost_bytes = 0
    with mode.lock, torch._C._DisableTorchDispatch(), torch.no_grad():
        for tensor, _, _ in list(mode.names.tensors()):
            state = mode.registry.find(tensor)
            holding = None if state is None else state.attachment
            if holding is None or holding.is_resident:
                continue
            lost_bytes += holding.state.nbytes
            mode.residency.settle(holding)
            _take_memory(tensor)
        mode.residency.bury()
    return lost_bytes


def _take_memory(tensor: torch.Tensor) -> None:
    shape = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        shape = nn.Parameter(shape, requires_grad=tensor.requires_grad)
        shape.__class__ = type(tensor)
    shape.__dict__.update(tensor.__dict__)
    try:
        torch.utils.swap_tensors(tensor, shape)
    except RuntimeError:
        tensor.data = tensor.new_empty(0)
