"""(8) of the program: slots on each device, by their sum in every step.

A slot is taken from the step offload_start of the move that writes it to the end of the last period
that its copy serves (DESIGN: Slots). Variables: k_pv, the copy is kept for p or a later period
through the time before p; h_pvj, p has a slot on v in step j. That the sum fits is necessary; that
offsets can be found, the packing decides afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from teraio.planner.milp.instance import NONE

if TYPE_CHECKING:
    from teraio.planner.milp.program import Program


def limit_slots(program: Program) -> None:
    """Add the rows of the devices that could be full."""
    instance = program.instance
    everything = instance.slot.sum(axis=0)
    everything[:1] += instance.bounce.sum()
    for v in np.flatnonzero(instance.capacity < everything).tolist():
        _limit_device(program, v)


def _limit_device(program: Program, v: int) -> None:
    instance, periods = program.instance, program.instance.periods
    taken: list[list[Any]] = [[] for _ in range(instance.num_steps)]
    kept = _kept_copies(program, v)
    for p in range(len(periods)):
        size = int(instance.slot[p, v])
        if periods.is_unwritten[p]:
            continue
        for j in range(int(periods.after[p]), int(periods.end[p])):
            taken[j % instance.num_steps].append(size * _holds(program, p, v, j, kept[p]))
        if periods.previous[p] != NONE:
            begin = int(periods.end[periods.previous[p]])
            for j in range(begin, begin + (int(periods.after[p]) - begin) % instance.num_steps):
                taken[j % instance.num_steps].append(size * kept[p])
    always = _permanent_slots(program, v)
    if v == 0:
        always += _bounce_buffers(program)
    for terms in taken:
        program.model.add(sum(terms) + sum(always) <= int(instance.capacity[v]))


def _kept_copies(program: Program, v: int) -> list[Any]:
    """k_pv: p reuses a copy, or stays and a later period of the version does."""
    periods, model = program.instance.periods, program.model
    kept = [model.new_bool_var("") for _ in range(len(periods))]
    for p in range(len(periods) - 1, -1, -1):
        model.add(kept[p] >= program.on[p][v] - program.writes[p][v])
        q = int(periods.previous[p])
        if q != NONE:
            model.add(kept[q] >= kept[p] - sum(program.on[q]))
    return kept


def _holds(program: Program, p: int, v: int, step: int, kept: Any) -> Any:
    """h_pvj."""
    holds = program.model.new_bool_var("")
    begun = sum(literal for j, literal in program.offload[p].items() if j <= step)
    program.model.add(holds >= program.on[p][v] + begun - 1)
    program.model.add(holds >= kept)
    return holds


def _permanent_slots(program: Program, v: int) -> list[Any]:
    """The copy of a storage that no kernel writes is always there."""
    periods, model = program.instance.periods, program.model
    slots: dict[int, Any] = {}
    terms = []
    for p in np.flatnonzero(periods.is_unwritten).tolist():
        storage = int(periods.storage[p])
        if storage not in slots:
            slots[storage] = model.new_bool_var("")
            terms.append(int(program.instance.slot[p, v]) * slots[storage])
        model.add_implication(program.on[p][v], slots[storage])
    return terms


def _bounce_buffers(program: Program) -> list[Any]:
    """Host memory that devices take as soon as they are used; device 0 is the host itself then."""
    terms = []
    for v, size in enumerate(program.instance.bounce.tolist()):
        if size > 0:
            used = program.model.new_bool_var("")
            for on in program.on:
                program.model.add_implication(on[v], used)
            terms.append(size * used)
    return terms
