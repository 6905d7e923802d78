"""Rules 10 to 14 and 16 of ``plan_checks``: what lies where on the tiers, and at the cut."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from teraio.contracts.hardware import HOST, Hardware
from teraio.contracts.plan import Plan
from teraio.contracts.plan_axis import Absences
from teraio.contracts.table import MISSING, BoolArray, IntArray, TextArray
from teraio.contracts.violations import Findings


@dataclass(frozen=True)
class TierCopies:
    """Copies of storages on tiers in steady state; all arrays (copies,), absolute kernels.

    One per writing move (``row``), held in [``start``, ``end``) and used by moves of which the last
    has ``last_free_by``; and one, held for ever, per place where a never-written storage rests on a
    copy that exists from the cold start on (``row`` is then a move that uses it).
    """

    row: npt.NDArray[np.intp]
    storage: IntArray
    device: TextArray
    offset_bytes: IntArray
    start: IntArray
    end: IntArray
    last_free_by: IntArray
    is_permanent: BoolArray


@dataclass(frozen=True)
class Places:
    """Moves grouped by place (storage, device, offset), in order of position; arrays (moves,).

    ``order`` sorts the absences so; ``first`` and ``last`` are each row's group, in that order.
    """

    order: npt.NDArray[np.intp]
    first: npt.NDArray[np.intp]
    last: npt.NDArray[np.intp]


def _group_by_place(away: Absences) -> Places:
    device = np.zeros(len(away.device), dtype=np.int64)
    for number, name in enumerate(sorted(set(away.device.tolist()))):
        device[(away.device == name).astype(bool)] = number
    order = np.lexsort((away.after, away.offset_bytes, device, away.storage))
    keys = np.stack([away.storage, device, away.offset_bytes])[:, order]
    changes = np.any(keys[:, 1:] != keys[:, :-1], axis=0)
    starts = np.flatnonzero(np.r_[True, changes]) if len(order) else np.empty(0, np.intp)
    sizes = np.diff(np.r_[starts, len(order)]).astype(np.intp)
    return Places(order, np.repeat(starts, sizes), np.repeat(starts + sizes - 1, sizes))


def find_copies(plan: Plan, away: Absences, num_kernels: int, findings: Findings) -> TierCopies:
    """Rule 10, and the copies that the rules after it are about.

    A move's copy is that of the latest writing move in its place: earlier in the same life, or, of
    a persistent storage, the last one of the iteration before.
    """
    places = _group_by_place(away)
    order, first, last = places.order, places.first, places.last
    writes, is_persistent = away.writes[order], away.is_persistent[order]
    version, versions = away.version[order], away.versions_in_life[order]
    latest = np.maximum.accumulate(np.where(writes, np.arange(len(order)), -1))
    in_same_pass = latest >= first
    has_writer = latest[last] >= first
    from_pass_before = ~in_same_pass & has_writer & is_persistent
    source = np.where(in_same_pass, latest, np.where(from_pass_before, latest[last], -1))
    never_written = is_persistent & (versions == 0)
    unchanged = np.where(
        from_pass_before,
        (version[source] == versions) & (version == 0),
        version[source] == version,
    )
    is_clean = np.where(source >= 0, unchanged, never_written & ~has_writer)
    _refuse_unclean(plan, away, order, source, is_clean, findings)

    is_permanent = never_written & ~has_writer
    in_doubt = np.flatnonzero(never_written & has_writer)
    is_permanent[in_doubt] = _is_listed(plan, away, order[in_doubt])
    keeps = is_clean & (source >= 0) & ~is_permanent
    lap = np.where(from_pass_before, num_kernels, 0)
    end, last_free_by = away.until[order], away.free_by[order]
    np.maximum.at(end, source[keeps], (end + lap)[keeps])
    np.maximum.at(last_free_by, source[keeps], (last_free_by + lap)[keeps])
    chosen = np.where(is_permanent, np.arange(len(order)) == first, writes)
    rows = order[chosen]
    permanent = is_permanent[chosen]
    return TierCopies(
        row=away.row[rows],
        storage=away.storage[rows],
        device=away.device[rows],
        offset_bytes=away.offset_bytes[rows],
        start=np.where(permanent, 0, away.offload_start[rows]),
        end=np.where(permanent, num_kernels, end[chosen]),
        last_free_by=last_free_by[chosen],
        is_permanent=permanent,
    )


def _refuse_unclean(
    plan: Plan,
    away: Absences,
    order: npt.NDArray[np.intp],
    source: npt.NDArray[np.intp],
    is_clean: BoolArray,
    findings: Findings,
) -> None:
    writer = np.full(len(plan.moves), MISSING, dtype=np.int64)
    writer[away.row[order]] = np.where(source >= 0, away.row[order][source], MISSING)
    bad = np.zeros(len(plan.moves), dtype=bool)
    bad[away.row[order]] = ~is_clean

    def message(row: int) -> str:
        moves = plan.moves
        place = f"{moves.device[row]} offset {moves.tier_offset_bytes[row]}"
        if writer[row] == MISSING:
            return f"writes: false, but no move leaves storage {moves.storage[row]} at {place}"
        return (
            f"writes: false, but storage {moves.storage[row]} was written since row {writer[row]} "
            f"copied it to {place}"
        )

    findings.refuse(bad, "moves", "clean", message)


def _is_listed(plan: Plan, away: Absences, order: npt.NDArray[np.intp]) -> BoolArray:
    """Whether the place of each move, in ``order``, stands in the plan's list of copies."""
    copies = plan.copies
    listed = set(
        zip(
            copies.storage.tolist(),
            copies.device.tolist(),
            copies.tier_offset_bytes.tolist(),
            strict=True,
        )
    )
    places = zip(
        away.storage[order].tolist(),
        away.device[order].tolist(),
        away.offset_bytes[order].tolist(),
        strict=True,
    )
    return np.fromiter((place in listed for place in places), dtype=bool, count=len(order))


