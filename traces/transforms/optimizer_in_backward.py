"""``optimizer-in-backward``: each parameter steps as soon as its gradient is complete.

The kernels of the optimizer that step one parameter (one bucket, where they take lists: see
:mod:`optimizer_units`) move to where the last of its gradients is complete (:mod:`gradient_hooks`)
and keep their order. Gradients die right after, instead of at ``zero_grad``, so that states come to
the GPU and gradients leave it while the backward pass goes on. That is the order in which
``teraio.execute`` runs a plan that names this transform: hooks on the gradients step the
parameters, and drop gradients unless the recorded loop kept them (``set_to_none=False``).

Where a pipeline's schedule divides all gradients by the number of micro-batches before the step,
each is divided right before its own step. A gradient that is complete before the last micro-batch
waits for the loop's own step, since no hook can tell that no other will come.

Refused is what would change results: a kernel between the new place of a step and its old one that
uses what the step writes, or writes what the step uses (clipping by a norm of all gradients, scaled
losses), and an optimizer that looks across parameters.

The result equals, kernel by kernel, what is recorded of a loop with such hooks, in operators,
signatures, births, deaths and accesses, with these exceptions. Phase and module of a moved kernel
stay those of the optimizer. A shared kernel's time is divided among its parts by parameters, and
its signature is kept where the parts' own cannot be told; for gradients that wait for the loop it
runs once. Storages viewed but not used between two kernels, of which one moved, may be accessed at
the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from teraio.contracts.table import MISSING, BoolArray, IntArray
from teraio.errors import InputError
from teraio.traces.trace import Trace
from teraio.traces.transforms.gradient_hooks import Hook, find_hooks
from teraio.traces.transforms.kernel_order import KernelOrder
from teraio.traces.transforms.moved_tables import reordered
from teraio.traces.transforms.optimizer_kernels import place_kernels
from teraio.traces.transforms.optimizer_units import OptimizerUnits, find_units, scaled_gradients


def optimizer_in_backward(trace: Trace, options: Mapping[str, Any]) -> Trace:
    """The trace in which every parameter steps in the backward pass; there are no options.

    Raises InputError that names the kernel which makes that impossible.
    """
    if options:
        raise InputError(f"transform: optimizer-in-backward has no option {next(iter(options))!r}")
    first = _first_optimizer_kernel(trace)
    units = find_units(trace)
    placed = place_kernels(units, trace.kernels.op[first:].tolist())
    hooks = find_hooks(trace, units)
    scaling = [(int(units.owner[storage]),) for storage in _scaled_last(trace, units, first)]
    first, placed = first - len(scaling), scaling + placed
    _check_dependences(trace, units, hooks, first)
    return reordered(trace, KernelOrder(first, units, placed, hooks))


def _first_optimizer_kernel(trace: Trace) -> int:
    """Where the one step of the iteration begins, with which it also ends."""
    steps, num_kernels = trace.metadata.optimizer_steps, trace.num_kernels
    if steps != 1:
        raise InputError(
            f"transform: optimizer-in-backward needs one optimizer step per iteration, "
            f"and the trace has {steps}; plan without the transform"
        )
    kernels = np.flatnonzero(trace.kernels.phase == "optimizer")
    if not len(kernels):
        raise InputError("transform: the trace has no kernels of an optimizer to move")
    if kernels[0] + len(kernels) != num_kernels:
        between = np.setdiff1d(np.arange(kernels[0], num_kernels), kernels)[0]
        raise InputError(
            f"transform: kernel {between} ({trace.kernels.op[between]}) runs inside the optimizer "
            "step but is not the optimizer's (a closure?); plan without the transform"
        )
    return int(kernels[0])


def _scaled_last(trace: Trace, units: OptimizerUnits, first: int) -> list[int]:
    """Gradients that the kernels right before the optimizer step scale, one each, in order."""
    scaled = scaled_gradients(trace)
    gradients: list[int] = []
    while (storage := scaled.get(first - 1 - len(gradients))) is not None:
        if units.owner[storage] < 0 or trace.storages.birth[storage] == MISSING:
            break
        gradients.insert(0, storage)
    return gradients


def _check_dependences(trace: Trace, units: OptimizerUnits, hooks: list[Hook], first: int) -> None:
    """Raise InputError for a kernel that a step must not overtake."""
    accesses, in_step = trace.accesses, trace.accesses.kernel >= first
    is_changed = np.zeros(len(trace.storages), dtype=bool)
    is_changed[accesses.storage[in_step & accesses.writes]] = True
    for hook in hooks:
        # Dropped after the step, unless the loop keeps them.
        is_changed[[s for s in hook.gradients if trace.storages.birth[s] != MISSING]] = True
    last_use = _last_kernels(trace, ~in_step & (accesses.reads | accesses.writes))
    last_write = _last_kernels(trace, ~in_step & accesses.writes)
    latest = np.where(is_changed, last_use, last_write)
    boundary = np.array([hook.boundary for hook in hooks])
    is_used = np.zeros(len(trace.storages), dtype=bool)
    is_used[accesses.storage[in_step]] = True
    used = np.flatnonzero(is_used)
    # What no unit owns serves all of them (a learning rate in a tensor).
    allowed = np.where(units.owner >= 0, boundary[units.owner], boundary.min())
    late = used[latest[used] >= allowed[used]]
    if len(late):
        storage = int(late[np.argmin(latest[late])])
        _refuse(trace, int(latest[storage]), storage)


def _last_kernels(trace: Trace, rows: BoolArray) -> IntArray:
    """Last kernel of the chosen accesses to each storage, MISSING if there is none, int64 (S,)."""
    last: IntArray = np.full(len(trace.storages), MISSING)
    np.maximum.at(last, trace.accesses.storage[rows], trace.accesses.kernel[rows])
    return last


def _refuse(trace: Trace, kernel: int, storage: int) -> None:
    op = trace.kernels.op[kernel]
    name = trace.storages.name[storage] or f"storage {storage}"
    raise InputError(
        f"transform: kernel {kernel} ({op}) uses {name} after its gradient is complete and before "
        "the optimizer step, as clipping by a norm of all gradients, scaled losses and logging of "
        "gradients do; take it out of the loop, or plan without the transform"
    )
