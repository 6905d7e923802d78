"""Which living storage plays which row of the plan: by name, by birth, or by first touch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from teraio.executor.holding import Holding
from teraio.executor.placement import Placement
from teraio.executor.schedule import Schedule
from teraio.profiler.dispatch import dense_parts
from teraio.profiler.names import NameBook
from teraio.profiler.storages import StorageRegistry, StorageState


class Binding:
    """Rows of a plan and the holdings that play them now; a row is played by one at a time."""

    def __init__(self, schedule: Schedule, placement: Placement) -> None:
        self._schedule = schedule
        self._placement = placement
        self._num_planned = len(schedule.uses)
        self._holding_of_row: list[Holding | None] = [None] * self._num_planned

    @property
    def placement(self) -> Placement:
        """Where the rows are when kernel 0 begins."""
        return self._placement

    @property
    def holding_of_row(self) -> Sequence[Holding | None]:
        """By row; some may have died or play another row by now."""
        return self._holding_of_row

    def holding(self, row: int) -> Holding | None:
        """The holding that plays a row now, if it lives and still plays it."""
        holding = self._holding_of_row[row]
        if holding is None or holding.row != row or holding.is_dead:
            return None
        return holding

    def bind(self, holding: Holding, row: int) -> None:
        """Let a holding play a row; nothing if its size is not the row's."""
        if holding.state.nbytes != self._placement.nbytes_of_row[row]:
            return
        if holding.row >= 0 and self._holding_of_row[holding.row] is holding:
            self._holding_of_row[holding.row] = None
        holding.row = row
        self._holding_of_row[row] = holding

    def follow(
        self, schedule: Schedule, placement: Placement, row_of: Mapping[StorageState, int]
    ) -> None:
        """Use another schedule for the same plan; ``row_of``: rows of storages that live.

        The plan's own rows keep their numbers, further ones are new.
        """
        first_new = self._num_planned
        for holding in self._holding_of_row[first_new:]:
            if holding is not None and holding.row >= first_new:
                holding.row = -1
        self._holding_of_row[first_new:] = [None] * (len(schedule.uses) - first_new)
        self._schedule, self._placement = schedule, placement
        for state, row in row_of.items():
            holding = state.attachment
            if holding is not None and not holding.is_dead:
                self.bind(holding, row)

    def bind_names(
        self, names: NameBook, registry: StorageRegistry, adopt: Callable[[StorageState], Holding]
    ) -> bool:
        """Find the plan's named storages, and account for what else the models and optimizers
        hold; whether all that the plan knows by name exist.
        """
        found = set()

        def birth() -> tuple[int, int, int]:
            return -1, -1, len(registry)

        for tensor, name, _ in names.tensors():
            row = self._schedule.row_of_name.get(name)
            for plain in plain_tensors(tensor):
                state, _ = registry.find_or_add(plain, birth, is_foreign=True)
                if state is None:
                    continue
                holding = adopt(state)
                if row is not None and row not in found:
                    found.add(row)
                    self.bind(holding, row)
        return self._placement.is_complete(found)

    def bind_birth(self, kernel: int, state: StorageState, holding: Holding) -> None:
        """A storage was born at a planned kernel."""
        row = self._schedule.row_of_birth.get((kernel, state.birth_ordinal))
        if row is not None:
            self.bind(holding, row)

    def bind_first_touches(self, kernel: int, holdings: Sequence[Holding]) -> None:
        """A planned kernel touches these: some rows are known by nothing else."""
        for position, row in self._schedule.row_of_first_touch.get(kernel, ()):
            if position < len(holdings) and self._holding_of_row[row] is None:
                self.bind(holdings[position], row)


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors whose storages hold the data: the inner ones of sparse and wrapper tensors."""
    if hasattr(tensor, "__tensor_flatten__"):
        attributes, _ = tensor.__tensor_flatten__()
        for attribute in attributes:
            inner = getattr(tensor, attribute)
            if isinstance(inner, torch.Tensor):
                yield from plain_tensors(inner)
    elif tensor.layout is torch.strided:
        yield tensor
    else:
        yield from dense_parts(tensor)
