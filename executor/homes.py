"""Where a storage goes that must leave while no plan is followed: home, if the plan gives it one.

In its first step a run has its plan's places but not yet its moves. What is evicted then goes to
the place that the plan has for it, so that nothing has to be moved again before the plan is
followed, and so that a plan whose arenas fill the tiers leaves the first step room too. Who has no
such place, or finds it taken, goes to host memory, also between the plan's storages there, of which
most are not alive yet (but not while the model is made, whose parameters come there next); then to
the overflow area of a disk, and at last into any gap in the arenas.
"""

from __future__ import annotations

from collections.abc import Iterator

from teraio.contracts.hardware import HOST
from teraio.contracts.plan import Plan
from teraio.errors import CapacityError
from teraio.executor.holding import Holding
from teraio.executor.mode import ExecutorMode
from teraio.executor.plan_position import RunState
from teraio.executor.stores.base import round_up
from teraio.executor.tiers import Slot

_BYTES_PER_LOOK = 1024
"""What a disk writes in the half of a microsecond that looking past a storage takes."""


class Homes:
    """Finds slots for a mode's residency; ``arena_bytes`` are the ends of the plan's arenas."""

    def __init__(self, mode: ExecutorMode, plan: Plan, arena_bytes: dict[str, int]) -> None:
        self._mode = mode
        self._arena_bytes = arena_bytes
        self._moved_to = _places_of_moves(plan)
        self._num_states = -1
        self._num_nameless = 0

    def find_slot(self, holding: Holding) -> Slot:
        """A slot for a storage without a copy. Raises CapacityError if no tier has room."""
        tiers, state = self._mode.residency.tiers, self._mode.position.state
        if state is not RunState.FOLLOWING:
            home = self._home_of(holding)
            if home is not None:
                return home
        if state is RunState.COLD and not self._mode.is_aside and HOST in tiers.stores:
            slot = tiers.slot_in(HOST, holding.state.nbytes) or self._host_gap(holding)
            if slot is not None:
                return slot
        try:
            return tiers.overflow_slot(holding.state.nbytes)
        except CapacityError:
            gap = next(filter(None, (self._gap(name, holding) for name in tiers.stores)), None)
            if gap is None:
                raise
            return gap

    def _home_of(self, holding: Holding) -> Slot | None:
        if holding.row < 0:
            self._learn_names()
        if holding.row < 0:
            return None
        at_cut = self._mode.placement.place_of_row(holding.row)
        places = [] if at_cut is None else [at_cut]
        for device, offset_bytes in [*places, *self._moved_to.get(holding.row, ())]:
            slot = self._slot(device, offset_bytes, holding.state.nbytes)
            if self._mode.residency.can_take(slot, holding):
                return slot
        return None

    def _learn_names(self) -> None:
        """Optimizer state and gradients get their names when they are stored; looking all of them
        up takes time in proportion to their number, so it is done once for as many evictions.
        """
        names = self._mode.names
        num_states = sum(len(optimizer.state) for optimizer in names.optimizers)
        self._num_nameless += 1
        if num_states == self._num_states and self._num_nameless < len(self._mode.registry):
            return
        self._num_states, self._num_nameless = num_states, 0
        self._mode.bind_names()

    def _host_gap(self, holding: Holding) -> Slot | None:
        """A gap in host memory, unless looking for one takes longer than a disk would."""
        num_owners = len(self._mode.residency.tiers.owners[HOST])
        if holding.state.nbytes < _BYTES_PER_LOOK * num_owners:
            return None
        return self._gap(HOST, holding)

    def _gap(self, device: str, holding: Holding) -> Slot | None:
        """The smallest gap between the storages that lie in an arena."""
        alignment_bytes = self._mode.residency.tiers.stores[device].alignment_bytes
        nbytes = round_up(holding.state.nbytes, alignment_bytes)
        gaps = self._gaps(device, alignment_bytes)
        fitting = [(end - begin, begin) for begin, end in gaps if end - begin >= nbytes]
        if not fitting:
            return None
        slot = self._slot(device, min(fitting)[1], holding.state.nbytes)
        return slot if self._mode.residency.can_take(slot, holding) else None

    def _gaps(self, device: str, alignment_bytes: int) -> Iterator[tuple[int, int]]:
        end_bytes = self._arena_bytes.get(device, 0)
        begin = 0
        for taken, owner in self._mode.residency.tiers.owners[device].overlapping(0, end_bytes):
            assert isinstance(owner, Holding)
            if owner.is_resident or owner.is_dead:
                continue
            yield begin, taken
            begin = round_up(taken + max(owner.state.nbytes, 1), alignment_bytes)
        yield begin, end_bytes

    def _slot(self, device: str, offset_bytes: int, nbytes: int) -> Slot:
        store = self._mode.residency.tiers.stores[device]
        return Slot(store, offset_bytes, nbytes, is_overflow=False)


def _places_of_moves(plan: Plan) -> dict[int, list[tuple[str, int]]]:
    """(device, offset) that the plan's moves take each storage row to."""
    places: dict[int, list[tuple[str, int]]] = {}
    moves = plan.moves
    columns = (moves.storage, moves.device, moves.tier_offset_bytes)
    for row, device, offset_bytes in zip(*(c.tolist() for c in columns), strict=True):
        known = places.setdefault(row, [])
        if (device, offset_bytes) not in known:
            known.append((device, offset_bytes))
    return places
