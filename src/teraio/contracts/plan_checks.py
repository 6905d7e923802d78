"""Is a plan right, judged by nothing but itself? Used by the executor and by the verifier.

Nothing here is shared with a planner or with the simulator: unrolling, placement, copies, slots and
memory are worked out anew from DESIGN (Plan, Semantics). K is the number of kernels.

A plan is *valid* if these hold:

 1. ``tables``: kernels and storages are numbered densely, sizes are not negative, lifetimes lie in
    the cycle, every access lies in its storage's cyclic lifetime, rows ordered, each pair once.
 2. ``metadata``: numbers are finite and not negative, the hardware is readable, the rank exists.
 3. ``range``: storages and kernels of moves exist; before_kernel and prefetch_start are both null
    (a tail) or neither; a persistent storage has no tail.
 4. ``size``: a move carries its storage's nbytes.
 5. ``order``: after_kernel <= offload_start < free_by < prefetch_start <= before_kernel, unrolled
    from after_kernel; for a tail free_by <= death.
 6. ``access``: after_kernel is an access and before_kernel the next one, cyclically for a
    persistent storage; a tail follows the last access. So nothing touches what is away.
 7. ``repeat``: one move per inactive period, hence no two moves of a storage overlap.
 8. ``device``: the tier is host or ssd, the device belongs to it and the rank's GPU reaches it.
 9. ``offset``: the slot begins at a multiple of the device's alignment.
10. ``clean``: a move that does not write rests on a copy in the same place, written by an earlier
    move since whose after_kernel the storage was not written, cyclically for a persistent storage.
    A storage that is never written may rest on a copy that nobody writes and that is always there.
11. ``slot``: a slot is held from the offload_start of the move that writes it to the before_kernel
    (tail: death) of the last move that uses the copy; the next holder of any of its bytes has
    offload_start >= that. The copy that nobody writes holds its slot for ever.
12. ``placement``: where each storage is while kernel 0 runs, as the moves have it.
13. ``copies``: exactly the copies that exist at the cut and are used after it are listed, except
    the one that is the placement itself.
14. ``arena``: arena_bytes of each device cover all slots, and on the host the bounce buffers of
    every SSD used without GDS.

It *fits* if, besides:

15. ``gpu_memory``: at every kernel, allocated bytes of what is alive and not away, plus workspace,
    are within the budget. Away is [free_by, prefetch_start); for a tail free_by through the death.
16. ``tier_memory``: arenas are within the host budget and the capacity of each SSD.
"""

from __future__ import annotations

import math

import numpy as np

from teraio.contracts.hardware import HOST, Hardware
from teraio.contracts.plan import Plan
from teraio.contracts.plan_axis import (
    Absences,
    OrderedAccesses,
    Windows,
    absences,
    order_accesses,
    position_in_life,
    unroll_windows,
)
from teraio.contracts.plan_slots import (
    check_arenas,
    check_copies_table,
    check_slots,
    check_tier_memory,
    expected_placement,
    find_copies,
)
from teraio.contracts.plan_tables import MAX_BYTES, check_tables
from teraio.contracts.table import MISSING, BoolArray, IntArray
from teraio.contracts.violations import Findings, Violation
from teraio.errors import InputError


def check_plan(plan: Plan, hardware: Hardware | None = None) -> list[Violation]:
    """The first violations of the rules above, in their order; empty if the plan is right.

    ``hardware`` takes the place of the machine stored in the plan. A plan is valid if every
    violation's ``rule`` is in ``violations.FIT_RULES``, and fits if none is;
    :func:`find_violations` counts and says so.
    """
    return find_violations(plan, hardware).violations


def find_violations(plan: Plan, hardware: Hardware | None = None) -> Findings:
    """All rules above. Rules 10 on are judged only on storages whose moves keep rules 3 to 9."""
    findings = Findings()
    if not check_tables(plan, findings):
        return findings
    machine = _check_metadata(plan, hardware, findings)
    if machine is None:
        return findings
    ordered = order_accesses(plan)
    in_range = _check_ranges(plan, findings)
    if len(plan.moves) and not in_range.any():
        return findings
    windows = unroll_windows(plan, np.where(in_range, plan.moves.storage, 0))
    _check_sizes(plan, in_range, findings)
    sound = in_range & _check_order(plan, windows, in_range, findings)
    sound &= _check_accesses(plan, windows, ordered, in_range, findings)
    sound &= _check_repeats(plan, in_range, findings)
    sound &= _check_devices(plan, machine, findings)
    unsound = plan.moves.storage[~sound]
    away = absences(plan, windows, ordered, sound & ~np.isin(plan.moves.storage, unsound))
    judged = ~np.isin(plan.storages.storage, unsound)
    _check_tiers(plan, machine, away, judged, findings)
    check_tier_memory(plan, machine, hardware is not None, findings)
    if sound.all():
        _check_gpu_memory(plan, machine, away, hardware is not None, findings)
    return findings