def slot_bytes(plan: Plan, machine: Hardware, storage: IntArray, device: TextArray) -> IntArray:
    """Size of each slot: nbytes rounded up to the device's alignment; int64 (slots,)."""
    alignment = np.ones(len(storage), dtype=np.int64)
    for name in set(device.tolist()):
        alignment[device == name] = machine.alignment_bytes(name)
    result: IntArray = -(-plan.storages.nbytes[storage] // alignment) * alignment
    return result


def check_slots(plan: Plan, machine: Hardware, copies: TierCopies, findings: Findings) -> None:
    """Rule 11. A slot that is held over the cut is cut in two pieces of one iteration each."""
    num_kernels = len(plan.kernels)
    sizes = slot_bytes(plan, machine, copies.storage, copies.device)
    start = copies.start % num_kernels
    end = start + (copies.end - copies.start)
    wraps = end > num_kernels
    index = np.flatnonzero(sizes > 0)
    piece = np.r_[index, index[wraps[index]]]
    head = len(index)
    starts = np.r_[start[index], np.zeros(len(piece) - head, dtype=np.int64)]
    ends = np.r_[np.minimum(end, num_kernels)[index], (end - num_kernels)[piece[head:]]]
    for device in sorted(set(copies.device.tolist())):
        here = np.flatnonzero(copies.device[piece] == device)
        low = copies.offset_bytes[piece[here]]
        high = low + sizes[piece[here]]
        for one, other in _collisions(starts[here], ends[here], low, high):
            late, early = piece[here[one]], piece[here[other]]
            findings.add(
                "moves",
                int(copies.row[late]),
                "slot",
                f"takes bytes of {device} at kernel {starts[here[one]]} that storage "
                f"{copies.storage[early]} (moves row {copies.row[early]}) holds "
                f"until kernel {ends[here[other]]}",
            )


def _collisions(
    start: IntArray, end: IntArray, low: IntArray, high: IntArray
) -> list[tuple[int, int]]:
    """Pairs (later, earlier) of rectangles [start, end) x [low, high) that meet; one per later.

    Painting in order of start: the bytes are cut at every edge, and each piece remembers how long
    it is held. A new holder must find every piece of its own free.
    """
    edges = np.unique(np.r_[low, high])
    left, right = np.searchsorted(edges, low).tolist(), np.searchsorted(edges, high).tolist()
    starts, ends = start.tolist(), end.tolist()
    held_until = np.zeros(len(edges), dtype=np.int64)
    holder = np.zeros(len(edges), dtype=np.int64)
    found = []
    for i in np.argsort(start, kind="stable").tolist():
        pieces = slice(left[i], right[i])
        span = held_until[pieces]
        if span.max() > starts[i]:
            found.append((i, int(holder[pieces][span.argmax()])))
        newer = span < ends[i]
        holder[pieces][newer] = i
        span[newer] = ends[i]
    return found


@dataclass(frozen=True)
class Placement:
    """Where each storage is while kernel 0 runs, as the plan's storages state it; (storages,)."""

    tier: TextArray
    device: TextArray
    offset_bytes: IntArray

    def compare(self, plan: Plan, judged: BoolArray, findings: Findings) -> None:
        """Rule 12, for the storages that are ``judged``."""
        storages = plan.storages
        differs = (storages.placement != self.tier) | (storages.device != self.device)
        differs |= storages.tier_offset_bytes != self.offset_bytes

        def message(row: int) -> str:
            by_moves = (self.tier[row], self.device[row], int(self.offset_bytes[row]))
            offset = int(storages.tier_offset_bytes[row])
            stated = (storages.placement[row], storages.device[row], offset)
            return (
                f"placement, device, tier_offset_bytes: by its moves it is at {by_moves} "
                f"while kernel 0 runs, got {stated}"
            )

        findings.refuse(judged & differs.astype(bool), "storages", "placement", message)


def expected_placement(plan: Plan, away: Absences) -> Placement:
    """Index-space residence while kernel 0 runs, worked out from lifetimes and moves."""
    storages, num_kernels = plan.storages, len(plan.kernels)
    life = (storages.death - storages.birth) % num_kernels
    is_alive = (storages.birth < 0) | (-storages.birth % num_kernels <= life)
    tier = np.where(is_alive, "gpu", "").astype(object)
    device = np.full(len(storages), "", dtype=object)
    offset = np.full(len(storages), MISSING, dtype=np.int64)
    next_cut = -(-away.free_by // num_kernels) * num_kernels
    over_cut = next_cut < away.back
    storage = away.storage[over_cut]
    device[storage] = away.device[over_cut]
    offset[storage] = away.offset_bytes[over_cut]
    tier[storage] = np.where(away.device[over_cut] == HOST, "host", "ssd")
    return Placement(tier, device, offset)


def check_copies_table(
    plan: Plan, copies: TierCopies, placement: Placement, judged: BoolArray, findings: Findings
) -> None:
    """Rule 13. A copy is at the cut if it was made before it, and of use if a move that rests on
    it frees the GPU after it.
    """
    num_kernels = len(plan.kernels)
    cut = (copies.start // num_kernels + 1) * num_kernels
    needed = copies.is_permanent | (cut < copies.last_free_by)
    is_placement = (placement.device[copies.storage] == copies.device) & (
        placement.offset_bytes[copies.storage] == copies.offset_bytes
    )
    expected = np.flatnonzero(needed & ~is_placement.astype(bool))
    unlisted = {
        (s, "host" if d == HOST else "ssd", d, o): copies.row[i]
        for i, s, d, o in zip(
            expected.tolist(),
            copies.storage[expected].tolist(),
            copies.device[expected].tolist(),
            copies.offset_bytes[expected].tolist(),
            strict=True,
        )
    }
    known = unlisted.copy()
    table = plan.copies
    for row, listed in enumerate(
        zip(
            table.storage.tolist(),
            table.tier.tolist(),
            table.device.tolist(),
            table.tier_offset_bytes.tolist(),
            strict=True,
        )
    ):
        storage = listed[0]
        is_known_storage = 0 <= storage < len(plan.storages)
        if is_known_storage and not judged[storage]:
            continue
        if unlisted.pop(listed, None) is None:
            what = "listed twice" if listed in known else "no such copy is of use after the cut"
            findings.add("copies", row, "copies", f"storage {storage} at {listed[1:]}: {what}")
    for place, move in unlisted.items():
        findings.add(
            "copies",
            None,
            "copies",
            f"storage {place[0]} at {place[1:]} (moves row {move}) is valid at the cut, not listed",
        )


def check_arenas(plan: Plan, machine: Hardware, away: Absences, findings: Findings) -> None:
    """Rule 14."""
    ends = away.offset_bytes + slot_bytes(plan, machine, away.storage, away.device)
    used = sorted(set(away.device.tolist()))
    needed = {device: int(ends[away.device == device].max()) for device in used}
    bounce = sum(s.bounce_bytes for s in machine.ssd if s.name in needed and not s.gds)
    if bounce:
        needed[HOST] = needed.get(HOST, 0) + bounce
    arenas = plan.metadata.arena_bytes
    for device, size in needed.items():
        if arenas.get(device, 0) < size:
            findings.add(
                "metadata",
                None,
                "arena",
                f"arena_bytes[{device}]: {arenas.get(device, 0)} does not cover {size} bytes of "
                "slots and bounce buffers",
            )


def check_tier_memory(
    plan: Plan, machine: Hardware, is_other_machine: bool, findings: Findings
) -> None:
    """Rule 16. The host budget is the plan's; another machine may have less."""
    host_bytes = plan.metadata.host_memory_bytes
    if is_other_machine:
        host_bytes = min(host_bytes, machine.host.memory_bytes)
    limits = {HOST: host_bytes} | {ssd.name: ssd.capacity_bytes for ssd in machine.ssd}
    for device, limit in limits.items():
        arena = plan.metadata.arena_bytes.get(device, 0)
        if arena > limit:
            findings.add(
                "metadata",
                None,
                "tier_memory",
                f"arena_bytes[{device}]: {arena} is above the {limit} bytes that it may use",
            )
