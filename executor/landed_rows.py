"""Which storages of an observed iteration play which rows of a plan made for other kernels."""

from __future__ import annotations

from collections import defaultdict, deque

from teraio.contracts.plan import Plan
from teraio.executor.landed_plan import Match, births_per_kernel, rows_per_kernel
from teraio.executor.observation import ObservedKernel
from teraio.profiler.storages import StorageState


def identify(plan: Plan, observed: list[ObservedKernel], match: Match) -> dict[StorageState, int]:
    """Rows by storage: those known by name, then what kernels that both have touch at the same
    place, then what is created by other kernels in the same place, by size and order.
    """
    roles = _Roles(plan, observed)
    for kernel in observed:
        for state, _ in kernel.touched:
            roles.take_named(state)
    rows, births = rows_per_kernel(plan), births_per_kernel(plan)
    for entry in match.entries:
        if entry.planned < 0 or entry.observed < 0:
            continue
        kernel, planned = observed[entry.observed], rows[entry.planned]
        if len(planned) == len(kernel.touched):
            for row, (state, _) in zip(planned, kernel.touched, strict=True):
                roles.take(state, row)
        else:
            row_of_ordinal = dict(births[entry.planned])
            for state in kernel.born:
                if state.birth_ordinal in row_of_ordinal:
                    roles.take(state, row_of_ordinal[state.birth_ordinal])
    for block in match.blocks:
        kernels = [observed[e.observed] for e in match.entries[block.run_start : block.run_stop]]
        planned_births = births[block.planned_start : block.planned_stop]
        roles.take_by_size(
            [row for pairs in planned_births for _, row in pairs],
            [state for kernel in kernels for state in kernel.born],
        )
    return roles.row_of


class _Roles:
    """A row is played by one storage of an iteration, and by its successor in the next."""

    def __init__(self, plan: Plan, observed: list[ObservedKernel]) -> None:
        self.row_of: dict[StorageState, int] = {}
        self._taken: set[int] = set()
        self._nbytes: list[int] = plan.storages.nbytes.tolist()
        self._is_persistent: list[bool] = (plan.storages.birth < 0).tolist()
        self._born = {state for kernel in observed for state in kernel.born}

    def take_named(self, state: StorageState) -> None:
        """A persistent storage plays the row that has its name."""
        row = -1 if state.attachment is None else state.attachment.row
        if 0 <= row < len(self._nbytes) and self._is_persistent[row]:
            self.row_of[state] = row
            self._taken.add(row)

    def take(self, state: StorageState, row: int) -> None:
        """A storage plays a row if both are free and of the same size."""
        if state in self.row_of or state.nbytes != self._nbytes[row]:
            return
        # What is left of the iteration before has its successor in this one.
        if state in self._born or self._is_persistent[row]:
            if row in self._taken:
                return
            self._taken.add(row)
        self.row_of[state] = row

    def take_by_size(self, rows: list[int], states: list[StorageState]) -> None:
        """Free rows go to free storages of the same size, in order."""
        free: dict[int, deque[int]] = defaultdict(deque)
        for row in rows:
            if row not in self._taken:
                free[self._nbytes[row]].append(row)
        for state in states:
            if state not in self.row_of and free[state.nbytes]:
                self.take(state, free[state.nbytes].popleft())
