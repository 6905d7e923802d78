"""The storages of a replay: tensors of the trace's sizes, born and freed where the trace says."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from teraio.contracts.plan import Plan
from teraio.contracts.table import MISSING
from teraio.executor.binding import Binding
from teraio.executor.holding import Holding
from teraio.executor.placement import Placement
from teraio.executor.replaying.patterns import Patterns
from teraio.executor.residency import Residency
from teraio.profiler.storages import StorageRegistry
from teraio.traces.trace import UNTRACKED, Trace


class SyntheticStorages:
    """Owns the tensor of every storage that lives; each plays its row of the plan.

    ``births`` and ``deaths`` are rows by kernel. Memory that no tensor has (:data:`UNTRACKED`) is
    counted by the residency alone.
    """

    def __init__(
        self, trace: Trace, device_type: str, residency: Residency, patterns: Patterns
    ) -> None:
        storages = trace.storages
        self._device_type = device_type
        self._residency = residency
        self._patterns = patterns
        self._registry = StorageRegistry(device_type, residency.note_death)
        self._tensors: dict[int, torch.Tensor] = {}
        self._nbytes: list[int] = storages.nbytes.tolist()
        self._allocated_bytes: list[int] = storages.allocated_bytes.tolist()
        self._is_fixed: list[bool] = (~storages.resizable).tolist()
        self._rows_at_start: list[int] = []
        self.births: list[list[int]] = [[] for _ in range(trace.num_kernels)]
        self.deaths: list[list[int]] = [[] for _ in range(trace.num_kernels)]
        lives = zip(
            storages.birth.tolist(), storages.death.tolist(), storages.name.tolist(), strict=True
        )
        for row, (birth, death, name) in enumerate(lives):
            if birth == MISSING and name == UNTRACKED:
                continue
            if birth == MISSING or death < birth:
                self._rows_at_start.append(row)
            if birth != MISSING:
                self.births[birth].append(row)
                self.deaths[death].append(row)

    def place(self, plan: Plan, placement: Placement, binding: Binding) -> None:
        """Make what is alive at the cut, and put it where kernel 0 expects it: the cold start.

        What begins away is made in batches, so that the GPU's budget holds for it too.
        """
        residency, tiers = self._residency, plan.storages.placement
        away = [row for row in self._rows_at_start if tiers[row] not in ("gpu", "")]
        for row in away:
            if residency.used_bytes + self._allocated_bytes[row] > residency.capacity_bytes:
                placement.establish(residency, binding.holding_of_row)
            self._create_at_start(row, binding)
        placement.establish(residency, binding.holding_of_row)
        for row in sorted(set(self._rows_at_start).difference(away)):
            self._create_at_start(row, binding)
        placement.establish(residency, binding.holding_of_row)

    def _create_at_start(self, row: int, binding: Binding) -> None:
        self._residency.make_room(self._allocated_bytes[row], ())
        self.create(row, binding)
        self._patterns.write(row)

    def create(self, row: int, binding: Binding) -> Holding:
        """A storage is born."""
        data = torch.empty(self._nbytes[row], dtype=torch.uint8, device=self._device_type)
        state, _ = self._registry.find_or_add(data, lambda: (0, 0, 0), is_foreign=False)
        assert state is not None, "a tensor of the registry's own device"
        holding = self._residency.adopt(state)
        holding.is_fixed |= self._is_fixed[row]
        binding.bind(holding, row)
        # When it was adopted, its row, and with it the next use, was not known yet.
        self._residency.order.note_use(holding)
        self._tensors[row] = data
        self._patterns.born(row, data)
        return holding

    def free(self, rows: Iterable[int]) -> None:
        """Storages die."""
        for row in rows:
            self._patterns.died(row)
            del self._tensors[row]

    def clear(self) -> None:
        """Free everything."""
        self.free(list(self._tensors))
