"""For which unit each kernel of the optimizer runs, those included that no access tells.

Where counts of steps lie on the host (a GPU's optimizer keeps them there unless it is fused or
capturable), their kernels access nothing in the trace. They belong to the units around them: in a
loop over parameters to the one under way, with lists to each parameter in turn.
"""

from __future__ import annotations

from itertools import groupby

from teraio.errors import InputError
from teraio.traces.transforms.optimizer_units import (
    UNKNOWN,
    OptimizerUnits,
    is_list_operator,
)


def place_kernels(units: OptimizerUnits, ops: list[str]) -> list[tuple[int, ...]]:
    """Units of each of the optimizer's kernels, whose operators are ``ops``; several if shared.

    Raises InputError that names a kernel which belongs to no parameter.
    """
    known = units.unit_of_kernel.tolist()
    placed = [units.sharing.get(place, (unit,)) for place, unit in enumerate(known)]
    if all(unit == UNKNOWN for unit in known):
        raise InputError(
            "transform: no kernel of the optimizer uses a parameter that the trace names; "
            "plan without the transform"
        )
    around = _Surroundings(units, known, ops)
    for is_unknown, run in groupby(range(len(known)), key=lambda place: known[place] == UNKNOWN):
        places = list(run)
        if is_unknown:
            placed[places[0] : places[-1] + 1] = around.place(places)
    return placed


class _Surroundings:
    """What stands before and after a run of kernels that access nothing."""

    def __init__(self, units: OptimizerUnits, known: list[int], ops: list[str]) -> None:
        self._units = units
        self._known = known
        self._ops = ops
        self._certain = [place for place, unit in enumerate(known) if unit >= 0]

    def place(self, places: list[int]) -> list[tuple[int, ...]]:
        """Units of the kernels at ``places``, which follow each other."""
        before = [place for place in self._certain if place < places[0]]
        after = [place for place in self._certain if place > places[-1]]
        earlier, later = self._list_units(before[::-1])[::-1], self._list_units(after)
        if earlier == later or not (earlier and later):
            nearest = earlier or later
            if len(nearest) == 1:
                return [(nearest[0],)] * len(places)
        if is_list_operator(self._ops[(after or before)[0 if after else -1]]):
            return self._place_among_lists(places, earlier, later)
        num_after = self._certain[0]
        num_before = len(self._known) - 1 - self._certain[-1]
        if len(places) != num_before + num_after:
            self._refuse(places[0])
        ends: list[tuple[int, ...]] = [(earlier[-1],), (later[0],)]
        return ends[:1] * num_before + ends[1:] * num_after

    def _place_among_lists(
        self, places: list[int], earlier: list[int], later: list[int]
    ) -> list[tuple[int, ...]]:
        """List operators open the next list and are shared; others take parameters in turn."""
        opening = [place for place in places if is_list_operator(self._ops[place])]
        others = places[: len(places) - len(opening)]
        if opening != places[len(others) :] or (opening and not later):
            self._refuse(places[0])
        sizes = [(unit, len(self._units.parameters[unit])) for unit in earlier or later]
        turns: list[tuple[int, ...]] = [(unit,) for unit, size in sizes for _ in range(size)]
        if len(others) % len(turns):
            self._refuse(places[0])
        placed = turns * (len(others) // len(turns))
        return placed + [tuple(later)] * len(opening)

    def _list_units(self, places: list[int]) -> list[int]:
        """Units of the kernels at the head of ``places`` that have the same operator."""
        found: list[int] = []
        for place in places:
            unit = self._known[place]
            if self._ops[place] != self._ops[places[0]] or unit in found:
                break
            found.append(unit)
        return found

    def _refuse(self, place: int) -> None:
        kernel, op = self._units.kernels[place], self._ops[place]
        raise InputError(
            f"transform: kernel {kernel} ({op}) of the optimizer accesses nothing that tells whose "
            "step it is part of; plan without the transform"
        )
