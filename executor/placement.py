"""Putting everything where a plan expects it when kernel 0 begins: the cold start."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress

from teraio.contracts.plan import Plan
from teraio.errors import CapacityError
from teraio.executor.holding import Holding
from teraio.executor.residency import Residency
from teraio.executor.tiers import Slot

NAMELESS_PREFIXES = ("unnamed:", "untouched:", "untracked")


class Placement:
    """The state of a plan at the cut: which storage is away and where, which copies exist.

    ``is_unsettled``: what was to be moved there could not, because others lie in the way.
    """

    def __init__(self, plan: Plan) -> None:
        storages, copies = plan.storages, plan.copies
        self.rounding_bytes = plan.metadata.allocator_rounding_bytes
        self.nbytes_of_row: list[int] = storages.nbytes.tolist()
        self.workspace_bytes: list[int] = plan.kernels.workspace_bytes.tolist()
        self.is_unsettled = False
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

    def place_of_row(self, row: int) -> tuple[str, int] | None:
        """(device, offset) of a storage that is away when kernel 0 begins; None for any other."""
        return self._away.get(row)

    def send_home(self, residency: Residency, holding: Holding) -> None:
        """Write a storage to its place and give its memory back, if it belongs away."""
        place = self._away.get(holding.row)
        if place is not None:
            self._put_away(residency, holding, holding.row, *place)

    def establish(self, residency: Residency, holding_of_row: Sequence[Holding | None]) -> None:
        """Move what lies elsewhere, as far as memory allows; what is missing comes on demand."""
        # A place may be held by a storage that belongs on the GPU or in another place, and the
        # GPU's room by storages that belong away: rounds resolve both, until none changes anything.
        num_left, num_in_vain = len(self._away) + len(self._on_gpu) + 1, 0
        while num_left and num_in_vain < 3:
            num_misplaced = self._establish_once(
                residency, holding_of_row, insists=num_in_vain == 1
            )
            num_in_vain = num_in_vain + 1 if num_misplaced >= num_left else 0
            num_left = min(num_misplaced, num_left)
        self.is_unsettled = num_left > 0
        for row, device, offset_bytes in self._copies:
            holding = holding_of_row[row]
            if holding is not None and holding.is_resident:
                is_there = self._copy(residency, holding, row, device, offset_bytes)
                self.is_unsettled |= not is_there
        # What the plan does not know (a data set, say) it expects to lie where it is used.
        for holding in list(residency.holdings()):
            if holding.row < 0:
                residency.prefetch(holding, 0)

    def establish_by_force(
        self, residency: Residency, holding_of_row: Sequence[Holding | None]
    ) -> None:
        """If need be, what the plan does not know leaves the places that it has for others."""
        self.establish(residency, holding_of_row)
        if not self.is_unsettled:
            return
        for holding in list(residency.holdings()):
            slot = holding.slot
            if holding.row >= 0 or holding.is_resident or slot is None or slot.is_overflow:
                continue
            with suppress(CapacityError):
                residency.require((holding,))
                # Its copy goes. Where it must leave again, that is to the overflow area.
                residency.written(holding)
        self.establish(residency, holding_of_row)

    def _establish_once(
        self, residency: Residency, holding_of_row: Sequence[Holding | None], *, insists: bool
    ) -> int:
        """Number of storages that are still elsewhere. ``insists``: one that lies in another's
        place comes to the GPU although others must leave for it.
        """
        away = _movable(holding_of_row, self._away)
        resting = _movable(holding_of_row, self._on_gpu)
        for holding in away:
            place = self._away[holding.row]
            is_astray = insists and not holding.is_resident and not _lies_at(holding, *place)
            if is_astray:
                _make_room(residency, holding, (holding,))
            self._put_away(residency, holding, holding.row, *place)
            if is_astray and holding.is_resident:
                # Its place is taken. It gives up the one that it has, which may be another's.
                residency.require((holding,))
                residency.written(holding)
        for holding in resting:
            if insists and not holding.is_resident:
                _make_room(residency, holding, {holding, *resting})
            residency.prefetch(holding, 0)
        return sum(not holding.is_resident for holding in resting) + sum(
            holding.is_resident or not _lies_at(holding, *self._away[holding.row])
            for holding in away
        )

    def _put_away(
        self, residency: Residency, holding: Holding, row: int, device: str, offset_bytes: int
    ) -> None:
        if _lies_at(holding, device, offset_bytes) and not holding.is_resident:
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


def _movable(holding_of_row: Sequence[Holding | None], rows: Iterable[int]) -> list[Holding]:
    """Of the storages that play these rows, those that live, still do, and can be moved."""
    holdings = ((row, holding_of_row[row]) for row in rows)
    return [
        h
        for row, h in holdings
        if h is not None and h.row == row and not h.is_dead and not h.is_fixed
    ]


def _make_room(residency: Residency, holding: Holding, protected: Collection[Holding]) -> None:
    with suppress(CapacityError):
        residency.make_room(holding.allocated_bytes, protected)


def _lies_at(holding: Holding, device: str, offset_bytes: int) -> bool:
    slot = holding.slot
    return slot is not None and slot.store.name == device and slot.offset_bytes == offset_bytes
