"""Putting everything where a plan expects it when kernel 0 begins: the cold start."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from teraio.contracts.plan import Plan
from teraio.executor.holding import Holding
from teraio.executor.residency import Residency
from teraio.executor.tiers import Slot

NAMELESS_PREFIXES = ("unnamed:", "untouched:", "untracked")


class Placement:
    """The state of a plan at the cut: which storage is away and where, which copies exist."""

    def __init__(self, plan: Plan) -> None:
        storages, copies = plan.storages, plan.copies
        self.rounding_bytes = plan.metadata.allocator_rounding_bytes
        self.nbytes_of_row: list[int] = storages.nbytes.tolist()
        self.workspace_bytes: list[int] = plan.kernels.workspace_bytes.tolist()
        self._away: dict[int, tuple[str, int]] = {}
        self._on_gpu: list[int] = []
        columns = (storages.placement, storages.device, storages.tier_offset_bytes)
        for row, (tier, device, offset) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            if tier == "gpu":
                self._on_gpu.append(row)
            elif tier:
                self._away[row] = (device, offset)
        self._copies: list[tuple[int, str, int]] = list(
            zip(
                copies.storage.tolist(),
                copies.device.tolist(),
                copies.tier_offset_bytes.tolist(),
                strict=True,
            )
        )
        # What begins with a mark has no name that could be looked up in a model or an optimizer.
        self._expected = {
            row
            for row, (name, birth) in enumerate(
                zip(storages.name.tolist(), storages.birth.tolist(), strict=True)
            )
            if birth < 0 and not name.startswith(NAMELESS_PREFIXES)
        }

    def is_complete(self, rows: Collection[int]) -> bool:
        """Whether these rows cover what the plan knows by name: false before the first step."""
        return bool(self._expected) and self._expected.issubset(rows)

    def establish(self, residency: Residency, holding_of_row: Sequence[Holding | None]) -> None:
        """Move what lies elsewhere, as far as memory allows; what is missing comes on demand."""
        # A place may be held by a storage that belongs on the GPU, and the GPU's room by storages
        # that belong away: two rounds resolve both.
        for _ in range(2):
            for row, (device, offset_bytes) in self._away.items():
                self._put_away(residency, holding_of_row[row], row, device, offset_bytes)
            for row in self._on_gpu:
                holding = holding_of_row[row]
                if holding is not None:
                    residency.prefetch(holding, 0)
        for row, device, offset_bytes in self._copies:
            holding = holding_of_row[row]
            if holding is not None and holding.is_resident:
                self._copy(residency, holding, row, device, offset_bytes)
        # What the plan does not know (a data set, say) it expects to lie where it is used.
        for holding in residency.holdings():
            if holding.row < 0:
                residency.prefetch(holding, 0)

    def _put_away(
        self,
        residency: Residency,
        holding: Holding | None,
        row: int,
        device: str,
        offset_bytes: int,
    ) -> None:
        if holding is None or (_lies_at(holding, device, offset_bytes) and not holding.is_resident):
            return
        if not holding.is_resident:
            residency.prefetch(holding, 0)
        if holding.is_resident and self._copy(residency, holding, row, device, offset_bytes):
            residency.release(holding)

    def _copy(
        self, residency: Residency, holding: Holding, row: int, device: str, offset_bytes: int
    ) -> bool:
        """Write a copy to a planned place; False if another storage's only copy lies there."""
        if _lies_at(holding, device, offset_bytes):
            return True
        store = residency.tiers.stores[device]
        slot = Slot(store, offset_bytes, self.nbytes_of_row[row], is_overflow=False)
        if not residency.can_take(slot, holding):
            return False
        residency.offload(holding, slot)
        return True


def _lies_at(holding: Holding, device: str, offset_bytes: int) -> bool:
    slot = holding.slot
    return slot is not None and slot.store.name == device and slot.offset_bytes == offset_bytes