def _check_metadata(plan: Plan, hardware: Hardware | None, findings: Findings) -> Hardware | None:
    """Rule 2. None if nothing further can be judged."""
    metadata = plan.metadata
    before = dict(findings.counts)
    numbers = {
        name: getattr(metadata, name)
        for name in (
            "gpu_memory_bytes",
            "host_memory_bytes",
            "ideal_seconds",
            "predicted_seconds",
            "lower_bound_seconds",
            "peak_gpu_bytes",
            "peak_host_bytes",
        )
    }
    arenas = metadata.arena_bytes
    numbers |= {f"arena_bytes[{device}]": size for device, size in arenas.items()}
    for name, value in numbers.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0:
            message = f"{name}: must be a finite number that is not negative, got {value!r}"
            findings.add("metadata", None, "metadata", message)
    if not 0 <= metadata.rank < metadata.world_size:
        message = f"rank: must be in 0..{metadata.world_size - 1}, got {metadata.rank}"
        findings.add("metadata", None, "metadata", message)
    try:
        machine = plan.hardware if hardware is None else hardware
    except InputError as error:
        findings.add("metadata", None, "metadata", str(error))
        return None
    return machine if findings.counts == before else None


def _check_ranges(plan: Plan, findings: Findings) -> BoolArray:
    """Rule 3."""
    moves, num_kernels = plan.moves, len(plan.kernels)
    good = np.ones(len(moves), dtype=bool)
    bad = (moves.storage < 0) | (moves.storage >= len(plan.storages))
    good &= findings.refuse(
        bad, "moves", "range", lambda row: f"storage: there is no storage {moves.storage[row]}"
    )
    nullable = ("before_kernel", "prefetch_start")
    for name in ("after_kernel", "offload_start", "free_by", *nullable):
        kernels = getattr(moves, name)
        bad = (kernels >= num_kernels) | (kernels < (MISSING if name in nullable else 0))
        good &= findings.refuse(
            bad,
            "moves",
            "range",
            lambda row, name=name, kernels=kernels: (  # type: ignore[misc]
                f"{name}: must be a kernel 0..{num_kernels - 1}, got {kernels[row]}"
            ),
        )
    no_read = moves.before_kernel == MISSING
    half = no_read != (moves.prefetch_start == MISSING)
    good &= findings.refuse(
        half, "moves", "range", lambda row: "before_kernel and prefetch_start: both null or neither"
    )
    endless = np.zeros(len(moves), dtype=bool)
    endless[good] = no_read[good] & (plan.storages.birth[moves.storage[good]] < 0)
    good &= findings.refuse(
        endless,
        "moves",
        "range",
        lambda row: f"before_kernel: null, but storage {moves.storage[row]} is persistent",
    )
    return good


def _check_sizes(plan: Plan, in_range: BoolArray, findings: Findings) -> None:
    """Rule 4."""
    moves = plan.moves
    expected = plan.storages.nbytes[np.where(in_range, moves.storage, 0)]
    findings.refuse(
        in_range & (moves.nbytes != expected),
        "moves",
        "size",
        lambda row: (
            f"nbytes: storage {moves.storage[row]} has {expected[row]}, got {moves.nbytes[row]}"
        ),
    )


def _check_order(
    plan: Plan, windows: Windows, in_range: BoolArray, findings: Findings
) -> BoolArray:
    """Rule 5."""
    w = windows
    freed_late = np.where(w.is_tail, w.free_by > w.death, w.free_by >= w.prefetch_start)
    read_late = ~w.is_tail & (w.prefetch_start > w.before)
    bad = in_range & ((w.offload_start >= w.free_by) | freed_late | read_late)

    def message(row: int) -> str:
        text = (
            f"needs after_kernel {w.after[row]} <= offload_start {w.offload_start[row]} "
            f"< free_by {w.free_by[row]} "
        )
        if w.is_tail[row]:
            return f"{text}<= death {w.death[row]}, unrolled"
        return (
            f"{text}< prefetch_start {w.prefetch_start[row]} "
            f"<= before_kernel {w.before[row]}, unrolled"
        )

    return findings.refuse(bad, "moves", "order", message)


def _check_accesses(
    plan: Plan,
    windows: Windows,
    ordered: OrderedAccesses,
    in_range: BoolArray,
    findings: Findings,
) -> BoolArray:
    """Rule 6."""
    storage = np.where(in_range, plan.moves.storage, 0)
    after = np.where(in_range, windows.after, 0)
    access, found = ordered.find(storage, position_in_life(plan, storage, after))
    good = findings.refuse(
        in_range & ~found,
        "moves",
        "access",
        lambda row: (
            f"after_kernel: kernel {after[row]} does not access storage {plan.moves.storage[row]}"
        ),
    )
    expected = _next_access(plan, ordered, storage, access, after)
    wrong = in_range & found & (expected != windows.before)

    def message(row: int) -> str:
        if expected[row] == MISSING:
            return (
                f"before_kernel: must be null, kernel {after[row]} is the last access of "
                f"storage {storage[row]}"
            )
        return (
            f"before_kernel: storage {storage[row]} is next accessed by kernel {expected[row]}, "
            f"got {'null' if windows.is_tail[row] else windows.before[row]} (unrolled)"
        )

    return good & findings.refuse(wrong, "moves", "access", message)


