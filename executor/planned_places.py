"""Which storages a plan puts where: bytes of each device, names for messages about a place."""

from __future__ import annotations

from collections.abc import Callable

from teraio.contracts.hardware import Hardware
from teraio.contracts.plan import Plan
from teraio.executor.stores import Store, VerifiedStore

_SHOWN = 3


def planned_bytes_per_device(plan: Plan, hardware: Hardware) -> dict[str, int]:
    """Bytes of each device that the plan's slots and copies occupy, from offset 0."""
    ends: dict[str, int] = {}
    moves, copies, storages = plan.moves, plan.copies, plan.storages
    rows = [
        *zip(moves.device, moves.tier_offset_bytes, moves.storage, strict=True),
        *zip(copies.device, copies.tier_offset_bytes, copies.storage, strict=True),
    ]
    for device, offset, storage in rows:
        alignment = hardware.alignment_bytes(device)
        size = -(-int(storages.nbytes[storage]) // alignment) * alignment
        ends[device] = max(ends.get(device, 0), int(offset) + size)
    return ends


def verifying(plan: Plan) -> Callable[[Store], Store]:
    """What wraps the stores of a run whose transfers are to be compared."""
    places = PlannedPlaces(plan)
    return lambda store: VerifiedStore(store, places.describe)


class PlannedPlaces:
    """Answers "whose bytes are these?" for a device, an offset and a size, as far as planned."""

    def __init__(self, plan: Plan) -> None:
        storages = plan.storages
        self._names = storages.name.tolist()
        self._births = storages.birth.tolist()
        self._nbytes = storages.nbytes.tolist()
        self._rows: dict[tuple[str, int], list[int]] = {}
        for table in (plan.moves, plan.copies):
            places = zip(
                table.device.tolist(),
                table.tier_offset_bytes.tolist(),
                table.storage.tolist(),
                strict=True,
            )
            for device, offset_bytes, row in places:
                rows = self._rows.setdefault((device, offset_bytes), [])
                if row not in rows:
                    rows.append(row)

    def describe(self, device: str, offset_bytes: int, nbytes: int) -> str:
        """The storages of that size that use the place in turn; "" for one outside the plan."""
        rows = self._rows.get((device, offset_bytes), [])
        names = [self._name(row) for row in rows if self._nbytes[row] == nbytes]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return ", ".join(names[:_SHOWN]) + more

    def _name(self, row: int) -> str:
        birth = self._births[row]
        born = f", born at kernel {birth}" if birth >= 0 else ""
        return f"{self._names[row] or 'storage'} (row {row}{born})"
