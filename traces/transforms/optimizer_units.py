"""Which parameters step together, and which kernels of the optimizer step them.

A *unit* is the smallest group of parameters whose step touches nothing of any other: one parameter
where the optimizer loops over them, one bucket where its operators take lists (``_foreach_*``,
``_fused_*``). Units are read off the accesses: what two kernels of the optimizer both use ties them
together, unless it is a constant (a learning rate in a tensor). Counts of steps are one scalar per
parameter, so a list operator over them is not cut into buckets: such a kernel ties nothing; it is
*shared*, and runs once for each unit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from teraio.contracts.plan import Plan, PlanStorages
from teraio.contracts.table import MISSING, IntArray
from teraio.errors import InputError
from teraio.traces.trace import Storages, Trace

UNKNOWN, SHARED = -1, -2
"""In place of a unit: of a kernel that accesses nothing to know it by; of one that several share.
"""

_LIST_PREFIXES = ("aten._foreach_", "aten._fused_")
_SCALAR_BYTES = 8


@dataclass(frozen=True)
class OptimizerUnits:
    """Units, numbered in the order in which the optimizer first comes to them.

    ``parameters``: names per unit, in the optimizer's order. ``kernels``: indices of the
    optimizer's kernels, int64 (kernels,); ``unit_of_kernel``: of each a unit, UNKNOWN or SHARED;
    ``sharing``: the units of a shared kernel, by its place among ``kernels``. ``owner``: unit of
    each storage that only one unit uses in the step, else UNKNOWN, int64 (S,).
    """

    parameters: tuple[tuple[str, ...], ...]
    kernels: IntArray
    unit_of_kernel: IntArray
    sharing: dict[int, tuple[int, ...]]
    owner: IntArray


def is_list_operator(op: str) -> bool:
    """Whether an operator takes lists of tensors, one per parameter, and is cut into buckets."""
    return op.startswith(_LIST_PREFIXES)


def find_units(source: Trace | Plan) -> OptimizerUnits:
    """The units of a trace, or of a plan that was made for one.

    Raises InputError that names a kernel whose work cannot be divided by parameters.
    """
    kernels = np.flatnonzero(source.kernels.phase == "optimizer")
    touched, is_written = _touched(source, kernels)
    names = _parameter_names(source.storages)
    persistent = source.storages.birth == MISSING
    constant = {s for s in set().union(*touched) if persistent[s] and not is_written[s]}
    constant -= names.keys()
    ops = source.kernels.op[kernels].tolist()
    ties = _Ties()
    nodes: list[list[str | int]] = []
    shared = []
    for place, storages in enumerate(touched):
        nodes.append([names.get(s, s) for s in storages if s not in constant])
        if is_list_operator(ops[place]) and _counts_steps(source.storages, storages, names):
            shared.append(place)
        else:
            ties.tie(nodes[place])
    units = _numbered(ties, nodes, shared, kernels, names, len(source.storages))
    _check_units(units, nodes, ops)
    return units


def scaled_gradients(source: Trace | Plan) -> dict[int, int]:
    """Gradient by the kernel outside all passes that divides it in place, and uses nothing else.

    So does the schedule of a pipeline (``scale_grads``), after its last backward pass.
    """
    is_division = (source.kernels.phase == "other") & (source.kernels.op == "aten.div_.Tensor")
    kernels = np.flatnonzero(is_division)
    touched, _ = _touched(source, kernels)
    return {
        kernel: storages[0]
        for kernel, storages in zip(kernels.tolist(), touched, strict=True)
        if len(storages) == 1 and source.storages.kind[storages[0]] == "gradient"
    }


def _touched(source: Trace | Plan, kernels: IntArray) -> tuple[list[list[int]], np.ndarray]:
    """Storages that each of the kernels accesses, in order, and which ones any of them writes."""
    accesses = source.accesses
    place_of = np.full(len(source.kernels) + 1, MISSING)
    place_of[kernels] = np.arange(len(kernels))
    rows = np.flatnonzero(place_of[accesses.kernel] != MISSING)
    touched: list[list[int]] = [[] for _ in kernels]
    places = place_of[accesses.kernel[rows]].tolist()
    flags = (accesses.reads | accesses.writes)[rows].tolist()
    for place, storage, is_used in zip(places, accesses.storage[rows].tolist(), flags, strict=True):
        if is_used:
            touched[place].append(storage)
    is_written = np.zeros(len(source.storages), dtype=bool)
    is_written[accesses.storage[rows][accesses.writes[rows]]] = True
    return touched, is_written


def _parameter_names(storages: Storages | PlanStorages) -> dict[int, str]:
    """Name of the parameter that a parameter, a gradient or a state belongs to, by storage."""
    kinds, names = storages.kind, storages.name
    parameters = set(names[kinds == "parameter"].tolist())
    result: dict[int, str] = {}
    for row in np.flatnonzero(np.isin(kinds, ("parameter", "gradient", "optimizer_state"))):
        name = str(names[row])
        owner = name if kinds[row] == "parameter" else name.rpartition(".")[0]
        if owner not in parameters:
            # The states of further optimizers carry their number before the parameter's name.
            owner = re.sub(r"^optimizer\d+\.", "", owner)
        if owner in parameters:
            result[int(row)] = owner
    return result


def _counts_steps(
    storages: Storages | PlanStorages, touched: list[int], names: dict[int, str]
) -> bool:
    """Whether a list operator works on nothing but scalars, of more than one parameter."""
    owners = {names[s] for s in touched if s in names}
    is_small = all(storages.nbytes[s] <= _SCALAR_BYTES for s in touched)
    return is_small and len(owners) > 1


class _Ties:
    """Nodes that belong together: parameters by name, other storages by row."""

    def __init__(self) -> None:
        self._parent: dict[str | int, str | int] = {}

    def tie(self, nodes: Iterable[str | int]) -> None:
        """All of these belong together."""
        roots = [self.root(node) for node in nodes]
        for root in roots[1:]:
            self._parent[self.root(root)] = self.root(roots[0])

    def root(self, node: str | int) -> str | int:
        """The node that stands for all that belong together with this one."""
        parent = self._parent.setdefault(node, node)
        while parent != node:
            self._parent[node] = self._parent[parent]
            node, parent = parent, self._parent[parent]
        return node


def _numbered(
    ties: _Ties,
    nodes: list[list[str | int]],
    shared: list[int],
    kernels: IntArray,
    names: dict[int, str],
    num_storages: int,
) -> OptimizerUnits:
    """Units from tied nodes: those groups that hold a parameter."""
    number: dict[str | int, int] = {}
    members: list[dict[str, None]] = []
    for parameter in (node for place in nodes for node in place if isinstance(node, str)):
        unit = number.setdefault(ties.root(parameter), len(members))
        if unit == len(members):
            members.append({})
        members[unit][parameter] = None
    unit_of_kernel = np.full(len(kernels), UNKNOWN)
    owner = np.full(num_storages, UNKNOWN)
    sharing = {}
    for place, touched in enumerate(nodes):
        units = dict.fromkeys(number.get(ties.root(node), UNKNOWN) for node in touched)
        if place in shared:
            unit_of_kernel[place] = SHARED
            sharing[place] = tuple(unit for unit in units if unit != UNKNOWN)
        elif units:
            unit_of_kernel[place] = next(iter(units))
            for node in touched:
                if isinstance(node, int):
                    owner[node] = unit_of_kernel[place]
    for row, name in names.items():
        owner[row] = number.get(ties.root(name), UNKNOWN)
    return OptimizerUnits(
        parameters=tuple(tuple(unit) for unit in members),
        kernels=kernels,
        unit_of_kernel=unit_of_kernel,
        sharing=sharing,
        owner=owner,
    )


def _check_units(units: OptimizerUnits, nodes: list[list[str | int]], ops: list[str]) -> None:
    """A kernel uses one parameter, or as a list operator all those of its unit."""
    for place, unit in enumerate(units.unit_of_kernel.tolist()):
        num_used = len({node for node in nodes[place] if isinstance(node, str)})
        if unit < 0 or not num_used:
            continue
        whole = len(units.parameters[unit])
        if num_used != (whole if is_list_operator(ops[place]) else 1):
            raise InputError(
                f"transform: kernel {units.kernels[place]} ({ops[place]}) of the optimizer uses "
                f"{num_used} of {whole} parameters that depend on each other, so that none can "
                "step before the others' gradients; plan without the transform"
            )
