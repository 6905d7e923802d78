"""What a solution of the program decides, and whether it fits in bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from teraio.contracts.table import IntArray
from teraio.planner.milp.instance import Instance

STAYS = -1
"""Device of a period that does not leave."""


@dataclass(frozen=True)
class Choice:
    """int64 (periods,): device (STAYS: none), unrolled steps, and ``rank``, the order of rows."""

    device: IntArray
    offload_start: IntArray
    free_by: IntArray
    prefetch_start: IntArray
    rank: IntArray


def short_steps(instance: Instance, choice: Choice) -> list[tuple[int, set[int]]]:
    """Steps in which too little is away, counted in bytes, with the periods that are.

    Units may have been rounded so that the program allows more than there is.
    """
    away_bytes = np.zeros(instance.num_steps, dtype=np.int64)
    away: list[set[int]] = [set() for _ in range(instance.num_steps)]
    for p in np.flatnonzero(choice.device != STAYS).tolist():
        for j in range(int(choice.free_by[p]), int(choice.prefetch_start[p])):
            step = j % instance.num_steps
            away_bytes[step] += instance.relief_bytes[p]
            away[step].add(p)
    return [(k, away[k]) for k in np.flatnonzero(away_bytes < instance.needed_bytes).tolist()]
