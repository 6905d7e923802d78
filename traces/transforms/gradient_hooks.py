"""When each parameter's gradient is complete, as PyTorch's hook on it would be told.

``register_post_accumulate_grad_hook`` runs its hook right after the gradient was accumulated. Where
there was one already, a kernel has added to it, and the hook follows that kernel. A first gradient
is taken over as it is: a mere view is made of it, which a trace shows as an access of the next
kernel that neither reads nor writes. So the hook comes before that kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from teraio.contracts.table import MISSING, IntArray
from teraio.errors import InputError
from teraio.traces.trace import Trace
from teraio.traces.transforms.optimizer_units import OptimizerUnits

_CLONE = "aten.clone.default"
"""Copies a first gradient that someone else holds on to, instead of taking it over."""


@dataclass(frozen=True)
class Hook:
    """The last gradient of a unit, a storage, and ``gradients``, the storages of all of them.

    The unit steps before the kernel ``boundary``, after the one that precedes it; units of one
    boundary step in the order of ``rank``. ``was_added``: the kernel before the boundary added to
    the gradient or made it by a copy; else it was taken over, and merely viewed. ``is_early``: not
    if the gradient is complete before the last micro-batch; hooks cannot tell, so the unit steps
    where the loop says.
    """

    boundary: int
    rank: int
    gradient: int
    was_added: bool
    gradients: tuple[int, ...]
    is_early: bool


def find_hooks(trace: Trace, units: OptimizerUnits) -> list[Hook]:
    """One hook per unit. Raises InputError for a unit that no gradient of the backward reaches."""
    gradients = _gradients(trace, units)
    last = _last_accesses(trace, np.concatenate(gradients))
    hooks = []
    for unit, storages in enumerate(gradients):
        if not len(storages) or any(s not in last for s in storages.tolist()):
            name = units.parameters[unit][0]
            raise InputError(
                f"transform: the backward pass makes no gradient for {name}, which the optimizer "
                "steps; plan without the transform"
            )
        latest = max(storages.tolist(), key=lambda s: last[s][:2])
        boundary, rank, was_added = last[latest]
        is_early = _is_in_last_micro_batch(trace, boundary - 1)
        if not is_early:
            boundary, rank = int(units.kernels[0]), len(trace.accesses) + unit
        gradient, all_of_them = latest, tuple(storages.tolist())
        hooks.append(Hook(boundary, rank, gradient, was_added, all_of_them, is_early))
    return hooks


def _is_in_last_micro_batch(trace: Trace, kernel: int) -> bool:
    micro_batch = trace.kernels.micro_batch[kernel]
    return bool(micro_batch == MISSING or micro_batch == trace.metadata.micro_batches - 1)


def _gradients(trace: Trace, units: OptimizerUnits) -> list[IntArray]:
    """Storages of each unit's gradients."""
    is_gradient = trace.storages.kind == "gradient"
    return [np.flatnonzero(is_gradient & (units.owner == u)) for u in range(len(units.parameters))]


def _last_accesses(trace: Trace, gradients: IntArray) -> dict[int, tuple[int, int, bool]]:
    """(boundary, rank, was_added) of each gradient that the backward pass accesses."""
    accesses, kernels = trace.accesses, trace.kernels
    end = int(np.flatnonzero(kernels.phase == "backward").max(initial=-1)) + 1
    wanted = np.zeros(len(trace.storages), dtype=bool)
    wanted[gradients] = True
    in_backward = kernels.phase[accesses.kernel] == "backward"
    in_question = in_backward | (accesses.kernel == end)
    rows = np.flatnonzero(wanted[accesses.storage] & in_question)
    last: dict[int, tuple[int, int, bool]] = {}
    for row, kernel, storage, is_used in zip(
        rows.tolist(),
        accesses.kernel[rows].tolist(),
        accesses.storage[rows].tolist(),
        (accesses.reads | accesses.writes)[rows].tolist(),
        strict=True,
    ):
        is_first = trace.storages.birth[storage] == kernel and kernels.op[kernel] != _CLONE
        if kernel == end:
            known = last.get(storage)
            if (known and not is_used) or _is_unfinished(trace, storage, known, end):
                last[storage] = end, row, False
        elif not is_used:
            last[storage] = kernel, row, False
        elif is_first:
            # Not viewed before the backward pass ended, so at its end at the earliest.
            last[storage] = end, row, False
        else:
            # Before views of the kernel that follows, whose rows are all larger.
            last[storage] = kernel + 1, -1, True
    return last


def _is_unfinished(
    trace: Trace, gradient: int, known: tuple[int, int, bool] | None, end: int
) -> bool:
    """Whether a gradient taken over was still being made in the last kernel of the backward pass.

    The kernel that follows uses it, which hides the view. A module's node makes its gradients one
    after the other, and hooks run when it is done.
    """
    if known is None or known[2]:
        return False
    module = trace.kernels.module
    made_in = module[trace.storages.birth[gradient]]
    return bool((module[known[0] : end] == made_in).all())