def _next_access(
    plan: Plan, ordered: OrderedAccesses, storage: IntArray, access: IntArray, after: IntArray
) -> IntArray:
    """Unrolled kernel of the access that follows row ``access`` of ``ordered``; MISSING if none."""
    if len(ordered.storage) == 0:
        return np.full(len(access), MISSING, dtype=np.int64)
    is_last = access == ordered.last[access]
    following = np.where(is_last, ordered.first[access], access + 1)
    unrolled = after + 1 + (ordered.kernel[following] - after - 1) % len(plan.kernels)
    ends = is_last & (plan.storages.birth[storage] >= 0)
    return np.where(ends, MISSING, unrolled)


def _check_repeats(plan: Plan, in_range: BoolArray, findings: Findings) -> BoolArray:
    """Rule 7: all rows but the first of one storage and after_kernel are refused."""
    moves = plan.moves
    rows = np.flatnonzero(in_range)
    period = moves.storage[rows] * len(plan.kernels) + moves.after_kernel[rows]
    _, first = np.unique(period, return_index=True)
    repeats = np.zeros(len(moves), dtype=bool)
    repeats[np.delete(rows, first)] = True
    return findings.refuse(
        repeats,
        "moves",
        "repeat",
        lambda row: (
            f"storage {moves.storage[row]} already leaves after kernel "
            f"{moves.after_kernel[row]} in an earlier row"
        ),
    )


def _check_devices(plan: Plan, machine: Hardware, findings: Findings) -> BoolArray:
    """Rules 8 and 9."""
    moves = plan.moves
    reached = {HOST: "host"} | {s.name: "ssd" for s in machine.ssds_of_rank(plan.metadata.rank)}
    bad = np.ones(len(moves), dtype=bool)
    alignment = np.ones(len(moves), dtype=np.int64)
    for device, tier in reached.items():
        here = moves.device == device
        bad[here] = moves.tier[here] != tier
        alignment[here] = machine.alignment_bytes(device)
    good = findings.refuse(
        bad,
        "moves",
        "device",
        lambda row: (
            f"tier {moves.tier[row]!r}, device {moves.device[row]!r}: "
            f"the GPU of rank {plan.metadata.rank} reaches {reached}"
        ),
    )
    offset = moves.tier_offset_bytes
    return good & findings.refuse(
        (offset < 0) | (offset >= MAX_BYTES) | (offset % alignment != 0),
        "moves",
        "offset",
        lambda row: f"tier_offset_bytes: must be a multiple of {alignment[row]}, got {offset[row]}",
    )


def _check_tiers(
    plan: Plan, machine: Hardware, away: Absences, judged: BoolArray, findings: Findings
) -> None:
    """Rules 10 to 14: what lies outside the GPU. ``judged`` are storages with sound moves only."""
    placement = expected_placement(plan, away)
    copies = find_copies(plan, away, len(plan.kernels), findings)
    check_slots(plan, machine, copies, findings)
    placement.compare(plan, judged, findings)
    check_copies_table(plan, copies, placement, judged, findings)
    check_arenas(plan, machine, away, findings)


def _check_gpu_memory(
    plan: Plan, machine: Hardware, away: Absences, is_other_machine: bool, findings: Findings
) -> None:
    """Rule 15. Budgets given by the user are final, so the plan's own machine does not limit it."""
    budget = plan.metadata.gpu_memory_bytes
    if is_other_machine:
        budget = min(budget, machine.gpu_of_rank(plan.metadata.rank).memory_bytes)
    storages, num_kernels = plan.storages, len(plan.kernels)
    born = storages.birth >= 0
    life = (storages.death - storages.birth)[born] % num_kernels + 1
    sizes = storages.allocated_bytes
    used = plan.kernels.workspace_bytes + sizes[~born].sum()
    used += bytes_per_kernel(storages.birth[born], life, sizes[born], num_kernels)
    used -= bytes_per_kernel(
        away.free_by, away.back - away.free_by, sizes[away.storage], num_kernels
    )
    findings.refuse(
        used > budget,
        "kernels",
        "gpu_memory",
        lambda row: f"{plan.kernels.op[row]} needs {used[row]} bytes, the budget is {budget}",
    )


def bytes_per_kernel(
    start: IntArray, length: IntArray, sizes: IntArray, num_kernels: int
) -> IntArray:
    """Sum of ``sizes`` over the cyclic intervals [start, start + length), at most K long; (K,)."""
    delta = np.zeros(2 * num_kernels + 1, dtype=np.int64)
    first = start % num_kernels
    np.add.at(delta, first, sizes)
    np.add.at(delta, first + length, -sizes)
    unrolled = np.cumsum(delta)
    result: IntArray = unrolled[:num_kernels] + unrolled[num_kernels : 2 * num_kernels]
    return result
